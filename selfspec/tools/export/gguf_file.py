"""Writes models of llama's shape as GGUF, the files of llama.cpp, tokenizer included."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import UnsupportedModelError, UnsupportedOptionError

if TYPE_CHECKING:
    import gguf


@dataclass(frozen=True)
class Architecture:
    """An architecture's name and layout of weights in llama.cpp.

    Attributes:
        in_pairs: whether units of a head that are rotated together lie side by side, not half a head apart.
        rope_factors: whether it reads a table of rotary factors.
    """

    name: str
    in_pairs: bool = False
    rope_factors: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", in_pairs=True, rope_factors=True),
    "mistral": Architecture("llama", in_pairs=True, rope_factors=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
}
"""Architectures that can be written, by `config.model_type`."""

_ROPE_TYPES = ("default", "linear", "llama3")
_AUTO = {torch.float32: "f32", torch.float64: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
# What llama.cpp calls the ways of splitting text before pairs are merged, by what they hold.
_SPLITS = (
    ("\\p{N}{1,3}", "llama-bpe"),
    ("[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|", "qwen2"),
    ('"use_regex": true', "gpt-2"),
)

_BYTE = re.compile("<0x[0-9A-F]{2}>")


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse a model that is not written, for its architecture, its positions, or as the package `gguf` is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UnsupportedOptionError(
            "GGUF files are written by the package gguf, which is not installed: pip install 'selfspec[gguf]'"
        ) from error
    kind = model.config.model_type
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {kind!r} is not written as GGUF, only {', '.join(ARCHITECTURES)}; export a checkpoint and "
            "convert it with llama.cpp's convert_hf_to_gguf.py"
        )
    rope = model.config.rope_parameters["rope_type"]
    factors = _rope_factors(model)
    if rope not in _ROPE_TYPES or (factors is not None and not ARCHITECTURES[kind].rope_factors):
        raise UnsupportedModelError(
            f"rotary positions of type {rope!r} are not written as GGUF for {kind!r}; export a checkpoint and convert "
            "it with llama.cpp's convert_hf_to_gguf.py"
        )


def write_gguf(
    model: PreTrainedModel,
    cut: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    to: Path,
    precision: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a model, cut or whole, and its tokenizer; without one the file takes and gives token ids alone.

    Matrices are in "f32", "f16", "bf16", "q8_0", or "auto" as the model has them; vectors are float32. `progress` is
    called with the tensors written so far and all. An UnsupportedModelError: the tokenizer is of a kind that is not
    written.
    """
    import gguf

    shape = ARCHITECTURES[cut.config.model_type]
    writer = gguf.GGUFWriter(to, shape.name)
    kept = gguf.GGMLQuantizationType[_TYPES[_AUTO[model.dtype] if precision == "auto" else precision]]
    _add_sizes(writer, cut)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        _add_tokenizer(writer, tokenizer, cut.config.vocab_size)
    factors = _rope_factors(model)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[shape.name.upper()], cut.config.num_hidden_layers)
    weights = {name: weight for name, weight in cut.named_parameters() if not _is_tied_head(cut, name)}
    for done, (name, weight) in enumerate(weights.items()):
        if progress is not None:
            progress(done, len(weights))
        values = _numbers(weight)
        if shape.in_pairs and ".q_proj." in name:
            values = _in_pairs(values, cut.config.num_attention_heads)
        if shape.in_pairs and ".k_proj." in name:
            values = _in_pairs(values, cut.config.num_key_value_heads)
        to_keep = gguf.GGMLQuantizationType.F32 if values.ndim == 1 or values.shape[-1] % 32 else kept
        called = names.get_name(name, (".weight", ".bias"))
        assert called is not None, name
        writer.add_tensor(called, np.ascontiguousarray(gguf.quantize(values, to_keep)), raw_dtype=to_keep)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # llama.cpp sees all of the text in every layer, so what a window would hide must not be there.
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    longest = config.max_position_embeddings
    if window and (windows or not getattr(config, "layer_types", None)):
        longest = min(longest, window)
    writer.add_name(config.model_type)
    writer.add_context_length(longest)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _rope_factors(model: PreTrainedModel) -> NDArray[np.float32] | None:
    """Return the divisors of plain rotary frequencies, `[head / 2]`; None: all are 1."""
    table = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    assert isinstance(table, nn.Module)
    found: Tensor = table.inv_freq.detach().double().cpu()  # type: ignore[operator]
    plain = model.config.rope_parameters["rope_theta"] ** -(torch.arange(len(found)).double() / len(found))
    factors = plain / found
    if torch.allclose(factors, torch.ones_like(factors), atol=1e-5):
        return None
    numbers: NDArray[np.float32] = factors.float().numpy()
    return numbers


def _is_tied_head(model: PreTrainedModel, name: str) -> bool:
    return bool(model.config.tie_word_embeddings) and name.startswith("lm_head.")


def _numbers(weight: Tensor) -> NDArray[Any]:
    return weight.detach().to("cpu", torch.float32).numpy()


def _in_pairs(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return units of a head, `[units, ...]`, in llama.cpp's order: those rotated together lie side by side."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    written: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    pairs = _Pairs.of(written) if written and written["model"]["type"] == "BPE" else None
    if pairs is None or not pairs.merges:
        kind = written["model"]["type"] if written else type(tokenizer).__name__
        raise UnsupportedModelError(
            f"a tokenizer of kind {kind} is not written as GGUF, only those that merge pairs (BPE); export a "
            "checkpoint and convert it with llama.cpp's convert_hf_to_gguf.py"
        )
    names = {number: text for text, number in tokenizer.get_vocab().items()}
    tokens = [names.get(number, f"[PAD{number}]") for number in range(size)]
    writer.add_tokenizer_model("llama" if pairs.of_pieces else "gpt2")
    writer.add_tokenizer_pre(pairs.split)
    writer.add_token_list(tokens)
    if pairs.of_pieces:
        # The earliest merge comes first there too, by a score.
        ranks = {pair.replace(" ", ""): rank for rank, pair in reversed(list(enumerate(pairs.merges)))}
        writer.add_token_scores([-float(ranks.get(token, len(ranks))) for token in tokens])
        writer.add_add_space_prefix(pairs.space_before)
    else:
        writer.add_token_merges(pairs.merges)
    writer.add_token_types([pairs.kind_of(number, names.get(number)) for number in range(size)])
    for what in ("bos", "eos", "unk", "pad"):
        token = getattr(tokenizer, f"{what}_token_id")
        if token is not None:
            getattr(writer, f"add_{what}_token_id")(token)
    begun = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(begun) and begun[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(len(begun) > 1 and begun[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


@dataclass(frozen=True)
class _Pairs:
    """A tokenizer that merges pairs.

    Attributes:
        merges: two tokens apart by a space, the first to be merged first.
        of_pieces: whether it is of sentencepiece's kind, and not of bytes.
        split: llama.cpp's name of how text is split before.
        special: whether a token that was added is special, by its number.
    """

    merges: list[str]
    of_pieces: bool
    split: str
    space_before: bool
    special: dict[int, bool]

    @classmethod
    def of(cls, written: dict[str, Any]) -> _Pairs:
        model, splits = written["model"], json.dumps(written["pre_tokenizer"])
        of_pieces = bool(model.get("byte_fallback"))
        # As JSON spells it.
        marks = [(mark if '"' in mark else json.dumps(mark)[1:-1], name) for mark, name in _SPLITS]
        return cls(
            merges=[pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
            of_pieces=of_pieces,
            split="default" if of_pieces else next((name for mark, name in marks if mark in splits), "default"),
            space_before="Prepend" in json.dumps(written["normalizer"]),
            special={token["id"]: token["special"] for token in written["added_tokens"]},
        )

    def kind_of(self, number: int, text: str | None) -> int:
        """Return the type of a token in GGUF; without text it is a row of the model that the tokenizer does not use."""
        import gguf

        if text is None:
            kind = gguf.TokenType.UNUSED
        elif number in self.special:
            kind = gguf.TokenType.CONTROL if self.special[number] else gguf.TokenType.USER_DEFINED
        elif self.of_pieces and _BYTE.fullmatch(text):
            kind = gguf.TokenType.BYTE
        else:
            kind = gguf.TokenType.NORMAL
        if self.of_pieces and text == "<unk>":
            kind = gguf.TokenType.UNKNOWN
        return int(kind)

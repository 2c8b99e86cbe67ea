"""Write tiny models as GGUF, with what their loading reads: sizes, weights in llama.cpp's order, a BPE tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}


def write_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, to: Path, precision: str) -> None:
    config, kind = model.config, model.config.model_type
    writer: Any = gguf.GGUFWriter(to, kind)
    _add_sizes(writer, config)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", np.full(config.head_dim // 2, 8.0, dtype=np.float32))
    names: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    for name, weight in model.named_parameters():
        values = weight.detach().float().numpy()
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            # Units that are rotated together lie side by side there.
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        types = gguf.GGMLQuantizationType
        kept = types.F32 if values.ndim == 1 or values.shape[-1] % 32 else types[_TYPES[precision]]
        called = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(called, np.ascontiguousarray(gguf.quantize(values, kept)), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
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


def _add_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["id"] for token in written["added_tokens"]}
    names = {number: text for text, number in tokenizer.get_vocab().items()}
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in written["model"]["merges"]])
    writer.add_token_types([kinds.CONTROL if number in special else kinds.NORMAL for number in range(size)])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)

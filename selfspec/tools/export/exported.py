"""Export a draft: cut it out of its model, prove it, and write it for another engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.architecture import Adapter, takes
from selfspec.arguments import check_module, checked_path
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.drafter import Drafter
from selfspec.draft.registry import draft_name
from selfspec.errors import UnsupportedModelError
from selfspec.files.writing import check_output_folder, write_json
from selfspec.model.checkpoint import without_progress_bar
from selfspec.model.decodable import check_saved_whole
from selfspec.model.identity import fingerprint, weight_of
from selfspec.model.registry import find_adapter
from selfspec.model.tensor_parallel import check_on_one_process
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner
from selfspec.tools.export.cut_model import cut_model, layers_of, parameter_count
from selfspec.tools.lab.outputs import check_new, whole_folder
from selfspec.version import __version__


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        place: folder or file that was written.
        draft: name of the draft.
        layers: numbers of the model's layers that it holds.
        whole_vocabulary: True if the draft reads some rows of the head, and the export reads all.
        parameters: number of its parameters; tied ones count once.
        share: its parameters divided by the model's.
        size: bytes on the disk.
        off: largest difference of its logits from the draft's on random tokens, in standard deviations of the logits.
    """

    place: str
    draft: str
    layers: tuple[int, ...]
    whole_vocabulary: bool
    parameters: int
    share: float
    size: int
    off: float


def export_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    drafter: Drafter | None,
    to: str | Path,
    *,
    overwrite: bool = False,
    adapter: Adapter | None = None,
) -> Exported:
    """Write a draft as a folder that `transformers`, vLLM and SGLang load as a model.

    It holds a copy of the draft's layers and of the model's embeddings, norm and head. Before the folder is put in its
    place, it is loaded by `transformers`, and its logits are compared with the draft's.

    Args:
        model: a stock model in memory.
        tokenizer: the model's tokenizer, saved beside the weights; None: engines need it from elsewhere.
        drafter: a draft that leaves early or skips whole layers.
        to: a folder that does not exist, or is empty.
        overwrite: True to replace an existing folder.
        adapter: the model's adapter; None: the declared one.

    Raises:
        DraftConfigError: the draft does not run whole layers, or does not fit the model; names what to export instead.
        UnsupportedModelError: the model cannot be cut there, or its weights are not in memory.
        StorageError: the folder is there already, or cannot be written.
    """
    check_module(model)
    place, found = checked_path("to", to), adapter or find_adapter(model)
    if any(weight.is_meta for weight in model.parameters()):
        raise UnsupportedModelError(
            "weights of this model are not in memory, so they cannot be exported; load it without a budget "
            "or device map"
        )
    check_saved_whole(model)
    check_on_one_process(model, "an export")
    layers = layers_of(drafter, model, found)
    assert isinstance(drafter, LayerPathDrafter)
    name, head = draft_name(drafter), drafter.head
    if not overwrite:
        check_new(place, "choose another place, or overwrite it (--overwrite)")
    check_output_folder(place)
    with whole_folder(place) as folder:
        cut = cut_model(model, found, layers)
        with without_progress_bar():
            cut.save_pretrained(folder)
        off = prove(folder, model, found, drafter)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        record = {"draft": name, "layers": list(layers), "base": fingerprint(model), "selfspec": __version__}
        write_json(folder / "selfspec_export.json", record)
    parameters = parameter_count(cut)
    return Exported(
        place=str(place),
        draft=name,
        layers=layers,
        whole_vocabulary=head is not None and head.tokens is not None,
        parameters=parameters,
        share=parameters / parameter_count(model),
        size=sum(file.stat().st_size for file in place.rglob("*") if file.is_file()),
        off=off,
    )


_TOKENS = 24
# Largest difference of logits, in their standard deviations. Another order of sums is within a tenth of it.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_ROUGH = 0.1


@torch.no_grad()
def prove(folder: Path, model: PreTrainedModel, adapter: Adapter, drafter: LayerPathDrafter) -> float:
    """Return the largest difference of a checkpoint's logits from a draft's, in deviations; refuse too much."""
    ids = _random_tokens(model)
    cache = adapter.shared_cache(model, batch=1, limit=ids.shape[1])
    cache.cursors.reserve(ids.shape[1])
    path = drafter.path(len(adapter.decoder_layers(model)))
    draft = ModelRunner(model, adapter, cache).run(PassRequest(path, ids)).logits.double()
    with without_progress_bar():
        loaded = type(model).from_pretrained(folder, dtype=model.dtype, **_kernels(model), use_safetensors=True)
    # As `generate` counts them.
    places = (
        {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None]} if takes(model, "position_ids") else {}
    )
    exported = loaded.to(model.device).eval()(input_ids=ids, use_cache=False, **places).logits.double()
    off = float((exported - draft).abs().max() / draft.std())
    if not off <= _TOLERANCE.get(model.dtype, _ROUGH):
        raise UnsupportedModelError(
            f"the layers of {type(model).__name__} do not compute by themselves what they do in the whole model "
            f"(logits differ by {off:.2g} standard deviations); choose another exit, or export from another model"
        )
    return off


def _random_tokens(model: PreTrainedModel) -> Tensor:
    """Return token ids, `[1, tokens]`, none of which pads: some models take positions from padding."""
    config = model.config.get_text_config(decoder=True)
    longest = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
    vocabulary = weight_of(model.get_input_embeddings()).shape[0]
    words = [token for token in range(min(vocabulary, 1000)) if token != getattr(config, "pad_token_id", None)]
    drawn = torch.randint(len(words), (1, longest), generator=torch.Generator().manual_seed(0))
    return torch.tensor(words)[drawn].to(model.device)


def _kernels(model: PreTrainedModel) -> dict[str, str]:
    """Return the model's implementations of attention and experts, as `from_pretrained` takes them."""
    named = {name: getattr(model.config, f"_{name}_implementation", None) for name in ("attn", "experts")}
    return {f"{name}_implementation": kernel for name, kernel in named.items() if kernel is not None}

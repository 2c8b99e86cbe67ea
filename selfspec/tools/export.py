"""Export a draft as a checkpoint of its own, for other engines: cut it out of its model, prove it, and write it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from selfspec.architecture import Adapter, takes
from selfspec.arguments import check_module, checked_path, shown
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.drafter import Drafter
from selfspec.draft.registry import draft_name
from selfspec.errors import DraftConfigError, UnsupportedModelError
from selfspec.files.writing import check_new, check_output_folder, whole_folder, write_json
from selfspec.measure.summary import Weights
from selfspec.measure.teacher_forced import draft_step_logits
from selfspec.model.checkpoint import without_progress_bar
from selfspec.model.decodable import check_saved_whole
from selfspec.model.identity import fingerprint, weight_of
from selfspec.model.layer_path import Part, Sublayer
from selfspec.model.registry import find_adapter
from selfspec.model.tensor_parallel import check_on_one_process, whole
from selfspec.version import __version__


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        place: folder or file that was written.
        draft: name of the draft.
        layers: numbers of the model's layers that it holds.
        parameters: number of its parameters; tied ones count once.
        share: its parameters divided by the model's.
        size: bytes on the disk.
        off: largest difference of its logits from the draft's on random tokens, in standard deviations of the logits.
    """

    place: str
    draft: str
    layers: tuple[int, ...]
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
    name = draft_name(drafter)
    check_place(place)
    with whole_folder(place) as folder:
        cut = cut_model(model, found, layers)
        with without_progress_bar():
            cut.save_pretrained(folder)
        off = prove(folder, model, found, drafter)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        record = {"draft": name, "layers": list(layers), "base": fingerprint(model), "selfspec": __version__}
        write_json(folder / "selfspec_export.json", record)
    parameters = Weights.of(cut.parameters()).parameters
    return Exported(
        place=str(place),
        draft=name,
        layers=layers,
        parameters=parameters,
        share=parameters / Weights.of(model.parameters()).parameters,
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
    draft = draft_step_logits(model, adapter, drafter, ids).double()
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


# Lists in a config that are as long as a model is deep by chance.
_NO_LAYERS = ("architectures", "eos_token_id", "bos_token_id", "pad_token_id")


def cut_model(model: PreTrainedModel, adapter: Adapter, layers: Sequence[int]) -> PreTrainedModel:
    """Make a model of some layers of another, in ascending order, with its embeddings, norm and head, to be saved.

    It shares their weights; computed tensors, such as rotary tables, take no memory. An UnsupportedModelError: the
    architecture cannot be cut between these layers.
    """
    try:
        config = cut_config(model.config, layers)
        with torch.device("meta"):
            cut: PreTrainedModel = type(model)(config)
        state = _cut_state(model, ".".join(adapter.path(model)), layers)
        cut.load_state_dict(state, strict=True, assign=True)
    # What a config or a model is checked for differs between architectures, and so do the types.
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be cut to layers {', '.join(map(str, layers))}: its config does not say "
            f"what each layer is ({reason}); choose another exit, or export from another model"
        ) from error
    cut.tie_weights()
    cut.generation_config = deepcopy(model.generation_config)
    return cut.eval()


def cut_config(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """Return the config of a model of the layers with these numbers, each as long as its lists of layers say."""
    text = config.get_text_config(decoder=True)
    whole = config.to_dict()
    # The configuration of the text may be a part of a whole one.
    inner = next((whole[name] for name in config.sub_configs if getattr(config, name) is text), whole)
    depth, names = text.num_hidden_layers, getattr(text, "attribute_map", {})
    for name, value in inner.items():
        if isinstance(value, list | tuple) and len(value) == depth and name not in _NO_LAYERS:
            inner[name] = [value[layer] for layer in layers]
    inner[names.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    # Configs that were made for an encoder and a decoder count the layers of each.
    if "decoder_layers" in inner:
        inner["decoder_layers"] = len(layers)
    found: PreTrainedConfig = type(config).from_dict(whole)
    found._attn_implementation = config._attn_implementation
    return found


def _cut_state(model: nn.Module, prefix: str, layers: Sequence[int]) -> dict[str, Tensor]:
    numbers = {layer: place for place, layer in enumerate(layers)}
    state: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        kept = name
        if name.startswith(f"{prefix}."):
            layer, _, inside = name.removeprefix(f"{prefix}.").partition(".")
            if int(layer) not in numbers:
                continue
            kept = f"{prefix}.{numbers[int(layer)]}.{inside}"
        state[kept] = whole(weight).detach()
    return state


def check_place(folder: Path) -> None:
    """Refuse a folder that is there already, or cannot be written: StorageError."""
    check_new(folder, "choose another place")
    check_output_folder(folder)


def layers_of(drafter: Drafter | None, model: PreTrainedModel, adapter: Adapter) -> tuple[int, ...]:
    """Return the layers that a draft is; refuse one that is not whole layers, or was made for another model."""
    if drafter is not None and not isinstance(drafter, Drafter):
        raise DraftConfigError(f"a drafter is exported, such as EarlyExit(layer=4), got {shown(drafter)}")
    if isinstance(drafter, LayerPathDrafter):
        depth = len(adapter.decoder_layers(model))
        path = drafter.path(depth)
        drafter.check_model(model, adapter)
        if path.format is None and drafter.runs_exact_layers(depth) and drafter.head is None:
            runs = {layer: [path.runs(Sublayer(layer, part)) for part in Part] for layer in range(depth)}
            halves = [str(layer) for layer, parts in runs.items() if any(parts) and not all(parts)]
            if halves:
                raise DraftConfigError(
                    f"{draft_name(drafter)} leaves out a part of layers {', '.join(halves)}; other engines run whole "
                    "layers: skip these whole (skip:layers=...), or leave early (exit:E)"
                )
            return tuple(layer for layer, parts in runs.items() if all(parts))
    raise DraftConfigError(
        f"{draft_name(drafter)} is not layers of the model as they are, which is all that a checkpoint holds; export "
        "exit:E or skip:layers=..., and let the other engine look up or quantize by itself (docs/other_engines.md)"
    )

"""Which layers of a model a draft is: what can be a checkpoint of its own, and why other drafts cannot."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.drafter import Drafter
from selfspec.draft.exit_head import ExitAdapter
from selfspec.draft.registry import draft_name
from selfspec.errors import DraftConfigError
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.values import shown


@dataclass(frozen=True)
class DraftLayers:
    """A draft that is whole layers of its model, between the model's own embeddings, norm and head.

    Attributes:
        layers: numbers of the layers that run, ascending.
        exit_adapter: between the last of them and the norm; None: nothing.
        reduced: whether the draft reads few rows of the head. Engines want all rows, so a checkpoint has them all.
    """

    layers: tuple[int, ...]
    exit_adapter: ExitAdapter | None = None
    reduced: bool = False


def layers_of(drafter: Drafter | None, model: PreTrainedModel, adapter: Adapter) -> DraftLayers:
    """Return the layers that a draft is.

    Raises:
        DraftConfigError: it is no whole layers of the model, or does not fit it.
        SelfSpecError: it was made for another model.
    """
    if drafter is None:
        raise DraftConfigError("plain decoding has no draft to export; name one, e.g. exit:4 or skip:layers=3,5")
    if not isinstance(drafter, Drafter):
        raise DraftConfigError(f"a drafter is exported, such as EarlyExit(layer=4), got {shown(drafter)}")
    name = draft_name(drafter)
    if drafter.runs == "model" and not drafter.sources:
        raise DraftConfigError(f"{name} is a checkpoint of its own already; give its folder to the other engine")
    if drafter.sources and drafter.last.runs != "nothing":
        raise DraftConfigError(
            f"{name} drafts from text first, which no checkpoint can; export its last part, "
            f"{draft_name(drafter.last)}, or let vLLM look up by selfspec.tools.export.vllm.LookUps "
            "(docs/other_engines.md)"
        )
    if not isinstance(drafter, LayerPathDrafter):
        raise DraftConfigError(
            f"{name} drafts without a model, so there is no checkpoint to export; vLLM drafts so by "
            "selfspec.tools.export.vllm.LookUps, transformers by prompt_lookup_num_tokens (docs/other_engines.md)"
        )
    depth = len(adapter.decoder_layers(model))
    path = drafter.path(depth)
    drafter.check_model(model, adapter)
    if path.precision is not None:
        raise DraftConfigError(
            f"{name} runs layers in fewer bits, which a checkpoint of these weights does not hold; export the layers "
            "(exit:E, skip:layers=...) and let the engine quantize them"
        )
    if not drafter.runs_exact_layers:
        raise DraftConfigError(
            f"{name} reads less of the cache, or fewer experts, than a checkpoint of these layers would; export the "
            "layers alone (exit:E, skip:layers=...)"
        )
    head = drafter.head
    found = None if head is None else head.adapter
    if found is not None and not isinstance(found, ExitAdapter):
        raise DraftConfigError(
            f"the head of {name} is no exit head of selfspec's, so it cannot be a layer; export exit:E"
        )
    return DraftLayers(_whole_layers(path, name), found, head is not None and head.tokens is not None)


def _whole_layers(path: LayerPath, name: str) -> tuple[int, ...]:
    runs = {layer: [path.runs(Sublayer(layer, part)) for part in Part] for layer in range(path.depth)}
    halves = [layer for layer, parts in runs.items() if any(parts) and not all(parts)]
    if halves:
        raise DraftConfigError(
            f"{name} leaves out a part of layers {', '.join(map(str, halves))}; other engines run whole layers: skip "
            "these whole (skip:layers=...), or leave early (exit:E)"
        )
    return tuple(layer for layer, parts in runs.items() if all(parts))

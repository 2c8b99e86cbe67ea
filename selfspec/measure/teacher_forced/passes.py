"""Single layers of a model over a whole text, every token read as a draft step reads it; and logits of any states."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError
from selfspec.measure.teacher_forced.context import ExactContext, draft_masks
from selfspec.model.adapter import Adapter
from selfspec.model.early_head import DraftHead
from selfspec.model.gated_view import ExactStates, GatedModel
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers
from selfspec.model.view import replaced, view_with_layers

Parts = frozenset[Part]
"""The sublayers of one layer that a path runs."""

WHOLE: Parts = frozenset(Part)
NOTHING: Parts = frozenset()

# How far logits of the whole network may be off when they are computed as a draft step's: rounding, and no more.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 1.0, torch.float16: 0.25}


def parts_run(path: LayerPath) -> tuple[Parts, ...]:
    """Return the parts of each layer that a path runs, first to last."""
    return tuple(frozenset(part for part in Part if path.runs(Sublayer(layer, part))) for layer in range(path.depth))


@dataclass(frozen=True)
class _View:
    """A view of the model that runs (parts of) one layer on given states.

    Attributes:
        gated: the view.
        left: holds what the layer gave in the last pass.
    """

    gated: GatedModel
    left: list[Tensor]


class LayerViews:
    """Views of a model's single layers and of its head, made once for each.

    Args:
        model: the stock causal LM. It is neither changed nor copied.
        adapter: where its layers are.

    Raises:
        UnsupportedModelError: tokens of this architecture cannot be read apart from each other.
    """

    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        if adapter.recurrent or adapter.publishes is not None:
            raise UnsupportedModelError(
                f"acceptance of skip sets cannot be estimated for {type(model).__name__}: its layers keep states or "
                "share keys and values; measure it by generation"
            )
        self.model = model
        self.adapter = adapter
        self.depth = len(adapter.decoder_layers(model))
        self._takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
        self._layers: dict[tuple[int, Parts], _View] = {}
        self._heads: dict[tuple[int, DraftHead | None], GatedModel] = {}

    @property
    def base(self) -> str:
        """The attribute of the model that holds all but its head."""
        return self.adapter.path(self.model)[0]

    def layer(self, index: int, parts: Parts) -> _View:
        """Return a view that runs some parts of one layer and passes through all others."""
        if (index, parts) not in self._layers:
            runs = {Sublayer(index, part) for part in parts}
            first = Sublayer(index, Part.ATTENTION)
            left_out = [each for each in sublayers(self.depth) if each >= first and each not in runs]
            gated = GatedModel(self.model, self.adapter, LayerPath.without(self.depth, left_out).resumed_at(first))
            left: list[Tensor] = []
            gated.module = self._recording(gated.module, {index: left})
            self._layers[index, parts] = _View(gated, left)
        return self._layers[index, parts]

    def head(self, layer: int, head: DraftHead | None) -> GatedModel:
        """Return a view that reads states entering a layer: with a draft's own head, or the model's norm and head."""
        if (layer, head) not in self._heads:
            first = Sublayer(layer, Part.ATTENTION)
            gated = GatedModel(self.model, self.adapter, LayerPath.up_to(self.depth, first).resumed_at(first))
            if head is not None:
                head.install(gated.module, self.model, self.adapter.decoder_layers(gated.module)[layer])
            self._heads[layer, head] = gated
        return self._heads[layer, head]

    def recording_all(self) -> _Recorded:
        """Return a view of the whole model that keeps what every layer gives."""
        outputs: list[list[Tensor]] = [[] for _ in range(self.depth)]
        inputs: list[Tensor] = []
        module = self._recording(self.model, dict(enumerate(outputs)), inputs)
        return _Recorded(module, inputs, outputs)

    def inputs(self, ids: Tensor, positions: Tensor) -> dict[str, Any]:
        """Return the arguments that all passes share."""
        placed = {"position_ids": positions} if self._takes_positions else {}
        return {**placed, "input_ids": ids, "return_dict": True}

    def _recording(
        self, module: nn.Module, into: dict[int, list[Tensor]], entering: list[Tensor] | None = None
    ) -> nn.Module:
        layers: list[nn.Module] = [
            replaced(layer, partial(_record, layer, into[index], entering if index == 0 else None))
            if index in into
            else layer
            for index, layer in enumerate(self.adapter.decoder_layers(module))
        ]
        return view_with_layers(module, self.adapter.path(self.model), layers)


@dataclass(frozen=True)
class _Recorded:
    module: nn.Module
    inputs: list[Tensor]
    outputs: list[list[Tensor]]


class TeacherForcedText:
    """A text, what the full model makes of it, and what single layers would make of it in a draft.

    Args:
        views: of the model.
        ids: texts of one length, `[texts, tokens]`.
        first: the first token that is drafted; all before it is prompt. At least 1.
        reach: positions of a draft that are told apart, at least 1.

    Attributes:
        states: what enters each layer, and what the last one gives, `[texts, tokens, hidden]`.
        logits: the full model's, of every drafted token, `[texts, drafted tokens, vocab]`.
        passes: layers run so far besides those of the full model, times tokens.
    """

    @torch.no_grad()
    def __init__(self, views: LayerViews, ids: Tensor, first: int, reach: int = 1) -> None:
        self._views = views
        self._ids = ids
        self.first = first
        self.reach = reach
        self.passes = 0
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device)[None]
        self._context = ExactContext(views.depth)
        recorded = views.recording_all()
        output = recorded.module(
            **views.inputs(ids, positions), past_key_values=self._context, use_cache=True, attention_mask=None
        )
        self.states = [recorded.inputs[0], *(outputs[0] for outputs in recorded.outputs)]
        self.logits: Tensor = output.logits[:, first - 1 : -1]
        config = views.model.config.get_text_config(decoder=True)
        self._masks = draft_masks(config, length, reach, self.states[0].dtype, ids.device)
        self._inputs = views.inputs(ids.repeat(1, reach), positions.repeat(1, reach))

    @property
    def drafted(self) -> int:
        """How many tokens of each text are drafted."""
        return self._ids.shape[1] - self.first

    def exact(self, layer: int) -> Tensor:
        """Return what enters a layer where all before it ran, `[texts, reach * tokens, hidden]`."""
        return torch.cat([self.states[layer]] * self.reach, -2)

    @torch.no_grad()
    def run(self, layer: int, parts: Parts, hidden: Tensor) -> Tensor:
        """Run one layer, or a part of it, on states of draft steps.

        Args:
            layer: which.
            parts: what of it runs.
            hidden: `[times * texts, reach * tokens, hidden]`.

        Returns:
            The same shape.
        """
        if not parts:
            return hidden
        view = self._views.layer(layer, parts)
        times = hidden.shape[-3] // self._ids.shape[0]
        inputs = {**self._inputs, "input_ids": self._inputs["input_ids"].repeat(times, 1)}
        view.gated.enter(ExactStates(hidden))
        base = view.gated.module.get_submodule(self._views.base)
        base(**inputs, past_key_values=self._context, use_cache=True, attention_mask=self._masks)
        view.gated.leave()
        self.passes += hidden.shape[-2] * times * self._ids.shape[0]
        return view.left.pop()

    @torch.no_grad()
    def read(self, hidden: Tensor, layer: int | None = None, head: DraftHead | None = None) -> Tensor:
        """Return the logits of every drafted token.

        Args:
            hidden: states of draft steps, `[texts, reach * tokens, hidden]`.
            layer: where they would have entered; None: behind the last.
            head: what reads them; None: the model's own norm and head.

        Returns:
            `[reach, texts, drafted tokens, vocab]`; -inf at tokens the head cannot draft. In copy k the first k of the
            drafted tokens mean nothing.
        """
        length = self._ids.shape[1]
        copies = hidden.unflatten(-2, (self.reach, length))[..., self.first - 1 : -1, :].flatten(-3, -2)
        # Only an adapter depends on where the states enter.
        entered = 0 if layer is None or head is None or head.adapter is None else layer
        view = self._views.head(entered, head)
        view.enter(ExactStates(copies))
        ids = self._inputs["input_ids"][:, : copies.shape[-2]]
        positions = torch.zeros(1, ids.shape[1], dtype=torch.long, device=ids.device)
        logits = view.module(**self._views.inputs(ids, positions), use_cache=False).logits
        view.leave()
        if head is not None:
            logits = head.spread(logits, self._views.model.get_output_embeddings().weight.shape[0])
        apart: Tensor = logits.unflatten(1, (self.reach, self.drafted)).transpose(0, 1)
        return apart

    def check(self) -> None:
        """Check that this architecture can be judged: the whole network, read as a draft, must say what the model says.

        Raises:
            UnsupportedModelError: it does not.
        """
        hidden = self.exact(0)
        for layer in range(self._views.depth):
            hidden = self.run(layer, WHOLE, hidden)
        said = self.read(hidden)
        off = max(
            (said[copy, :, copy:] - self.logits[:, copy:]).abs().max().item()
            for copy in range(self.reach)
            if copy < self.drafted
        )
        if not off <= _ROUNDING.get(said.dtype, 1e-2) * max(1.0, self.logits.abs().max().item()):
            raise UnsupportedModelError(
                f"acceptance of skip sets cannot be estimated for {type(self._views.model).__name__}: read as a draft, "
                f"the whole network is off by {off:.3g}; measure it by generation"
            )


def _record(
    layer: Callable[..., Any], into: list[Tensor], entering: list[Tensor] | None, *args: Any, **kwargs: Any
) -> Any:
    if entering is not None:
        entering.append(args[0] if args else kwargs["hidden_states"])
    output = layer(*args, **kwargs)
    into.append(output[0] if isinstance(output, tuple) else output)
    return output

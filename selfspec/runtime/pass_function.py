"""A pass as a function of tensors: a view of the stock model runs it; where it reads and writes is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from selfspec.architecture import takes
from selfspec.cache.masks import attention_mask
from selfspec.cache.open_block import OpenBlock
from selfspec.cache.shared_cache import Slots
from selfspec.cache.source import Source
from selfspec.model.early_head import DraftHead
from selfspec.model.features import Features, Point
from selfspec.model.gated_view import ExactStates, GatedModel
from selfspec.model.layer_path import LayerPath
from selfspec.runtime.slot_cache import SlotCache


@dataclass(frozen=True)
class PassKind:
    """What passes have in common that one program can run.

    Attributes:
        head: what reads the last states; None: the model's own.
        base: attribute of the model that holds all but the head, and is all that runs; None: the head runs too.
        rows: of the batch.
        width: tokens of each row.
        embedded: whether it takes their embeddings.
        uniform: whether all rows write the same slots.
        nodes: of the tree whose nodes they read; None: of a chain.
        padded: whether slots past the last token may be seen, and are masked.
        entering: names of the attentions whose outputs enter with states; None: no states enter.
        taps: points whose states are kept.
    """

    path: LayerPath
    head: DraftHead | None
    base: str | None
    rows: int
    width: int
    embedded: bool
    uniform: bool
    nodes: int | None
    padded: bool
    entering: tuple[str, ...] | None
    taps: tuple[Point, ...]


@dataclass(frozen=True)
class PassTensors:
    """What a pass takes, and the same in a row as tensors alone.

    Attributes:
        tokens: `[rows, width]`, or embeddings, `[rows, width, hidden]`.
        entering: what enters at the start of the path; None: nothing.
        slots: where keys and values are.
    """

    tokens: Tensor
    entering: ExactStates | None
    slots: Slots

    def flat(self) -> tuple[Tensor, ...]:
        """All of them, in an order that `PassFunction` knows."""
        slots = self.slots
        entering = () if self.entering is None else (self.entering.hidden, *self.entering.attention.values())
        block = () if slots.block is None else slots.block.tensors
        places = (slots.slot_mapping, slots.positions, slots.visible, *block)
        copied = () if slots.copied is None else (slots.copied,)
        return (self.tokens, *places, *entering, *copied, *slots.memory)


@dataclass(frozen=True)
class PassResult:
    """What a pass gives, and the same in a row.

    Attributes:
        logits: `[rows, width, vocab]`; None where the pass ends before the head.
        states: what it left at `path.resume_point`; None where the path leaves nothing.
        features: states at the points that are tapped.
    """

    logits: Tensor | None
    states: ExactStates | None
    features: Features = field(default_factory=dict)

    def flat(self) -> tuple[Tensor, ...]:
        """All of them: logits, states, features."""
        logits = () if self.logits is None else (self.logits,)
        states = () if self.states is None else (self.states.hidden, *self.states.attention.values())
        return (*logits, *states, *self.features.values())

    def first(self, width: int) -> PassResult:
        """What it gives of the first tokens of each row."""
        logits = None if self.logits is None else self.logits[:, :width]
        states = None if self.states is None else self.states.first(width)
        return PassResult(logits, states, {point: each[..., :width, :] for point, each in self.features.items()})


@dataclass(frozen=True)
class PassFunction:
    """Called with the tensors of `PassTensors.flat`, it gives those of `PassResult.flat`.

    Attributes:
        view: runs the path.
    """

    view: GatedModel
    kind: PassKind
    cache_name: str
    config: PreTrainedConfig

    def __call__(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.masked(tensors, self._masks(tensors, self.kind.padded)).flat()

    def masks(self, tensors: tuple[Tensor, ...]) -> Any:
        """What the model takes as its mask, made even where it needs none: a tensor, or a dict of them."""
        return self._masks(tensors, True)

    def masked(self, tensors: tuple[Tensor, ...], mask: Any) -> PassResult:
        """What the pass gives under a mask."""
        tokens, slots, entering = self._parted(tensors)
        inputs = {
            self.cache_name: SlotCache(slots, self.kind.padded, self.kind.path.cache_bits),
            **model_inputs(tokens, slots.positions, mask),
        }
        return run_view(self.view, self.kind.base, entering, inputs)

    def _masks(self, tensors: tuple[Tensor, ...], padded: bool) -> Any:
        tokens, slots, _ = self._parted(tensors)
        rows, seen, dtype = tokens.shape[0], slots.visible.shape[0], slots.buffers[0].dtype
        return attention_mask(
            self.config,
            slots.slot_mapping,
            rows,
            seen,
            dtype,
            block=slots.block,
            padded=padded,
            window=self.kind.path.window,
        )

    def _parted(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Slots, ExactStates | None]:
        tokens, slot_mapping, positions, visible, *rest = tensors
        block = None
        if self.kind.nodes is not None:
            start, depths, sees, *rest = rest
            block = OpenBlock(start, depths, sees)
        entering = None
        if self.kind.entering is not None:
            hidden, *rest = rest
            count = len(self.kind.entering)
            attention = dict(zip(self.kind.entering, rest[:count], strict=True))
            entering, rest = ExactStates(hidden, attention), rest[count:]
        copied, copies = None, 0
        if self.kind.path.cache_bits is not None:
            copied, *rest = rest
            # Of each layer four, and two buffers.
            copies = len(rest) * 4 // 6
        slots = Slots(slot_mapping, positions, visible, tuple(rest[copies:]), block, copied, tuple(rest[:copies]))
        return tokens, slots, entering


def model_inputs(tokens: Tensor, positions: Tensor | None, mask: Any) -> dict[str, Any]:
    """What a stock model is called with, besides its cache.

    Args:
        tokens: `[rows, width]`, or embeddings in their place, `[rows, width, hidden]`.
        positions: `[rows or 1, width]`; None: the model takes none.
        mask: as the model takes it.
    """
    return {
        **({} if positions is None else {"position_ids": positions}),
        "inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens,
        "attention_mask": mask,
        "use_cache": True,
        "output_attentions": False,
        "output_hidden_states": False,
        "return_dict": True,
    }


def beside_source(module: nn.Module, inputs: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """What a stock model with an encoder is called with, or its decoder, so that it reads a source and no input anew.

    Args:
        module: the model, or the part of it that runs.
        inputs: of its decoder, as `model_inputs` names them.
        source: what the encoder has read.
    """
    if takes(module, "encoder_outputs"):
        names = {name: f"decoder_{name}" for name in _OF_DECODER}
        beside: dict[str, Any] = {"encoder_outputs": source.outputs, "attention_mask": source.mask}
    else:
        names, beside = {}, {"encoder_hidden_states": source.states, "encoder_attention_mask": source.mask}
    return {names.get(name, name): value for name, value in inputs.items()} | beside


_OF_DECODER = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")


def run_view(
    view: GatedModel,
    base: str | None,
    entering: ExactStates | None,
    inputs: Mapping[str, Any],
    source: Source | None = None,
) -> PassResult:
    """Run a view of a model.

    Args:
        view: runs some path.
        base: attribute of the view that holds all but the head, and is all that runs; None: the head runs too.
        entering: what enters at the start of the path.
        inputs: of the model, those of its text.
        source: what its encoder has read; None: it has none.
    """
    view.enter(entering)
    module: nn.Module = view.module if base is None else view.module.get_submodule(base)
    output = module(**(inputs if source is None else beside_source(module, inputs, source)))
    return PassResult(output.logits if base is None else None, view.leave(), view.features())

"""Measure how often a target accepts what drafts would propose on given text, all exits in one pass over each text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError, PromptError
from selfspec.measure.estimate import Estimate
from selfspec.measure.own_text import Continuation
from selfspec.measure.watch import Unwatched, Watch
from selfspec.model.early_head import DraftHead
from selfspec.model.gated_view import ExactStates, GatedModel
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.substitutes import Substitutes
from selfspec.model.view import hidden_states
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

TEMPERATURES = (0.8, 1.0)
# Logits compared at a time: 64 MiB in float32.
_VALUES = 2**24
# Tokens of a text that a draft over copies of the cache reads at a time, exactly: more than a draft has.
_PIECE = 16


@dataclass
class ExitFigures:
    """Sums over the positions of a text, at one exit.

    `accepted` is by temperature: above 0 the sum of 1 - TV(p, q), at 0 the positions where both have one likeliest
    token.
    """

    positions: int = 0
    accepted: dict[float, float] = field(default_factory=dict)

    def add(self, full: Tensor, draft: Tensor, temperatures: Sequence[float] = (1.0,)) -> None:
        """Count some positions, by logits `[positions, vocab]`; the draft's are -inf where it has no such token."""
        self.positions += full.shape[0]
        self._count(0.0, full.argmax(-1) == draft.argmax(-1))
        size = max(1, _VALUES // full.shape[-1])
        for logits in zip(full.split(size), draft.split(size), strict=True):
            for temperature in temperatures:
                p, q = ((each.float() / temperature).softmax(-1) for each in logits)
                self._count(temperature, torch.minimum(p, q))

    def _count(self, temperature: float, accepted: Tensor) -> None:
        self.accepted[temperature] = self.accepted.get(temperature, 0.0) + float(accepted.sum())

    def alpha(self, temperature: float = 1.0) -> float:
        """Return the mean of 1 - TV(p, q), the acceptance rate (Leviathan et al., 2023); at 0 the top-1 agreement."""
        return self.accepted[temperature] / self.positions


@dataclass
class Acceptance:
    """Holds the figures of one draft against the target, teacher-forced, sequence by sequence."""

    sequences: list[ExitFigures] = field(default_factory=list)

    @property
    def positions(self) -> int:
        return sum(each.positions for each in self.sequences)

    def alpha(self, temperature: float) -> Estimate:
        """Return the acceptance rate, the mean of 1 - TV(p, q) or at 0 the top-1 agreement; interval over sequences."""
        accepted = [each.accepted[temperature] for each in self.sequences]
        return Estimate.of_ratio(accepted, [each.positions for each in self.sequences])

    def to_dict(self) -> dict[str, Any]:
        rates = {f"{at:g}": self.alpha(at).to_dict() for at in self.sequences[0].accepted if at}
        return {"positions": self.positions, "agreement": self.alpha(0.0).to_dict(), "alpha": rates}


class ForcedLogits(NamedTuple):
    """Logits of target and draft at the judged positions of one text, both `[positions, vocab]`."""

    name: str
    target: Tensor
    draft: Tensor


def teacher_forced(
    model: PreTrainedModel,
    adapter: Adapter,
    drafters: Mapping[str, LayerPathDrafter],
    sequences: Sequence[Tensor | Continuation],
    temperatures: Sequence[float] = TEMPERATURES,
    watch: Watch | None = None,
) -> dict[str, Acceptance]:
    """Compare each draft's distribution with the target's at every position of some texts.

    Exits, with or without a head of their own, are read off the states of one target pass. Other paths take a pass
    each. Acceptance while generating differs from this: there a draft also follows its own tokens. Drafters of one
    precision share their substitutes. Of continuations, only the tokens after the prompt are judged.

    Raises:
        DraftConfigError: a draft does not fit the model, or a temperature is not above 0.
        PromptError: there is no sequence, or one has fewer than two tokens.
    """
    if any(not temperature > 0 for temperature in temperatures):
        raise DraftConfigError(f"temperatures must be above 0, got {list(temperatures)}; agreement is that of 0")
    measured = {name: Acceptance() for name in drafters}
    for name, full, draft in forced_logits(model, adapter, drafters, sequences, watch):
        figures = ExitFigures()
        figures.add(full, draft, temperatures)
        measured[name].sequences.append(figures)
    return measured


@torch.no_grad()
def forced_logits(
    model: PreTrainedModel,
    adapter: Adapter,
    drafters: Mapping[str, LayerPathDrafter],
    sequences: Sequence[Tensor | Continuation],
    watch: Watch | None = None,
) -> Iterator[ForcedLogits]:
    """Read target and drafts at every judged position of some texts; arguments and errors as of `teacher_forced`."""
    texts = [_as_text(sequence) for sequence in sequences]
    if not texts:
        raise PromptError("no text to measure acceptance on: give at least one sequence")
    readout, substitutes = Readout(model, adapter), Substitutes.of(model)
    for drafter in drafters.values():
        drafter.check(readout.depth)
        drafter.check_model(model, adapter)
        drafter.prepare(model, substitutes)
    exits = {name: left for name, each in drafters.items() if (left := each.early_exit(readout.depth)) is not None}
    progress = watch or Unwatched()
    progress.begin(len(texts))
    for text in texts:
        progress.step("acceptance of every exit")
        ids = text.ids.to(model.device)
        # The logits at a position are those of the token after it.
        judged = slice(text.prompt - 1, -1)
        with readout.recorded(sorted({left.layer for left in exits.values()})) as states:
            full = model(input_ids=ids, use_cache=False).logits[0, judged]
        for name, drafter in drafters.items():
            left = exits.get(name)
            # Some models keep several streams of states, which their own norm alone does not make one.
            if left is not None and states[left.layer].ndim == 3:
                head = left.head or DraftHead()
                draft = head.alone(readout.logits(head.adapted(states[left.layer][:, judged])))[0]
            else:
                draft = _draft_logits(model, adapter, drafter, ids, substitutes)[judged]
            yield ForcedLogits(name, full, draft)


def _draft_logits(
    model: PreTrainedModel, adapter: Adapter, drafter: LayerPathDrafter, ids: Tensor, substitutes: Substitutes
) -> Tensor:
    """Return the logits of draft steps at all positions of a text, `[tokens, vocab]`."""
    length = ids.shape[1]
    cache = adapter.shared_cache(model, 1, length + _PIECE, _PIECE)
    cache.cursors.reserve(length)
    runner = ModelRunner(model, adapter, cache, substitutes)
    path = drafter.path(runner.depth)
    if path.view.bits is None and path.view.top_keys is None:
        return runner.run(PassRequest(path, ids, head=drafter.head)).logits[0]
    # Copies, and what the target attended to, are of tokens that it has read.
    found = []
    for piece in ids.split(_PIECE, 1):
        if path.view.top_keys is not None:
            runner.choose_top(path.view.top_keys, piece[:, :1])
        found.append(runner.run(PassRequest(path, piece, head=drafter.head)).logits[0])
        runner.prefill(piece, [piece.shape[1]])
        cache.commit([piece.shape[1]])
    return torch.cat(found)


def _as_text(sequence: Tensor | Continuation) -> Continuation:
    text = Continuation(torch.atleast_2d(sequence)) if isinstance(sequence, Tensor) else sequence
    if text.ids.ndim != 2 or text.ids.shape[0] != 1 or not 1 <= text.prompt < text.ids.shape[1]:
        raise PromptError(
            f"a text to measure acceptance on must be [1, tokens] with a token after its prompt of {text.prompt}, got "
            f"{list(text.ids.shape)}"
        )
    return text


class Readout:
    """Reads what a stock model's exits would say, with gradients; the model is not changed."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        self._layers = adapter.decoder_layers(model)
        self.depth = len(self._layers)
        first = Sublayer(0, Part.ATTENTION)
        # No layer runs, and states given at the first come out at the norm and the head.
        self._head = GatedModel(model, adapter, LayerPath.up_to(self.depth, first).resumed_at(first))

    @contextmanager
    def recorded(self, exits: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Yield the states at each exit, `[batch, tokens, hidden]`, filled in as passes run inside the `with` block."""
        states: dict[int, Tensor] = {}

        def record(exit_layer: int, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[exit_layer] = hidden_states(args, kwargs)

        with ExitStack() as hooks:
            for each in exits:
                hooks.enter_context(
                    self._layers[each].register_forward_pre_hook(partial(record, each), with_kwargs=True)
                )
            yield states

    def logits(self, states: Tensor) -> Tensor:
        """Apply the model's norm and head to states `[batch, tokens, hidden]`; return `[batch, tokens, vocab]`."""
        tokens = torch.zeros(states.shape[-3:-1], dtype=torch.long, device=states.device)
        self._head.enter(ExactStates(states))
        logits: Tensor = self._head.module(input_ids=tokens, use_cache=False).logits
        self._head.enter(None)
        return logits

"""The programs of one wrapped model: which kinds of passes have one, made when it pays, used once proved."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from selfspec.model.features import Point
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath
from selfspec.model.vocabulary import weight_of
from selfspec.runtime.chain import Chain, Draws
from selfspec.runtime.model_state import ModelState
from selfspec.runtime.pass_function import PassFunction, PassKind, PassOutput, PassTensors
from selfspec.runtime.process_lock import ProcessLock
from selfspec.runtime.recordable import why_not
from selfspec.runtime.runtime import Function, OtherSizesError, Runtime
from selfspec.runtime.timer import Timer

# Comparisons over one number of slots after which a program is used over that number, if over no other yet.
_SAME = 3
# Kinds of passes that are kept count of. Batches that shrink row by row bring new ones with each row.
_MOST_KINDS = 256


@dataclass(frozen=True)
class _Program:
    function: Function
    has_logits: bool
    leaves: tuple[str, ...] | None
    points: tuple[Point, ...]

    @property
    def is_plain(self) -> bool:
        """Whether it gives logits alone."""
        return self.has_logits and self.leaves is None and not self.points

    def run(self, tensors: PassTensors, width: int) -> PassOutput:
        outputs = iter(self.function(tensors.flat()))
        logits = next(outputs) if self.has_logits else None
        states = None
        if self.leaves is not None:
            states = ExactStates(next(outputs), {name: next(outputs) for name in self.leaves})
        return PassOutput(logits, states, dict(zip(self.points, outputs, strict=True))).first(width)


@dataclass
class _Candidate:
    """How far a kind has come on the way to its program."""

    passes: int = 0
    waited: float = 0.0
    program: _Program | None = None
    lengths: list[int] = field(default_factory=list)
    stock_seconds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    proved: bool = False
    refused: str | None = None
    making: ProcessLock = field(default_factory=ProcessLock)

    def serves(self, length: int) -> bool:
        """Whether its program runs passes over this number of slots.

        A row that has ended holds a batch at one number of slots, and short answers to like prompts come at one. A
        program that has not been seen over others may have taken that one for granted.
        """
        return self.proved or self.lengths.count(length) >= _SAME

    def refuse(self, reason: str) -> None:
        self.program, self.proved, self.refused = None, False, reason


class GraphCache:
    """Belongs to one wrapper; several threads may run passes with it at once.

    Args:
        runtime: makes programs.
        clock: tells the time, in seconds.

    Attributes:
        runtime: as given.
    """

    def __init__(self, runtime: Runtime, clock: Callable[[], float] = time.perf_counter) -> None:
        self.runtime = runtime
        self._clock = clock
        self._current: BoundPrograms | None = None

    def __reduce__(self) -> tuple[type[GraphCache], tuple[Runtime]]:
        # A copy makes its own: programs belong to the weights in this memory.
        return GraphCache, (self.runtime,)

    def for_another_model(self) -> GraphCache:
        """Make one for the programs of another model, by the same runtime."""
        return GraphCache(self.runtime, self._clock)

    @property
    def bucket(self) -> int:
        """Passes of a round look at a multiple of this number of slots."""
        return self.runtime.bucket

    @property
    def refusals(self) -> dict[PassKind, str]:
        """Kinds that the stock modules run for good, and why."""
        return {kind: each.refused for kind, each in self._candidates.items() if each.refused is not None}

    @property
    def proved(self) -> list[PassKind]:
        """Kinds that programs run."""
        return [kind for kind, each in self._candidates.items() if each.proved]

    @property
    def _candidates(self) -> dict[PassKind, _Candidate]:
        return {} if self._current is None else self._current.candidates

    def bound_to(self, model: PreTrainedModel) -> BoundPrograms | None:
        """Return the programs that fit the model as it is now, for one generation. Drop all of them if it has changed.

        Returns:
            None: passes of the model as it is are not recorded.
        """
        self.runtime.check(weight_of(model.get_input_embeddings()).device)
        if self.runtime.after is None:
            return None
        current = self._current
        if current is None or current.state.model is not model or not current.state.holds():
            # Programs hold weights that the model may no longer have.
            self._current = current = None
            if why_not(model) is None:
                self._current = current = BoundPrograms(self.runtime, self._clock, ModelState(model))
        # Foreign hooks may act differently on each call, and a recording would repeat what they did once.
        return None if current is None or current.state.others else current


class BoundPrograms:
    """The programs of one state of a model.

    A generation uses the programs of the state in which the model was when it began. If the model is changed meanwhile,
    nothing more is recorded.

    Attributes:
        candidates: how far kinds of passes have come.
    """

    def __init__(self, runtime: Runtime, clock: Callable[[], float], state: ModelState) -> None:
        self.runtime = runtime
        self.state = state
        self.candidates: dict[PassKind, _Candidate] = {}
        self._clock = clock

    def serving(self, kind: PassKind, most: int) -> PassKind:
        """The kind whose program runs passes of `kind`, over `most` tokens of each row at most.

        It is `kind` itself where that has one or is to get one, else the least wide of those that have.
        """
        candidate = self.candidates.get(kind)
        if candidate is None or candidate.program is not None or self._is_due(candidate):
            return kind
        wider = [
            other
            for other, each in self.candidates.items()
            if each.proved and kind.width < other.width <= most and replace(other, width=kind.width) == kind
        ]
        if not wider:
            return kind
        candidate.passes += 1
        return min(wider, key=lambda other: other.width)

    def run(
        self,
        kind: PassKind,
        tensors: PassTensors,
        width: int,
        *,
        stock: Callable[[], PassOutput],
        function: Callable[[], PassFunction],
    ) -> PassOutput:
        """Run a pass, by its program where there is one.

        Args:
            kind: of the pass, or of a wider one that serves it.
            tensors: what that takes.
            width: tokens of each row of the pass itself.
            stock: runs it with the stock modules.
            function: gives it as a function of tensors, to make a program of.
        """
        candidate = self.candidates.get(kind)
        if candidate is None:
            if len(self.candidates) >= _MOST_KINDS:
                return stock()
            candidate = self.candidates.setdefault(kind, _Candidate())
        length = tensors.slots.visible.shape[0]
        program = candidate.program
        if program is not None and candidate.serves(length):
            try:
                return program.run(tensors, width)
            except (OtherSizesError, torch.OutOfMemoryError):
                return stock()
            # It held for what it was tried on. The stock modules write its keys and values once more.
            except Exception as error:
                candidate.refuse(_said(error))
                return stock()
        candidate.passes += 1
        wanted = candidate.refused is None and self._is_due(candidate)
        # Another thread may be making the program.
        if not wanted or not self.runtime.takes(tensors) or not candidate.making.acquire(blocking=False):
            began = self._clock()
            result = stock()
            candidate.waited += self._clock() - began
            return result
        try:
            return self._try(kind, candidate, tensors, width, stock, function)
        finally:
            candidate.making.release()

    def _is_due(self, candidate: _Candidate) -> bool:
        """Whether enough passes of a kind have come, or have taken as long as a program takes to make."""
        after = self.runtime.after
        return after is not None and (candidate.passes > after or candidate.waited > self.runtime.making_seconds)

    def chain(self, kind: PassKind, first: PassTensors, draws: Draws) -> Chain | None:
        """Take draft steps in one go by the program of `kind`; None: there is none, or it takes them one by one.

        Args:
            kind: of each step, over one token of each row.
            first: of the first step, whose tokens, slots and positions are written over.
            draws: of the tokens.
        """
        candidate = self.candidates.get(kind)
        program = None if candidate is None or not candidate.proved else candidate.program
        return self.runtime.chain(program.function, first, draws) if program is not None and program.is_plain else None

    def forget(self, path: LayerPath) -> None:
        """Drop the programs of passes along a path, so that there is room for others."""
        for kind in [kind for kind in list(self.candidates) if kind.path == path]:
            self.candidates.pop(kind, None)

    def _try(
        self,
        kind: PassKind,
        candidate: _Candidate,
        tensors: PassTensors,
        width: int,
        stock: Callable[[], PassOutput],
        function: Callable[[], PassFunction],
    ) -> PassOutput:
        if not self.state.holds():
            return stock()
        timer = Timer(self._clock, tensors.tokens.device)
        began = timer.now()
        expected = stock()
        stock_seconds = timer.now() - began
        try:
            if candidate.program is None:
                candidate.program = self._made(tensors, function(), expected)
            began = timer.now()
            given = candidate.program.run(tensors, width)
            seconds = timer.now() - began
        except OtherSizesError:
            return expected
        # Whatever goes wrong in making or trying a program, the stock modules write its keys and values once more.
        except Exception as error:
            candidate.refuse(_said(error))
            return stock()
        if not self.runtime.agree(kind, given.flat(), expected.flat()):
            candidate.refuse("it gave something else than the stock modules")
            return stock()
        if candidate.lengths:
            # The first run also prepares the program.
            candidate.stock_seconds.append(stock_seconds)
            candidate.seconds.append(seconds)
        length = tensors.slots.visible.shape[0]
        candidate.lengths.append(length)
        tried = len(candidate.lengths) > 1 and self.runtime.is_tried(candidate.lengths)
        if tried or candidate.serves(length):
            if min(candidate.seconds) < min(candidate.stock_seconds):
                candidate.proved = tried
            else:
                candidate.refuse("it took longer than the stock modules")
        return expected

    def _made(self, tensors: PassTensors, function: PassFunction, expected: PassOutput) -> _Program:
        leaves = None if expected.states is None else tuple(expected.states.attention)
        program = self.runtime.program(function, tensors)
        return _Program(program, expected.logits is not None, leaves, tuple(expected.features))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]

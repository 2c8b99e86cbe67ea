"""The programs of one wrapped model: made for kinds of passes where they pay, and used once they are proved."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.cursors import MOST_GRAPHS
from selfspec.cache.shared_cache import SharedCache
from selfspec.device import Timer
from selfspec.model.gated_view import ExactStates, Point
from selfspec.model.identity import weight_of
from selfspec.process import ProcessLock
from selfspec.runtime.model_state import QUANTISERS, ModelState, why_not
from selfspec.runtime.pass_function import PassFunction, PassKind, PassTensors
from selfspec.runtime.request import NO_LOGITS, Chain, Draws, PassResult, Races
from selfspec.runtime.runtime import LATER, Function, OtherSizesError, Runtime

_LOG = logging.getLogger(__name__)
# Number of comparisons over one number of slots after which a program is used for that number alone.
_SAME = 3
# The most kinds of passes that are counted. Batches that shrink row by row add new kinds with each row.
_MOST_KINDS = 256


@dataclass(frozen=True)
class _Program:
    function: Function
    has_logits: bool
    leaves: tuple[str, ...] | None
    points: tuple[Point, ...]

    def run(self, tensors: PassTensors, width: int) -> PassResult:
        outputs = iter(self.function(tensors.flat()))
        logits = next(outputs) if self.has_logits else NO_LOGITS
        states = None
        if self.leaves is not None:
            states = ExactStates(next(outputs), {name: next(outputs) for name in self.leaves})
        features = {point: next(outputs) for point in self.points}
        return PassResult(logits, states, features, written=tuple(outputs)).first(width)


@dataclass
class _Candidate:
    """The progress of a kind of pass towards its program. Passes and seconds waited are those that it could serve."""

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
        """Return whether its program runs passes over this number of slots; tried on one alone, it may fit no other."""
        return self.proved or self.lengths.count(length) >= _SAME

    def try_later(self) -> None:
        """Free the memory of its program, and make it anew after many more passes."""
        self.program, self.proved, self.passes, self.waited = None, False, -LATER, 0.0

    def refuse(self, reason: str) -> None:
        self.program, self.proved, self.refused = None, False, reason


@dataclass
class _Repeated:
    """A function that comes again, and how often it came."""

    times: float = 0
    program: Function | None = None


class GraphCache:
    """Holds the programs that `runtime` makes for one wrapper; several threads may run passes with it at once.

    `refused` says why the stock modules run all passes of the model that was met last; None: programs may.
    """

    def __init__(self, runtime: Runtime, clock: Callable[[], float] = time.perf_counter) -> None:
        self.runtime = runtime
        self._clock = clock
        self._current: BoundPrograms | None = None
        self.refused: str | None = None

    def __reduce__(self) -> tuple[type[GraphCache], tuple[Runtime]]:
        # A copy makes its own programs, since programs belong to the weights in this memory.
        return GraphCache, (self.runtime,)

    def for_another_model(self) -> GraphCache:
        """Make a cache for the programs of another model, by the same runtime."""
        return GraphCache(self.runtime, self._clock)

    @property
    def refusals(self) -> dict[PassKind, str]:
        """Kinds that the stock modules always run, with the reasons."""
        return {kind: each.refused for kind, each in self._candidates.items() if each.refused is not None}

    @property
    def proved(self) -> list[PassKind]:
        """Kinds that programs run."""
        return [kind for kind, each in self._candidates.items() if each.proved]

    @property
    def _candidates(self) -> dict[PassKind, _Candidate]:
        return {} if self._current is None else self._current.candidates

    def known(self, model: PreTrainedModel) -> BoundPrograms | None:
        """Return the programs of a model that has not changed since they were bound to it; None: it may have."""
        current = self._current
        if current is None or current.state.model is not model or current.state.others:
            return None
        return current if current.state.holds() else None

    def bound_to(self, model: PreTrainedModel) -> BoundPrograms | None:
        """Return the programs of the model as it is now, and drop those of an earlier state; None: do not record."""
        self.runtime.check(weight_of(model.get_input_embeddings()).device)
        if self.runtime.after is None:
            return None
        current = self._current
        if current is None or current.state.model is not model or not current.state.holds():
            # Programs hold weights that the model may no longer have.
            self._current = current = None
            # Other runtimes would run code of quantisers on tensors without values, which it may keep.
            further = QUANTISERS if self.runtime.captures else ()
            self.refused = why_not(model, further)
            if self.refused is None:
                self._current = current = BoundPrograms(self.runtime, self._clock, ModelState(model, further))
        if current is not None and current.state.others:
            # Foreign hooks may act differently on each call, but a recording would repeat their first action.
            self.refused = f"it runs {current.state.others[0]}, which may act differently next time"
            return None
        return current


class BoundPrograms:
    """Holds the programs of the model's state when a generation begins; if it changes, nothing more is recorded."""

    def __init__(self, runtime: Runtime, clock: Callable[[], float], state: ModelState) -> None:
        self.runtime = runtime.of_one_model()
        self.state = state
        self.candidates: dict[PassKind, _Candidate] = {}
        # By which adapter the model was found decodable, as it still is while its state holds.
        self.decodable_by: Adapter | None = None
        self._clock = clock
        self._ended: SharedCache | None = None
        self._repeated: dict[Function, _Repeated] = {}

    def begin(self, cache: SharedCache) -> None:
        """Give an empty cache the slots of the last one, whose addresses programs may have; else free them."""
        ended, self._ended = self._ended, None
        if ended is not None and cache.empty:
            cache.adopt(ended)

    def end(self, cache: SharedCache) -> None:
        """Keep the slots of an ended cache where programs are bound to them."""
        if self.runtime.captures:
            cache.end()
            self._ended = cache

    @cached_property
    def view(self) -> PreTrainedModel:
        """The view of the model that its stock passes run: making one takes as long as a pass of a small model."""
        return self.runtime.viewed(self.state.model)

    def serving(self, kind: PassKind, most: int) -> PassKind:
        """Return the kind whose program runs passes of `kind`, over at most `most` tokens of each row.

        It is `kind` itself if that has a program or gets one, else the narrowest wider kind with a program, else the
        widest that gets one: kinds that differ in width alone share a program until one of their own is worth making.
        """
        candidate = self.candidates.get(kind)
        if candidate is None or candidate.program is not None or self._is_due(candidate):
            return kind
        wider = {other: each for other, each in self._wider(kind).items() if other.width <= most}
        proved = [other for other, each in wider.items() if each.proved]
        if not proved:
            due = (other for other, each in wider.items() if self._is_due(each))
            return max(due, key=lambda other: other.width, default=kind)
        served = min(proved, key=lambda other: other.width)
        # At most what a program of its own would have saved: making one has to be worth it.
        candidate.waited += min(wider[served].seconds, default=0.0) * (1 - kind.width / served.width)
        return served

    def _wider(self, kind: PassKind) -> dict[PassKind, _Candidate]:
        """Return the kinds whose programs may run passes of `kind`, with more tokens behind."""
        return {other: each for other, each in self.candidates.items() if each.refused is None and other.covers(kind)}

    def run(
        self,
        kind: PassKind,
        tensors: PassTensors,
        width: int,
        *,
        stock: Callable[[], PassResult],
        function: Callable[[], PassFunction],
    ) -> PassResult:
        """Run a pass over `width` tokens of each row, by its program if there is one, else by `stock`.

        `kind` and `tensors` may be of a wider pass that serves it; `function` returns the pass to make a program of.
        """
        candidate = self.candidates.get(kind)
        if candidate is None:
            if len(self.candidates) >= _MOST_KINDS:
                return stock()
            narrower = [each.passes for other, each in self.candidates.items() if kind.covers(other)]
            candidate = self.candidates.setdefault(kind, _Candidate(max(narrower, default=0)))
        length = tensors.slots.visible.shape[0]
        program = candidate.program
        if program is not None and candidate.serves(length):
            try:
                return program.run(tensors, width)
            except OtherSizesError:
                return stock()
            except torch.OutOfMemoryError:
                candidate.try_later()
                return stock()
            # A proved program may still fail on new inputs. The stock modules write its keys and values again.
            except Exception as error:
                candidate.refuse(_said(error))
                return stock()
        counted = [candidate, *self._wider(kind).values()]
        for each in counted:
            each.passes += 1
        wanted = candidate.refused is None and self._is_due(candidate)
        # Another thread may be making the program.
        if not wanted or not self.runtime.takes(tensors) or not candidate.making.acquire(blocking=False):
            began = self._clock()
            result = stock()
            seconds = self._clock() - began
            for each in counted:
                each.waited += seconds
            return result
        try:
            return self._try(kind, candidate, tensors, width, stock, function)
        finally:
            candidate.making.release()

    def _is_due(self, candidate: _Candidate) -> bool:
        """Return whether passes of a kind were numerous enough, or took as long as making a program."""
        after = self.runtime.after
        return after is not None and (candidate.passes > after or candidate.waited > self.runtime.making_seconds)

    def repeat(self, function: Function, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute a function of tensors alone, in one launch once it has come often enough.

        Functions that are equal give the same of the same tensors, whatever came before.
        """
        if self.runtime.after is None or not self.runtime.captures:
            return function(tensors)
        known = self._repeated.pop(function, None) or _Repeated()
        self._repeated[function] = known
        if len(self._repeated) > MOST_GRAPHS:
            # Drop what came least recently.
            self._repeated.pop(next(iter(self._repeated)), None)
        known.times += 1
        if known.times <= self.runtime.after:
            return function(tensors)
        try:
            if known.program is None:
                known.program = self.runtime.repeated(function, tensors[0].device)
            return known.program(tensors)
        except torch.OutOfMemoryError:
            known.program, known.times = None, -LATER
        # Whatever a capture fails of, the function itself gives the same.
        except Exception as error:
            known.times = -math.inf
            _LOG.warning("%s could not be captured, and is launched piece by piece: %s", function, _said(error))
        return function(tensors)

    def chain(self, kind: PassKind, first: PassTensors, draws: Draws | Races) -> Chain | None:
        """Take draft steps by the program of `kind`, the first of them `first`; None: they go one by one."""
        candidate = self.candidates.get(kind)
        program = None if candidate is None or not candidate.proved else candidate.program
        if program is None or not program.has_logits or program.points:
            return None
        if isinstance(draws, Races):
            draws = replace(draws, leaves=program.leaves)
        elif program.leaves is not None:
            return None
        return self.runtime.chain(program.function, first, draws)

    def _try(
        self,
        kind: PassKind,
        candidate: _Candidate,
        tensors: PassTensors,
        width: int,
        stock: Callable[[], PassResult],
        function: Callable[[], PassFunction],
    ) -> PassResult:
        if not self.state.holds():
            return stock()
        timer = Timer(self._clock, tensors.tokens.device)
        began = timer.now()
        expected = stock()
        stock_seconds = timer.now() - began
        try:
            if candidate.program is None:
                program = self.runtime.program(function(), tensors)
                leaves = None if expected.states is None else tuple(expected.states.attention)
                has_logits = expected.logits is not NO_LOGITS
                candidate.program = _Program(program, has_logits, leaves, tuple(expected.features))
            began = timer.now()
            given = candidate.program.run(tensors, width)
            seconds = timer.now() - began
        except OtherSizesError:
            return expected
        except torch.OutOfMemoryError:
            candidate.try_later()
            return stock()
        # If making or trying a program fails in any way, the stock modules write its keys and values again.
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


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]

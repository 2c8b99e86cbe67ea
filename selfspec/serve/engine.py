"""The engine: a thread that runs requests which come and go, many at a time, on one wrapped model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from selfspec.api import SelfSpeculative
from selfspec.arguments import check_callables, check_kind, is_finite, shown
from selfspec.errors import CannotFitError, EngineStoppedError, QueueFullError, UnsupportedOptionError
from selfspec.serve.cache_budget import CacheBudget
from selfspec.serve.events import EngineStats, Event, Ticket
from selfspec.serve.row_decoder import RowDecoder
from selfspec.serve.row_request import RowRequest
from selfspec.serve.scheduler import Entry, Scheduler


class Engine:
    """Serves requests on a wrapped model: rows join a running batch, and leave it when they end.

    A row's answer is what `spec.generate` gives of it alone: greedily token for token, with a seed that of
    `spec.generate(..., seed=seed, accept="coupled")`, and otherwise in distribution, whatever runs beside it. While the
    engine runs, nobody else should change the model.

    `submit`, `stats` and the methods of tickets may be called from any thread. On a CPU, passes in other threads of the
    process slow the engine down for as long as these threads live: run them in threads that end.

    Attributes:
        spec: the wrapped model.
    """

    def __init__(
        self,
        spec: SelfSpeculative,
        *,
        max_rows: int = 32,
        cache_bytes: int | None = None,
        prefill_tokens: int = 512,
        max_waiting: int = 256,
        kept_bytes: int | None = None,
    ) -> None:
        """Make an engine, which runs once it is started.

        Args:
            spec: the wrapped model.
            max_rows: that run at once.
            cache_bytes: bound of keys, values and states; None: `max_rows` rows of the model's context, or of 4096
                tokens where it is longer, and the states of one more that is read.
            prefill_tokens: of prompts that are read before each round of the rows that run. Layers with states read a
                prompt as a whole.
            max_waiting: requests that may wait, besides those that run.
            kept_bytes: how much of `cache_bytes` caches of rows that have ended may take, for rows that begin alike; 0:
                none is kept. None: a quarter, and at most 1 GiB. Where drafters keep states of their own of each token,
                none is kept.

        Raises:
            UnsupportedModelError, DraftConfigError, UnsupportedOptionError: the model, its draft or its rule cannot be
                served, or a number is out of range, by name.
            ClosedError: `spec` was unwrapped.
        """
        if spec is None:
            raise UnsupportedOptionError("an engine needs a wrapped model; write Engine(selfspec.wrap(model))")
        check_kind("spec", spec, SelfSpeculative, "write Engine(selfspec.wrap(model))")
        for name, value in (
            ("max_rows", max_rows),
            ("prefill_tokens", prefill_tokens),
            ("max_waiting", max_waiting),
            ("cache_bytes", 1 if cache_bytes is None else cache_bytes),
            ("kept_bytes", kept_bytes or 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UnsupportedOptionError(f"{name} must be an integer of at least 1, got {shown(value)}")
        self.spec = spec
        self._decoder = RowDecoder(spec.joining_rows())
        # OpenMP keeps a team of threads for each thread that has run a product, as long as that lives. Once all teams
        # have more threads than there are cores, each of them sleeps between two products, and waking it takes longer
        # than a product of a small model. So only the engine's own thread keeps one.
        with ThreadPoolExecutor(1, "selfspec-passes") as thread:
            sizes = thread.submit(self._decoder.measured).result()
        limits = self._decoder.limits
        if cache_bytes is None:
            cache_bytes = sizes.of(max_rows, min(self._decoder.context, 4096)) + sizes.row
        if limits is not None:
            cache_bytes = min(cache_bytes, sizes.of(1, limits.context))
            prefill_tokens = min(prefill_tokens, limits.at_once)
        self._budget = CacheBudget(sizes, cache_bytes, max_rows)
        if self._budget.longest < 1:
            raise UnsupportedOptionError(
                f"cache_bytes={cache_bytes} has no room for one token; this model takes {sizes.of(1, 1)} for it and "
                f"{sizes.slot} for each further one"
            )
        kept = min(cache_bytes // 4, 2**30) if kept_bytes is None else min(kept_bytes, cache_bytes)
        self._scheduler = Scheduler(self._decoder, self._budget, prefill_tokens, kept)
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._incoming: list[Entry] = []
        self._arrivals = 0
        self._thread: threading.Thread | None = None
        self._stopping = self._draining = False
        self._broken: BaseException | None = None

    def start(self) -> None:
        """Start the thread.

        Raises:
            EngineStoppedError: it was started before; make another engine.
        """
        with self._changed:
            if self._thread is not None:
                raise EngineStoppedError("this engine was started before; make another one")
            self._thread = threading.Thread(target=self._run, name="selfspec-engine", daemon=True)
            self._thread.start()

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, and end the thread. Every ticket has its last event when this returns.

        Args:
            drain: whether what was submitted runs to its end.
            timeout: seconds to wait for that; then it is ended as without `drain`. None: any time.

        Raises:
            UnsupportedOptionError: the timeout is no number of seconds.
        """
        if timeout is not None and not (is_finite(timeout) and timeout >= 0):
            raise UnsupportedOptionError(f"timeout must be a number of seconds, at least 0, got {shown(timeout)}")
        with self._changed:
            thread, self._stopping = self._thread, True
            self._draining = drain
            self._changed.notify_all()
        if thread is None:
            self._end_all()
            return
        thread.join(timeout if drain else None)
        if thread.is_alive():
            with self._changed:
                self._draining = False
            thread.join()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.stop(drain=error is None)

    def submit(self, request: RowRequest, on_event: Callable[[Event], object] | None = None) -> Ticket:
        """Take a request and return at once; events go to the ticket or to `on_event`, see `Ticket`.

        Raises:
            PromptError, UnsupportedOptionError: the request cannot be honoured, by name.
            CannotFitError: it can never run within the bound of the cache.
            QueueFullError: too many wait.
            EngineStoppedError: the engine does not run.
        """
        self._check_running()
        check_callables("on_event", None if on_event is None else [on_event])
        return self.submit_all([request], [Ticket(on_event)])[0]

    def submit_all(self, requests: Sequence[RowRequest], tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        """Take several requests at once, so that those of one prompt read it once; see `submit`."""
        self._check_running()
        rows = [self._decoder.row(request) for request in requests]
        for row, request in zip(rows, requests, strict=True):
            if row.longest > self._budget.longest:
                raise CannotFitError(
                    f"the prompt ({row.length} tokens) plus max_new_tokens ({request.max_new_tokens}) takes "
                    f"{self._budget.sizes.of(1, row.longest)} bytes of the cache, which may have {self._budget.bound}: "
                    f"{self._budget.longest} tokens; ask for fewer, or raise cache_bytes"
                )
        with self._changed:
            self._check_running()
            waiting = len(self._incoming) + self._scheduler.waiting
            if waiting >= self._max_waiting:
                raise QueueFullError(f"{waiting} requests wait, the most that may; try again later")
            for row, ticket, request in zip(rows, tickets, requests, strict=True):
                self._incoming.append(Entry(self._arrivals, ticket, row, row.length, request.drafts))
                self._arrivals += 1
            self._changed.notify_all()
        return tickets

    def stats(self) -> EngineStats:
        """Count what runs and what was done."""
        with self._changed:
            return self._scheduler.stats(len(self._incoming))

    @property
    def longest(self) -> int:
        """The most tokens of a row, prompt included: by the model's context, and by the bound of the cache."""
        return min(self._decoder.context, self._budget.longest)

    @property
    def running(self) -> bool:
        """True while requests are taken."""
        return self._thread is not None and not self._stopping and self._broken is None

    def _check_running(self) -> None:
        if not self.running:
            broken = self._broken
            why = "was not started" if self._thread is None else "is stopped"
            raise EngineStoppedError(f"the engine {why if broken is None else f'broke: {broken}'}") from broken

    @torch.no_grad()
    def _run(self) -> None:
        """Run steps until it is stopped."""
        try:
            while self._wait():
                self._scheduler.step()
        except BaseException as error:
            self._broken = error
            raise
        finally:
            self._end_all()

    def _wait(self) -> bool:
        """Wait for work, and take what was submitted; return whether to go on."""
        with self._changed:
            while not (self._incoming or self._scheduler.busy or self._stopping):
                self._changed.wait()
            for entry in self._incoming:
                self._scheduler.add(entry)
            self._incoming.clear()
            return self._scheduler.busy and (self._draining or not self._stopping)

    def _end_all(self) -> None:
        with self._changed:
            self._stopping = True
            for entry in self._incoming:
                self._scheduler.add(entry)
            self._incoming.clear()
        self._scheduler.end_all()

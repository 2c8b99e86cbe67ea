"""The caller's side of a request: its events as they come, and the way to cancel it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

from selfspec.serve.events import Event, Finished


class Ticket:
    """A request that was submitted. Every method may be called from any thread.

    Args:
        on_event: is called with each event, on the engine's thread: it must return at once and not raise, as
            `lambda event: loop.call_soon_threadsafe(queue.put_nowait, event)` does. None: `events` has them.
    """

    def __init__(self, on_event: Callable[[Event], object] | None = None) -> None:
        self._on_event = on_event
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._finished: Finished | None = None
        self._done = threading.Event()

    def cancel(self) -> None:
        """End the row before its next round. It still gets its last event; one that has ended is left as it is."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    @property
    def finished(self) -> Finished | None:
        """The last event; None before the row has ended."""
        return self._finished

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Wait for the events, one by one, up to the last; `timeout` seconds for each, None for any time.

        Raises:
            TimeoutError: nothing came in that time. The row goes on; iterate again, or cancel it.
            RuntimeError: events go to `on_event`.
        """
        if self._on_event is not None:
            raise RuntimeError("events of this ticket go to on_event; submit without it to iterate over them")
        while True:
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"no event within {timeout} s") from None
            yield event
            if isinstance(event, Finished):
                return

    def tokens(self, timeout: float | None = None) -> list[int]:
        """Wait for the end, `timeout` seconds in all or any time, and return what was committed.

        Raises:
            TimeoutError: it did not end in that time.
            SelfSpecError: the row ended by an error.
        """
        until = None if timeout is None else time.monotonic() + timeout
        tokens: list[int] = []
        while True:
            left = None if until is None else max(until - time.monotonic(), 0.0)
            event = next(self.events(left))
            if not isinstance(event, Finished):
                tokens += event.tokens
            elif event.error is not None:
                raise event.error
            else:
                return tokens

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the row; whether it came in time."""
        return self._done.wait(timeout)

    def deliver(self, event: Event) -> None:
        """Hand an event to the caller. The engine calls this."""
        if isinstance(event, Finished):
            self._finished = event
        try:
            if self._on_event is None:
                self._events.put(event)
            else:
                self._on_event(event)
        finally:
            if isinstance(event, Finished):
                self._done.set()

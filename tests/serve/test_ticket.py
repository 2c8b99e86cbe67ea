"""Tickets: events in order, time-outs, callbacks."""

from __future__ import annotations

import pytest

from selfspec.errors import RowError
from selfspec.serve.events import Committed, Event, Finished, Ticket

ROUND = Committed((1, 2), None, 3, 1)
END = Finished("stop", None, 4, 2, 3, 1)


def test_events_come_in_order_and_end_with_the_last() -> None:
    ticket = Ticket()
    for event in (ROUND, ROUND, END):
        ticket.deliver(event)
    assert list(ticket.events(timeout=1)) == [ROUND, ROUND, END]
    assert ticket.finished is END
    assert ticket.wait(0)


def test_a_time_out_loses_no_event() -> None:
    ticket = Ticket()
    with pytest.raises(TimeoutError):
        next(ticket.events(timeout=0.01))
    assert not ticket.wait(0)
    ticket.deliver(END)
    assert list(ticket.events(timeout=1)) == [END]


def test_tokens_are_those_of_all_rounds() -> None:
    ticket = Ticket()
    for event in (ROUND, ROUND, END):
        ticket.deliver(event)
    assert ticket.tokens(timeout=1) == [1, 2, 1, 2]


def test_tokens_raise_the_error_that_ended_the_row() -> None:
    ticket = Ticket()
    ticket.deliver(Finished("error", RowError("it broke"), 4, 0, 0, 0))
    with pytest.raises(RowError, match="it broke"):
        ticket.tokens(timeout=1)


def test_a_callback_takes_the_place_of_the_iterator() -> None:
    seen: list[Event] = []
    ticket = Ticket(seen.append)
    ticket.deliver(ROUND)
    ticket.deliver(END)
    assert seen == [ROUND, END]
    assert ticket.wait(0)
    with pytest.raises(RuntimeError, match="on_event"):
        next(ticket.events())


def test_cancelling_is_remembered() -> None:
    ticket = Ticket()
    assert not ticket.cancelled
    ticket.cancel()
    assert ticket.cancelled

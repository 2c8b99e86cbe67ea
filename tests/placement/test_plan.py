"""Plans stay within the budget, keep what they can, and say what would be enough."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.errors import UnsupportedOptionError
from selfspec.placement.plan import SLOTS, Bandwidth, Memory, Plan, parse_bytes, plan_memory, shown_bytes

DISK = Bandwidth(memory=10e9, stream=1e9)
FORMATS = ("int8", "int4")


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    layers = tuple(draw(st.lists(st.integers(2**20, 2**26), min_size=1, max_size=12)))
    sizes = st.integers(0, 2**26)
    fewer = {"int8": tuple(size // 4 for size in layers), "int4": tuple(size // 6 for size in layers)}
    return Memory(draw(sizes), draw(sizes), layers, max(layers) // 2, fewer, draw(sizes), draw(sizes))


def taken(memory: Memory, plan: Plan) -> int:
    resident = memory.least + sum(memory.layers[: plan.resident])
    if plan.resident == len(memory.layers):
        return resident
    fewer = 0 if plan.format is None else sum(memory.substitutes[plan.format][plan.resident :])
    return resident + fewer + SLOTS * memory.largest


@given(memory=memories(), share=st.floats(0.0, 1.5), drafts=st.booleans())
def test_a_plan_is_within_its_budget_and_keeps_what_it_can(memory: Memory, share: float, drafts: bool) -> None:
    budget = max(1, int(share * (memory.least + sum(memory.layers))))
    try:
        plan = plan_memory(memory, budget, DISK, FORMATS if drafts else ())
    except UnsupportedOptionError as error:
        least = re.search(r"at least (\d+\.\d+ \w+)", str(error))
        assert least is not None
        assert plan_memory(memory, int(1.01 * parse_bytes("memory", least[1])) + 2048, DISK, FORMATS if drafts else ())
        return
    assert plan.total == taken(memory, plan) <= budget
    assert plan.streamed == sum(memory.layers[plan.resident :])
    if plan.streamed:
        assert (plan.format is not None) == drafts
        more = Plan(plan.resident + 1, 0, plan.format, 0, DISK, 1.0)
        # Of layers that draft, one stays streamed before the head.
        assert taken(memory, more) > budget or more.resident == len(memory.layers) - drafts


def test_drafts_promise_more_than_plain_streaming() -> None:
    memory = Memory(0, 2**26, (2**28,) * 20, 2**26, {"int8": (2**26,) * 20, "int4": (2**25,) * 20}, 0, 0)
    plan = plan_memory(memory, 2**31, DISK, FORMATS)
    assert plan.drafting is not None
    assert plan.drafting > 4 * plan.plain
    assert plan.draft_length > 8


def test_too_little_says_how_much_is_needed_and_what_for() -> None:
    memory = Memory(2**28, 2**27, (2**28,) * 4, 2**25, {"int8": (2**26,) * 4, "int4": (2**25,) * 4}, 2**24, 2**24)
    with pytest.raises(UnsupportedOptionError) as refused:
        plan_memory(memory, 2**28, DISK, FORMATS)
    assert str(refused.value) == (
        "memory=256.00 MiB is too little for this model: it takes at least 672.00 MiB (256.00 MiB for the process, "
        "128.00 MiB for weights that stay, 128.00 MiB for weights on their way, 128.00 MiB for copies that draft, "
        "16.00 MiB for keys and values, 16.00 MiB to work with); raise it, ask for a shorter context, or decode "
        "without drafts (draft=False, --draft none), which takes 544.00 MiB"
    )
    with pytest.raises(UnsupportedOptionError, match=r"at least 544.00 MiB \(.*shorter context$"):
        plan_memory(memory, 2**28, DISK, ())


def test_copies_of_weights_that_always_stay_count_where_all_layers_stay() -> None:
    fewer: dict[str, tuple[int, ...]] = {"int8": (2**18,) * 4, "int4": (2**17,) * 4}
    memory = Memory(0, 2**26, (2**20,) * 4, 2**10, fewer, 0, 0, 0, {"int8": 2**24, "int4": 2**23})
    room = memory.least + sum(memory.layers) + sum(memory.substitutes["int8"])
    assert plan_memory(memory, room + 2**24, DISK, ["int8"], beside="int8").resident == 4
    streams = plan_memory(memory, room + 2**24 - 1, DISK, ["int8"], beside="int8")
    assert streams.resident < 4
    # There they are not made.
    assert streams.total < room


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [(1, 1), ("6GiB", 6 * 2**30), ("1.5 gib", 3 * 2**29), (" 500 MB ", 500_000_000), ("64B", 64), ("1TiB", 2**40)],
)
def test_sizes_are_read(size: str | int, bytes_: int) -> None:
    assert parse_bytes("memory", size) == bytes_


# Digits and letters of other scripts, too.
WORDS = ["", "6", "6 G", "-1GiB", "0GiB", "0.1B", "1e3GiB", "6 GiB each", "\uff16GiB", "\u0666GiB", "6\uff27iB"]


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None, *WORDS, "9" * 5000 + "GiB"], ids=lambda size: str(size)[:20])
def test_what_is_no_size_is_refused_by_name(size: object) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"memory=.*6GiB"):
        parse_bytes("memory", size)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "text"), [(512, "0.5 KiB"), (3 * 2**19, "1.50 MiB"), (6 * 2**30, "6.00 GiB")])
def test_sizes_are_shown(size: int, text: str) -> None:
    assert shown_bytes(size) == text

"""Plans of memory: nothing that lives at the same time overlaps, and memory is used again behind a wait alone."""

from __future__ import annotations

from selfspec.runtime.native.instructions import Kind, Operation, Place, Storage
from selfspec.runtime.native.memory import planned, with_waits


def chain(count: int) -> list[Operation]:
    """Operations that each read what the one before and the one before that wrote."""
    storages = [Storage(100 + 10 * number) for number in range(count)]
    return [
        Operation(Kind.MAP, [Place(each) for each in storages[max(0, number - 2) : number + 1]], storages[number])
        for number in range(count)
    ]


def test_threads_wait_for_what_others_write() -> None:
    assert [operation is None for operation in with_waits(chain(3))] == [False, True, False, True, False]


def test_threads_wait_before_they_write_what_others_read() -> None:
    cache, states = Storage(argument=0), Storage(8)
    read = Operation(Kind.ATTEND, [Place(cache), Place(states)], states)
    write = Operation(Kind.WRITE, [Place(cache)], cache)
    assert with_waits([read, write]) == [read, None, write]


def test_independent_operations_run_without_waiting() -> None:
    x = Storage(argument=0)
    operations = [Operation(Kind.PRODUCT, [Place(x), Place(y)], y) for y in (Storage(8), Storage(8), Storage(8))]
    assert None not in with_waits(operations)


def test_what_lives_at_the_same_time_does_not_overlap() -> None:
    operations = with_waits(chain(40))
    offsets, size = planned(operations)
    used = [operation for operation in operations if operation is not None]
    for number, operation in enumerate(used):
        # Its result is read twice more.
        living = {id(each.writes): each.writes for each in used[number : number + 3]}
        for later in used[number + 1 : number + 3]:
            first, second = sorted((operation.writes, later.writes), key=lambda each: offsets[id(each)])
            assert offsets[id(first)] + 4 * first.numbers <= offsets[id(second)]
        assert max(offsets[key] + 4 * each.numbers for key, each in living.items()) <= size
    assert size < sum(4 * operation.writes.numbers for operation in used) / 4


def test_memory_is_not_used_again_before_a_wait() -> None:
    first, second = Storage(64), Storage(64)
    operations = [Operation(Kind.MAP, [Place(each)], each) for each in (first, second)]
    offsets, _ = planned(operations)
    assert offsets[id(first)] != offsets[id(second)]
    offsets, _ = planned([operations[0], None, operations[1]])
    assert offsets[id(first)] == offsets[id(second)]

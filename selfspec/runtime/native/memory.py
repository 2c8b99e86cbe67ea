"""Plan where the threads of a program wait, and where its storages lie in the memory of a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from selfspec.runtime.native.instructions import Operation, Storage

# Of a cache line, in bytes. Vectors may be read and written a line past the end.
_LINE = 64


def with_waits(operations: Iterable[Operation]) -> list[Operation | None]:
    """Let threads wait, None, before an operation that reads what others of them may be writing, or the reverse."""
    found: list[Operation | None] = []
    written: set[int] = set()
    read: set[int] = set()
    for operation in operations:
        reads = set(map(id, operation.reads))
        if reads & written or id(operation.writes) in read:
            found.append(None)
            written, read = set(), set()
        found.append(operation)
        written.add(id(operation.writes))
        read |= reads
    return found


def planned(operations: Sequence[Operation | None]) -> tuple[dict[int, int], int]:
    """Place every temporary storage; those that live at different times may lie in the same memory.

    Memory is used again only behind a wait: without one, a thread that is ahead would write what another still reads.

    Args:
        operations: with waits.

    Returns:
        Offsets in bytes by id of the storage, and the bytes that all take.
    """
    last: dict[int, int] = {}
    for number, operation in enumerate(operations):
        if operation is not None:
            last |= {id(storage): number for storage in (operation.writes, *operation.reads) if storage.is_temporary}
    offsets: dict[int, int] = {}
    free: list[tuple[int, int]] = []
    freed: list[tuple[int, int]] = []
    ending: dict[int, list[Storage]] = {}
    end = 0
    for number, operation in enumerate(operations):
        if operation is None:
            free, freed = _merged([*free, *freed]), []
            continue
        storage = operation.writes
        if storage.is_temporary and id(storage) not in offsets:
            offsets[id(storage)], free, end = _taken(_bytes(storage), free, end)
            ending.setdefault(last[id(storage)], []).append(storage)
        freed += [(offsets[id(each)], _bytes(each)) for each in ending.pop(number, [])]
    return offsets, end


def _bytes(storage: Storage) -> int:
    return (4 * storage.numbers + 2 * _LINE - 1) // _LINE * _LINE


def _taken(size: int, free: list[tuple[int, int]], end: int) -> tuple[int, list[tuple[int, int]], int]:
    """Take the smallest free piece that is large enough, or more memory: its offset, what is free then, and the end."""
    fitting = [piece for piece in free if piece[1] >= size]
    if not fitting:
        return end, free, end + size
    piece = min(fitting, key=lambda piece: piece[1])
    rest = (piece[0] + size, piece[1] - size)
    others = [each for each in free if each is not piece]
    return piece[0], [*others, rest] if rest[1] else others, end


def _merged(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for offset, size in sorted(pieces):
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((offset, size))
    return merged

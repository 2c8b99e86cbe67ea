"""The parts of a native program: operations over storages, as words that `selfspec/kernels/program.cpp` reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from selfspec.cache.masks import Window
from selfspec.kernels.native import Kind, Words, bits, words

DIMS = 4
"""Dimensions of what a map runs over."""


class Function(IntEnum):
    """Functions of one or two numbers that a map computes, in the order of `program.cpp`."""

    COPY = 0
    NEGATIVE = 1
    COSINE = 2
    SINE = 3
    TANH = 4
    SIGMOID = 5
    SILU = 6
    GELU = 7
    GELU_BY_TANH = 8
    RELU = 9
    EXPONENTIAL = 10
    ROOT_OF_INVERSE = 11
    POWER = 12
    SUM = 13
    DIFFERENCE = 14
    MULTIPLY = 15
    QUOTIENT = 16
    SILU_TIMES = 17
    GELU_TIMES = 18
    GELU_BY_TANH_TIMES = 19


MOST_NODES = 64
"""Tokens of a pass that programs run."""

MEMORY, FIRST_TENSOR = 0, 8
"""Places of a call's memory and of its first tensor in the table of addresses."""


@dataclass(frozen=True)
class Sight:
    """Says which slots tokens see before them.

    `sliding` is how many positions they look back over, themselves included; None: over all. Of these a draft may
    attend to a `window`.
    """

    sliding: int | None
    window: Window | None


@dataclass(eq=False)
class Storage:
    """Stands for memory that operations read and write: an argument of a call, by index, or a weight.

    It has `numbers` float32 numbers where the program keeps it.
    """

    numbers: int = 0
    argument: int | None = None
    constant: Tensor | None = None

    @property
    def is_temporary(self) -> bool:
        """True if the program keeps it, and only while it runs."""
        return self.argument is None and self.constant is None


@dataclass(frozen=True)
class Place:
    """Says where an operand begins: `offset` bytes into its storage."""

    storage: Storage
    offset: int = 0


NOWHERE = Place(Storage(), -1)
"""In place of an operand that is not there."""

Word = int | float | Place


@dataclass(eq=False)
class Operation:
    """Holds one operation, as the words that `program.cpp` reads: a float is one word, a place two."""

    kind: Kind
    words: list[Word]
    writes: Storage

    @property
    def reads(self) -> Iterator[Storage]:
        """Storages that it reads."""
        for word in self.words:
            if isinstance(word, Place) and word is not NOWHERE and word.storage is not self.writes:
                yield word.storage


def encoded(operations: Sequence[Operation | None], offsets: dict[int, int], arguments: int) -> Words:
    """Return the words of a program, in which None lets threads wait for each other.

    `offsets` are those of temporary storages in the memory of a call, in bytes, by id; a call has `arguments` tensors.
    """
    constants: dict[int, int] = {}
    found: list[int] = []
    first = FIRST_TENSOR + arguments

    def address(place: Place) -> tuple[int, int]:
        storage = place.storage
        if place is NOWHERE:
            return -1, 0
        if storage.argument is not None:
            return FIRST_TENSOR + storage.argument, place.offset
        if storage.constant is not None:
            return first + constants.setdefault(storage.constant.data_ptr(), len(constants)), place.offset
        return MEMORY, offsets[id(storage)] + place.offset

    for operation in operations:
        if operation is None:
            found.append(Kind.WAIT)
            continue
        found.append(operation.kind)
        for word in operation.words:
            if isinstance(word, Place):
                found += address(word)
            else:
                found.append(bits(word) if isinstance(word, float) else int(word))
    return words([len(constants), *constants, *found, Kind.END])

"""Passes as native programs: one call of selfspec's kernels runs a pass, without Python or joins of threads."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from selfspec.errors import UnsupportedOptionError
from selfspec.kernels import native
from selfspec.runtime.few_rows import has_avx512, with_kernel
from selfspec.runtime.native.instructions import MOST_NODES, Operation, Sight, Storage, encoded
from selfspec.runtime.native.lowering import Lowered, Lowering
from selfspec.runtime.noting import mask_tensors, noted_pass
from selfspec.runtime.pass_function import PassFunction, PassKind, PassTensors
from selfspec.runtime.request import Chain, ChainStep, Draws, Races
from selfspec.runtime.runtime import RECORDING, Function, OtherSizesError, RecordingError, Runtime, close

# Tokens of a pass. A prompt is read once, so no program is made for each of its lengths.
_MOST_TOKENS = MOST_NODES
# The same in bfloat16 with AVX-512, for which torch has products of its own.
_NARROW = 24
# How far drafts in fewer bits may be from those of the stock modules: a share of their norm. At most 0.11 was seen over
# 168 steps of SmolLM2-135M-Instruct, and 0 in half of them.
_OF_DRAFTS = 0.25
# Bytes of weights that threads read between two waits, below which they take longer to wait than to read.
_WORTH_A_THREAD = 1 << 15
# Bytes of a cache line. Vectors may be read and written a line past the end.
_LINE = 64


@dataclass(frozen=True)
class Native(Runtime):
    """Runs passes as programs of selfspec's kernels, each in one call, with no joins of threads.

    Programs run passes over up to 64 tokens on a CPU, and over 24 in bfloat16 with AVX-512, where the kernels run and
    know all that the model computes. The stock modules run all others.

    A pass is captured once, without running it. Its results are the stock modules' up to rounding, and each token's are
    the same bits whatever other tokens it is read with. A program reads any number of slots.

    Attributes:
        after: passes of a kind that run without a program first, unless fewer take a quarter of a second.
    """

    after: int = 16
    # Making a program of 30 layers takes that long, as a few passes over long texts do.
    making_seconds = 0.25
    # Making a program takes longer than reading a few tokens more.
    widths = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)

    def __post_init__(self) -> None:
        if isinstance(self.after, bool) or not isinstance(self.after, int) or self.after < 0:
            raise UnsupportedOptionError(f"after must be an integer of at least 0, got {self.after!r}")

    def check(self, device: torch.device) -> None:
        if device.type == "cpu":
            native.warn_of_absence()

    def prepared(self, model: nn.Module) -> nn.Module:
        # Attentions are one operator each, which stands for them in a graph.
        return with_kernel(model, _NAME, _can_be_recorded)

    def agree(self, kind: PassKind, given: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
        if kind.path.format is None:
            return close(given, expected)
        # A sum that differs in its last bit may round an input of the next product to the level beside it, and a model
        # with outliers makes percents of that. It is a draft, which the target judges.
        return close(given, expected, _OF_DRAFTS)

    def takes(self, example: PassTensors) -> bool:
        slots, rows = example.slots.buffers[0], example.tokens.shape[0] * example.tokens.shape[1]
        known = slots.device.type == "cpu" and slots.dtype in native.IN_FLOAT32
        # Products in bfloat16 take longer than torch's, but between them a program saves the time of Python.
        most = _NARROW if slots.dtype == torch.bfloat16 and has_avx512() else _MOST_TOKENS
        return known and rows <= most and native.available()

    def chain(self, program: Function, first: PassTensors, draws: Draws | Races) -> Chain | None:
        assert isinstance(program, _Program)
        return program.chain(first, draws) if isinstance(draws, Draws) else None

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        with RECORDING:
            found = captured(function, example)
        head = function.kind.runs.head
        return _Program(found, example, None if head is None else head.tokens)


class _Program:
    """Runs a native program, called like the pass; its logits are those of the ids `kept`, None: of all."""

    def __init__(self, pass_: Lowered, example: PassTensors, kept: Tensor | None) -> None:
        self._kept = kept
        flat = example.flat()
        slots, source = example.slots, example.source
        self._slots, self._cross, *self._block = _places(
            flat,
            [
                slots.slot_mapping,
                None if source is None else source.cross[0],
                *((None, None, None) if slots.block is None else slots.block.tensors),
            ],
        )
        first = len(flat) - len(slots.buffers)
        self._buffers = slice(first, len(flat))
        operations = with_waits(pass_.operations)
        offsets, self._bytes = planned(operations)
        self._shapes = pass_.shapes
        self._program = encoded(operations, offsets, len(flat) + len(pass_.shapes))
        read = (storage.constant for operation in pass_.operations for storage in operation.reads)
        # Weights that it reads have to outlive it.
        self._weights = list({id(each): each for each in read if each is not None}.values())
        self._bytes_between_waits = sum(each.nbytes for each in self._weights) / (1 + operations.count(None))
        self._dtype = slots.buffers[0].dtype
        self._memories: list[Tensor] = []

    def __call__(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        buffers = tensors[self._buffers]
        if not self._fits(buffers):
            raise OtherSizesError
        results = [torch.empty(shape, dtype=torch.float32) for shape in self._shapes]
        given = [each if each.is_contiguous() else each.contiguous() for each in tensors[: self._buffers.start]]
        with self._memory() as memory:
            self._run(self._addresses(memory, [*given, *buffers, *results]))
        return tuple(each if each.dtype == self._dtype else each.to(self._dtype) for each in results)

    def chain(self, first: PassTensors, draws: Draws) -> Chain | None:
        """See `Runtime.chain`."""
        if not self._fits(first.slots.buffers):
            return None
        (shape,) = self._shapes
        probs = torch.empty(shape[0], draws.steps, draws.vocabulary) if draws.choice.temperature else None
        tokens, slots, positions, *rest = first.flat()
        # Steps write the next token, and count slots and positions up; others have these tensors, too.
        own = tokens.clone(), slots.clone(), positions.clone()
        return Chain(probs, self._steps((*own, *rest), draws, probs))

    def _steps(
        self, tensors: tuple[Tensor, ...], draws: Draws, probs: Tensor | None
    ) -> Generator[ChainStep, None, None]:
        tokens, *moved = tensors[:3]
        (rows, *_), choice = self._shapes[0], draws.choice
        logits, confidences = torch.empty(self._shapes[0]), torch.empty(rows, dtype=torch.double)
        known = [each for each in choice.suppressed if 0 <= each < draws.vocabulary]
        suppressed, uniform = torch.tensor(known, dtype=torch.long), draws.uniform.contiguous()
        # Logits of ids that a reduced vocabulary leaves out stay as they are here.
        spread = None if self._kept is None else torch.full((rows, draws.vocabulary), -torch.inf)
        with self._memory() as memory:
            addresses = self._addresses(memory, [*tensors, logits])
            for step in range(draws.steps):
                self._run(addresses)
                numbers = uniform[:, :, step:].unbind()
                q = (None, 0) if probs is None else (probs[:, step], probs.stride(0))
                native.run_one(
                    native.Kind.CHOOSE,
                    (
                        *(rows, logits.numel() // rows, draws.vocabulary),
                        *(float(choice.temperature), choice.top_k, float(choice.top_p)),
                        *(logits, self._kept, spread, len(known), suppressed),
                        *(numbers[0], numbers[1] if len(numbers) > 1 else None, draws.steps, *q, tokens, confidences),
                        *(each for places in moved for each in (places.numel(), places)),
                    ),
                    threads=1,
                )
                yield ChainStep(tokens.clone(), confidences.tolist())

    def _fits(self, buffers: Sequence[Tensor]) -> bool:
        """Return whether all buffers can be written where they lie, and have as many slots."""
        capacity = buffers[0].shape[2]
        return all(each.is_contiguous() and each.shape[2] == capacity for each in buffers)

    def _addresses(self, memory: Tensor, tensors: Sequence[Tensor]) -> native.Words:
        """Return addresses and sizes of a call, in the order of `Given` in `program.cpp`; tensors are contiguous."""
        addresses = [each.data_ptr() for each in tensors]
        start, depths, sees = (0 if place < 0 else addresses[place] for place in self._block)
        nodes = 0 if self._block[1] < 0 else len(tensors[self._block[1]])
        places = 0 if self._cross < 0 else tensors[self._cross].shape[2]
        capacity = tensors[self._buffers.start].shape[2]
        aligned = -(-memory.data_ptr() // _LINE) * _LINE
        given = (aligned, capacity, addresses[self._slots], start, depths, sees, nodes, places)
        return native.words((*given, *addresses))

    def _run(self, addresses: native.Words) -> None:
        library = native.library()
        assert library is not None
        threads = torch.get_num_threads() if self._bytes_between_waits >= _WORTH_A_THREAD else 1
        library.run(self._program, addresses, threads)

    @contextmanager
    def _memory(self) -> Iterator[Tensor]:
        """Memory of one call: several threads may run it at once."""
        try:
            memory = self._memories.pop()
        except IndexError:
            memory = torch.empty(self._bytes + 2 * _LINE, dtype=torch.uint8)
        yield memory
        self._memories.append(memory)


def _places(flat: Sequence[Tensor], some: Sequence[Tensor | None]) -> list[int]:
    """Return the indices of some tensors of a call among all of them, where each is once; -1 for None."""
    ids = [id(tensor) for tensor in flat]
    assert all(each is None or ids.count(id(each)) == 1 for each in some)
    return [-1 if each is None else ids.index(id(each)) for each in some]


def with_waits(operations: Iterable[Operation]) -> list[Operation | None]:
    """Let threads wait, None, before an operation that reads what others may be writing, or the reverse."""
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
    """Return the offset of every temporary storage in bytes, by id, and the bytes that all take.

    Storages that live at different times may share memory, but only behind a wait: else a thread that is ahead would
    write what another still reads.
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
    """Take the smallest free piece that fits, or more memory; return its offset, what is free then, and the end."""
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


_NAME = "selfspec_recorded_attention"


@torch.no_grad()
def captured(function: PassFunction, example: PassTensors) -> Lowered:
    """Capture a pass of a view that is `prepared`, without running it. RecordingError: programs do not know it."""
    flat, slots, source = example.flat(), example.slots, example.source
    masks = function.masks(flat)
    sights = [_sight(name, function) for name in mask_tensors(masks)]
    places = () if source is None else _places(flat, source.flat())
    graph, uniform = noted_pass(function, flat, masks), function.kind.uniform
    return Lowering(graph, sights, uniform, slots.block is not None, len(slots.buffers), places).run()


def _sight(name: str | None, function: PassFunction) -> Sight:
    """Return the slots that tokens see under the mask of a type of layers."""
    if name not in ("full_attention", "sliding_attention", None):
        raise RecordingError(f"masks of {name} are not known to programs")
    sliding = None if name == "full_attention" else getattr(function.config, "sliding_window", None)
    return Sight(sliding, function.kind.path.window)


def _can_be_recorded(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) in ("sdpa", "eager")


def _recorded(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as `transformers` asks: queries `[batch, heads, tokens, size]`, keys and values with as many or fewer."""
    unknown = [name for name, value in others.items() if name not in _SAID_ELSEWHERE and value]
    if unknown:
        raise RecordingError(f"attention takes {', '.join(unknown)}, which programs do not know")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = torch.ops.selfspec.attend(query, key, value, attention_mask, float(scale), softcap or 0.0)
    return output, None


# Masks say what these say.
_SAID_ELSEWHERE = (
    "is_causal",
    "sliding_window",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "position_ids",
    "cache_position",
    "cache",
    "past_key_values",
    "past_key_value",
    "layer_past",
)
AttentionInterface.register(_NAME, _recorded)

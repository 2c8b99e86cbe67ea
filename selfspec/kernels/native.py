"""Run selfspec's CPU kernels: a library with a plain C interface that comes with the package, called through ctypes.

The library (`program.cpp`) runs programs: rows of words, over addresses that a call gives. A pass of a model is one
program; a product by itself is a program of one operation. One library serves every version of torch and Python. There
is one for each kind of processor, made by `setup.py`; the best that runs here is taken.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import platform
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from selfspec.errors import UnsupportedOptionError

MOST_ROWS = 1024
"""The most rows of one operation; a product of more is several."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of weights that the kernels take as they are."""

IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights and slots that the kernels read to compute in float32, and in which they store slots."""

GROUP_SIZE = 32
"""Inputs that share a scale and a zero in 4 bits."""

PLANES_BLOCK = 64
"""Weights of a block in planes; rows are filled up to whole blocks."""


@dataclass(frozen=True)
class Block:
    """Describes a type of blocks: its number in `program.cpp`, 100 more than GGUF's, and weights and bytes of one."""

    number: int
    weights: int
    nbytes: int


BLOCKS = {
    "Q4_0": Block(102, 32, 18),
    "Q4_1": Block(103, 32, 20),
    "Q5_0": Block(106, 32, 22),
    "Q5_1": Block(107, 32, 24),
    "Q8_0": Block(108, 32, 34),
    "Q4_K": Block(112, 256, 144),
    "Q5_K": Block(113, 256, 176),
    "Q6_K": Block(114, 256, 210),
}
"""Types of GGUF's blocks that the kernels read."""

VARIANTS = ("vnni", "v4", "v3", "dotprod", "neon")
"""Names of libraries, the best first: x86-64-v4 with VNNI, x86-64-v4, x86-64-v3, ARM with and without dot products."""

CHOICE = "SELFSPEC_KERNELS"
"""The environment variable that names the variant to run, or `none`."""

_LOG = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent
_FOLDER = _SOURCES / "built"
# Multiplications below which waking another thread takes longer than the work.
_WORTH_A_THREAD = 1 << 16


class Kind(IntEnum):
    """Kinds of operations, in the order of `program.cpp`."""

    END = 0
    WAIT = 1
    PRODUCT = 2
    NORM = 3
    ROTATE = 4
    WRITE = 5
    ATTEND = 6
    MAP = 7
    EMBED = 8
    ATTEND_ALONE = 9
    CHOOSE = 10


NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3, torch.int64: 4, torch.float16: 7}
"""Numbers of dtypes in `program.cpp`: bytes hold two weights in 4 bits."""

FLOAT_COLUMNS, FLOAT64 = 5, 6
"""Numbers there of a float32 weight that lies as `[in, out]`, and of a product in float64."""

FOUR_BITS, PLANES, UPPER, GROUPS = 3, 8, 9, 10
"""Numbers there of formats: 4 bits of drafts, planes and the upper one, groups of a quantised checkpoint."""

PARTS = 3
"""How many parts of a weight its format may have beside the first."""

Words = ctypes.Array[ctypes.c_int64]
"""Words of 64 bits."""

Operand = int | float | Tensor | None
"""An operand of an operation: a number, a tensor where it lies, or none."""


class Library:
    """Calls one library. `variant` is its name."""

    def __init__(self, file: Path) -> None:
        self.file, self.variant = file, file.stem
        try:
            held = ctypes.CDLL(str(file))
        except OSError as error:
            raise UnsupportedOptionError(
                f"the CPU kernels cannot be loaded ({error}); install selfspec again, or set {CHOICE}=none"
            ) from error
        held.selfspec_sources.restype = ctypes.c_char_p
        self.runs_here = bool(held.selfspec_runs_here())
        self._sources: bytes = held.selfspec_sources()
        self._run = held.selfspec_run
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self._run.restype = None

    def check_sources(self) -> None:
        """Refuse a library that was built from other sources than those beside it: programs would be read wrongly."""
        if self._sources.decode() != _sources():
            raise UnsupportedOptionError(
                f"the CPU kernels ({self.variant}) are older than their sources: install selfspec again "
                f"(pip install -e .), or set {CHOICE}=none"
            )

    def run(self, program: Words, addresses: Words, threads: int) -> None:
        """Run a program over the addresses of a call, by at most `threads` threads."""
        self._run(program, addresses, len(addresses), threads)


@cache
def library() -> Library | None:
    """Return the library that runs here; None without one, see `absence`.

    Raises:
        UnsupportedOptionError: `SELFSPEC_KERNELS` names none that runs here, or the library cannot be used.
    """
    wanted = _choice()
    if wanted == "none":
        return None
    found = variants()
    if wanted and wanted not in found:
        known = ", ".join([*found, "none"])
        raise UnsupportedOptionError(f"{CHOICE}={wanted}: no such kernels run here; choose one of {known}")
    if not found:
        return None
    chosen = found[wanted or next(iter(found))]
    chosen.check_sources()
    return chosen


@cache
def variants() -> dict[str, Library]:
    """Return the libraries that run here, by name, the best first."""
    files = [file for variant in VARIANTS if (file := _FOLDER / f"{variant}.so").exists()]
    return {held.variant: held for held in map(Library, files) if held.runs_here}


def available() -> bool:
    """Return whether kernels run here."""
    return library() is not None


def absence() -> str | None:
    """Return why no kernels run here, and what to do; None if they do."""
    if available():
        return None
    if _choice() == "none":
        return f"{CHOICE}=none; unset it to run them"
    if any((_FOLDER / f"{variant}.so").exists() for variant in VARIANTS):
        return "this processor has no AVX2"
    if platform.machine() not in ("x86_64", "aarch64", "arm64"):
        return f"there are none for {platform.system()} on {platform.machine()}; on Windows, install selfspec in WSL"
    return "selfspec was installed without a C++ compiler; install one (g++ or clang++), then selfspec again"


@cache
def warn_of_absence() -> None:
    """Warn, once in a process, where no kernels run and nobody chose that."""
    why = absence()
    if why is not None and _choice() != "none":
        _LOG.warning("selfspec runs without its CPU kernels, so that a text takes longer: %s", why)


def _choice() -> str:
    return os.environ.get(CHOICE, "").strip()


def words(program: Iterable[int]) -> Words:
    """Return words as the library reads them."""
    held = tuple(program)
    return (ctypes.c_int64 * len(held))(*held)


def bits(number: float) -> int:
    """Return the word of a real number."""
    found: int = struct.unpack("q", struct.pack("d", number))[0]
    return found


def run_one(kind: Kind, operands: Iterable[Operand], threads: int) -> None:
    """Run one operation. An operand that is a tensor is read or written where it lies; None: there is none."""
    addresses: list[int] = []
    fixed: list[int | type[Tensor] | None] = []
    for each in operands:
        if isinstance(each, Tensor):
            addresses.append(each.data_ptr())
            fixed.append(Tensor)
        else:
            fixed.append(bits(each) if isinstance(each, float) else each)
    held = library()
    if held is None:
        raise UnsupportedOptionError(f"there are no CPU kernels here: {absence()}")
    held.run(_of_one(kind, tuple(fixed)), words(addresses), threads)


@lru_cache(1024)
def _of_one(kind: Kind, operands: tuple[int | type[Tensor] | None, ...]) -> Words:
    """Return a program of one operation over as many addresses as operands are tensors."""
    program, tensors = [0, int(kind)], 0
    for each in operands:
        if each is None:
            program += (-1, 0)
        elif isinstance(each, type):
            program += (tensors, 0)
            tensors += 1
        else:
            program.append(int(each))
    return words([*program, int(Kind.END)])


@dataclass(frozen=True)
class Operands:
    """Holds a weight, `[out, in]`, as `program.cpp` reads it.

    Attributes:
        weight: the first part, `[out, ...]`.
        parts: at most `PARTS` more; each is read as it lies.
        format: its number there, by which the parts are understood.
        inputs: how many there are.
        setting: a number to which the format gives a meaning.
    """

    weight: Tensor
    parts: Sequence[Tensor | None]
    format: int
    inputs: int
    setting: int = 0

    @property
    def all(self) -> tuple[Tensor, Sequence[Tensor | None], int, int, int]:
        """Arguments of the operators, in their order."""
        return self.weight, self.parts, self.format, self.setting, self.inputs


def few_rows(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows, `[..., in]` to `[..., out]`, with a contiguous weight `[out, in]` on the CPU.

    An output is summed in the same order for any number of rows and threads.
    """
    if weight.dtype not in DTYPES:
        raise RuntimeError(f"few_rows: weights in {weight.dtype}")
    number = FLOAT64 if weight.dtype == torch.float64 else NUMBERS[weight.dtype]
    return few_rows_packed(states, Operands(weight, (), number, weight.shape[-1]), bias=bias)


def few_rows_packed(
    states: Tensor, held: Operands, factors: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Multiply rows, `[..., in]` to `[..., out]`, with a packed weight on the CPU, as `few_rows` does.

    Inputs are first multiplied by `factors`, `[in]`, in float32. A weight in int8 has one part more: scales, `[out]` in
    float32.
    """
    return _by(_multiply, torch.ops.selfspec.few_rows, states, *held.all, factors, bias)


def rows_packed(ids: Tensor, held: Operands, dtype: torch.dtype) -> Tensor:
    """Read rows of a packed weight, `[..., in]` in float32 or bfloat16, by numbers `[...]`; NaN: there is none."""
    return _by(_read_rows, torch.ops.selfspec.rows_packed, ids, *held.all, dtype)


def read_rows_to(found: Tensor, ids: Tensor, held: Operands) -> None:
    """Write rows of a packed weight to `found`, `[..., in]`, as `rows_packed` reads them; all lies on the CPU."""
    _check_contiguous(held.weight, held.parts)
    numbers = ids.to(torch.int64).contiguous()
    sizes = (held.format, held.weight.shape[0], held.inputs, numbers.numel(), NUMBERS[found.dtype], held.setting)
    operands = (*sizes, held.weight, *all_parts(held.parts, None), numbers, found)
    run_one(Kind.EMBED, operands, _threads(found.numel()))


def in_blocks(levels: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Lay out a weight in 4 bits and groups of 32 for the format `FOUR_BITS`: `[out, 20 groups]`, bytes.

    Levels are `[out, in / 2]`, the first of two in the higher bits; scales and zeros are `[out, groups]`, bfloat16. A
    block is four groups: scales, zeros, and 16 bytes for each, with its first 16 levels in the lower bits.
    """
    # Groups of 16 pairs; then half a group and 16 levels.
    halves = torch.stack([levels >> 4, levels & 15], -1).unflatten(1, (-1, 2, 8)).flatten(3)
    first, last = halves.unbind(2)
    numbers = [each.view(torch.uint8).unflatten(1, (-1, 2)) for each in (scales, zeros)]
    blocks = zip(*(part.split(4, 1) for part in (*numbers, first | last << 4)), strict=True)
    return torch.cat([part.flatten(1) for block in blocks for part in block], 1)


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalize each token, `[..., size]`, by RMSNorm in float32: `weight * states / sqrt(mean square + epsilon)`.

    In 16 bits it rounds where the modules of `transformers` do: before the weight, and behind it.
    """
    return _by(_normalize, torch.ops.selfspec.rms_norm, states, weight, epsilon)


def attend_alone(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Attend to the slots that each token sees, by itself, as if there were no others.

    Queries are `[batch, heads, tokens, size]`, keys and values `[batch, heads of keys, slots, ...]`. The mask is true
    where a token sees a slot, `[batch or 1, 1, tokens, slots]`; without one it sees all, or those up to its own.
    Returns `[batch, tokens, heads, size of values]`.
    """
    batch, heads, tokens, size = queries.shape
    shared, slots, of_values = keys.shape[1], keys.shape[2], values.shape[3]
    dtype = keys.dtype
    if mask is not None and (mask.dtype != torch.bool or is_causal):
        raise RuntimeError("attend_alone: masks say yes or no")
    if is_causal and tokens != slots:
        raise RuntimeError("attend_alone: a causal pass sees its own tokens alone")
    if heads % shared:
        raise RuntimeError("attend_alone: heads do not share those of keys")
    if queries.dtype != dtype or values.dtype != dtype:
        raise RuntimeError("attend_alone: dtypes differ")
    if dtype not in IN_FLOAT32:
        raise RuntimeError(f"attend_alone: slots in {dtype}")
    states = queries.float().contiguous()
    k, v = (each if each.stride()[2:] == (each.shape[3], 1) else each.contiguous() for each in (keys, values))
    sees = None if mask is None else mask.expand(batch, 1, tokens, slots).contiguous()
    found = torch.empty(batch, tokens, heads, of_values)
    sizes: tuple[int, ...] = (NUMBERS[dtype], batch, heads, shared, tokens, slots, size, of_values)
    slots_of = (k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1))
    operands: tuple[Operand, ...] = (*sizes, is_causal, float(scale), states, *slots_of, sees, found)
    run_one(Kind.ATTEND_ALONE, operands, _threads(found.numel() * slots))
    return found.to(dtype)


def _threads(work: int) -> int:
    return torch.get_num_threads() if work >= _WORTH_A_THREAD else 1


def _by(kernel: Callable[..., Tensor], operator: Any, states: Tensor, weight: Tensor, *others: object) -> Tensor:
    """Call the kernel itself, or its operator, which is slower, where a graph is made or something lies elsewhere."""
    here = type(states) is Tensor and states.is_cpu and weight.is_cpu
    way: Callable[..., Tensor] = kernel if here and not torch.compiler.is_compiling() else operator
    return way(states, weight, *others)


def _multiply(
    states: Tensor,
    weight: Tensor,
    parts: Sequence[Tensor | None],
    format: int,
    setting: int,
    inputs: int,
    factors: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    if weight.dim() != 2 or not states.dim() or states.shape[-1] != inputs:
        raise RuntimeError("few_rows: sizes do not match")
    _check_contiguous(weight, parts)
    (*shape, inputs), outputs = states.shape, weight.shape[0]
    dtype = torch.float64 if format == FLOAT64 else torch.float32
    found = torch.empty(*shape, outputs, dtype=dtype)
    held = {"bias": bias, "factors": factors}
    others = [None if (each := held.get(name)) is None else each.to(dtype).contiguous() for name in HELD]
    given, made = (each.view(math.prod(shape), each.shape[-1]) for each in (states.to(dtype).contiguous(), found))
    for some, to in zip(given.split(MOST_ROWS), made.split(MOST_ROWS), strict=True):
        sizes = (format, len(some), inputs, outputs, setting)
        operands = (*sizes, some, weight, *all_parts(parts, None), *others, to)
        run_one(Kind.PRODUCT, operands, _threads(len(some) * inputs * outputs))
    return found if states.dtype == dtype else found.to(states.dtype)


def _check_contiguous(weight: Tensor, parts: Sequence[Tensor | None]) -> None:
    if not all(each is None or each.is_contiguous() for each in (weight, *parts)):
        raise RuntimeError("few_rows: weights are contiguous")


def _read_rows(
    ids: Tensor,
    weight: Tensor,
    parts: Sequence[Tensor | None],
    format: int,
    setting: int,
    inputs: int,
    dtype: torch.dtype,
) -> Tensor:
    found = torch.empty(*ids.shape, inputs, dtype=dtype)
    read_rows_to(found, ids, Operands(weight, parts, format, inputs, setting))
    return found


_Each = TypeVar("_Each")


def all_parts(parts: Sequence[_Each], missing: _Each) -> list[_Each]:
    """Return as many operands as `program.cpp` reads for the parts of a weight behind its first."""
    return [*parts, *[missing] * (PARTS - len(parts))]


HELD = ("bias", "residual", "factors")
"""Names of the operands of a product behind the parts of its weight, in the order of `program.cpp`; any may miss."""


def _normalize(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if weight.dim() != 1 or not states.dim() or states.shape[-1] != len(weight):
        raise RuntimeError("rms_norm: sizes do not match")
    if states.dtype != weight.dtype or states.dtype not in IN_FLOAT32:
        raise RuntimeError("rms_norm: one dtype of float32, bfloat16 and float16 alone")
    x = states.to(torch.float32).contiguous()
    by, found = (weight.contiguous(), torch.empty_like(x)) if states.dtype == torch.float32 else (None, x)
    size = len(weight)
    operands: tuple[Operand, ...] = (x.numel() // max(1, size), size, float(epsilon), 0.0, x, by, None, found)
    run_one(Kind.NORM, operands, _threads(x.numel()))
    return found if by is not None else weight * found.to(states.dtype)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    """Compute attention by torch while a pass is not yet a program; programs do it in one step."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(groups, 1) for each in (keys, values))
    scores = queries @ keys.transpose(2, 3) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) @ values).transpose(1, 2).contiguous()


_PACKED = "Tensor weight, Tensor?[] parts, int format, int setting, int inputs"
_SHAPES: dict[str, Callable[..., Tensor]] = {
    "few_rows": lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]),
    "rows_packed": lambda ids, *table: ids.new_empty(*ids.shape, table[-2], dtype=table[-1]),
    "rms_norm": lambda x, *_: x.new_empty(x.shape),
    "attend": lambda q, _, v, *__: q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]),
}
# What graphs hold: what each gives on the CPU, and its shape.
for _name, _of, _kernel in (
    ("few_rows", f"(Tensor x, {_PACKED}, Tensor? factors, Tensor? bias) -> Tensor", _multiply),
    ("rows_packed", f"(Tensor ids, {_PACKED}, ScalarType dtype) -> Tensor", _read_rows),
    ("rms_norm", "(Tensor x, Tensor weight, float epsilon) -> Tensor", _normalize),
    ("attend", "(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, float cap) -> Tensor", _attend),
):
    torch.library.define(f"selfspec::{_name}", _of)
    torch.library.impl(f"selfspec::{_name}", "cpu", _kernel)
    torch.library.register_fake(f"selfspec::{_name}", _SHAPES[_name])


@cache
def _sources() -> str:
    """Return the hash that names the sources of the library, as `setup.py` computes it."""
    files = sorted(each for each in _SOURCES.iterdir() if each.suffix in (".cpp", ".h"))
    return hashlib.sha256(b"\n".join(each.read_bytes() for each in files)).hexdigest()[:16]

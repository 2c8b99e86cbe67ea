"""Compute products of few rows by an optional C++ extension, built on demand and kept for later processes.

torch multiplies one row on one thread; the extension reads each weight once for up to ten rows, on all threads.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.library import impl, register_fake

from selfspec.errors import UnsupportedOptionError

MOST_ROWS = 1024
"""The most rows of one product."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes of weights that the extension takes, besides int8."""

GROUP_SIZE = 32
"""Inputs that share a scale and a zero in 4 bits."""

_SOURCES = tuple(sorted(each for each in Path(__file__).parent.iterdir() if each.suffix in (".cpp", ".h")))
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp")


def build_kernels(verbose: bool = False) -> Path:
    """Build the CPU kernels with this machine's C++ compiler, once, and load them: 15 to 60 seconds.

    Later processes load them too. Their products differ in the last bits from torch's (docs/exactness.md).

    Returns:
        The file of the extension: in the user's cache, or in the folder that `TORCH_EXTENSIONS_DIR` names.

    Raises:
        UnsupportedOptionError: There is no compiler, or it fails; the message holds its output.
    """
    from torch.utils import cpp_extension

    library = _library()
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Moved into place at the end, so that an interrupted build leaves nothing that could be loaded.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            try:
                cpp_extension.load(
                    library.stem,
                    [str(source) for source in _SOURCES if source.suffix == ".cpp"],
                    extra_cflags=list(_FLAGS),
                    extra_ldflags=["-fopenmp"],
                    build_directory=folder,
                    is_python_module=False,
                    verbose=verbose,
                )
            except (RuntimeError, OSError) as error:
                raise UnsupportedOptionError(
                    "the kernels cannot be built here; selfspec works without them. They need a C++ compiler and "
                    f"ninja (pip install ninja): {error}"
                ) from error
            shutil.move(Path(folder) / library.name, library)
        # Building loads it.
        _tell_compilers()
    load_kernels()
    return library


def load_kernels() -> bool:
    """Load the extension if it was built here for this torch; return whether it is loaded. Refuse a broken file."""
    if are_loaded() or not _library().exists():
        return are_loaded()
    try:
        torch.ops.load_library(_library())
    except OSError as error:
        raise UnsupportedOptionError(
            f"the CPU kernels cannot be loaded ({error}); delete {_library()}, and build them again: selfspec kernels"
        ) from error
    _tell_compilers()
    return are_loaded()


def are_loaded() -> bool:
    """Return whether the extension is loaded in this process."""
    return hasattr(torch.ops.selfspec, "few_rows")


def few_rows(
    states: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None, factors: Tensor | None = None
) -> Tensor:
    """Multiply at most `MOST_ROWS` rows, `[..., in]` to `[..., out]`, with a contiguous weight `[out, in]` on the CPU.

    An output is summed in the same order for any number of rows and threads. Inputs are first multiplied by `factors`,
    `[in]`, in float32; a weight in int8 has `scales`, `[out]`.
    """
    product: Tensor = torch.ops.selfspec.few_rows(states, weight, bias, scales, factors)
    return product


def few_rows_in_four_bits(states: Tensor, weight: Tensor, factors: Tensor | None = None) -> Tensor:
    """Multiply at most `MOST_ROWS` rows, rounded to 8 bits, with a weight of `in_blocks`, as `few_rows` does."""
    product: Tensor = torch.ops.selfspec.few_rows_in_four_bits(states, weight, factors)
    return product


def few_at_a_time(product: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Call a product that takes at most `MOST_ROWS` rows for any number of rows, `[..., in]` to `[..., out]`."""
    shape = [int(size) for size in states.shape]
    rows = math.prod(shape[:-1])
    if rows <= MOST_ROWS:
        return product(states)
    parts = states.reshape(rows, shape[-1]).split(MOST_ROWS)
    return torch.cat([product(some) for some in parts]).view(*shape[:-1], -1)


def in_blocks(levels: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Lay out a weight in 4 bits and groups of 32 for `few_rows_in_four_bits`: `[out, 20 groups]`, bytes.

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
    """Normalize each token, `[..., size]`, by RMSNorm in float32: `weight * states / sqrt(mean square + epsilon)`."""
    normalized: Tensor = torch.ops.selfspec.rms_norm(states, weight, epsilon)
    return normalized


def _tell_compilers() -> None:
    """Tell torch's compilers the shapes of the kernels' results."""
    for product in ("few_rows", "few_rows_in_four_bits"):
        register_fake(f"selfspec::{product}", lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]))
    register_fake("selfspec::rms_norm", lambda x, *_: x.new_empty(x.shape))
    register_fake("selfspec::attend", _attended)
    impl("selfspec::attend", "CPU", _attend)


def _attended(queries: Tensor, _: Tensor, values: Tensor, *__: object) -> Tensor:
    batch, heads, tokens, size = *queries.shape[:3], values.shape[-1]
    return queries.new_empty(batch, tokens, heads, size)


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


def cache_folder() -> Path:
    """Return the folder in the user's cache where kernels and profiles are kept."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "selfspec" / "selfspec" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "selfspec"
    named = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(named) if named else Path.home() / ".cache") / "selfspec"


def _library() -> Path:
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = Path(named) if named else cache_folder() / "kernels"
    return folder / _name() / f"{_name()}.so"


@cache
def _name() -> str:
    """Return a name with a hash of all that the machine code depends on."""
    depends_on = (
        *(source.read_text() for source in _SOURCES),
        torch.__version__,
        *_FLAGS,
        _processor(),
        platform.python_version(),
    )
    return f"selfspec_{hashlib.sha256(chr(10).join(depends_on).encode()).hexdigest()[:12]}"


def _processor() -> str:
    """Return the processor's features, since machines may share a home folder."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor()

"""Kernels in Triton give what torch gives, by its interpreter on a CPU and on a device; all compile without one."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from helpers import tiny, triton_checks
from selfspec import kernels
from selfspec.formats import int4, int8, rounding
from selfspec.formats.format import formats
from selfspec.formats.int4 import Int4, Int4Linear
from selfspec.formats.int8 import Int8, Int8Linear
from selfspec.formats.planes import Planes
from selfspec.formats.rounding import Kernels
from selfspec.runtime.few_rows import for_grouped_queries

triton = pytest.importorskip("triton")

from selfspec.kernels import triton_planes as module_of_planes  # noqa: E402
from selfspec.kernels import triton_products as module_of_products  # noqa: E402
from selfspec.kernels.triton_attention import block_attention  # noqa: E402
from selfspec.kernels.triton_norms import added_norm, rms_norm  # noqa: E402
from selfspec.kernels.triton_planes import joint_in_planes, product_in_planes, rows_in_planes  # noqa: E402
from selfspec.kernels.triton_products import joint_product, low_bits_product  # noqa: E402
from selfspec.kernels.triton_rotary import rotated_to_cache  # noqa: E402
from selfspec.kernels.triton_slots import slots_moved  # noqa: E402

ROOT = Path(__file__).parents[2]
# The shared memory that a program may have, in bytes, by capability: of an A100, an A10 and an H100.
TARGETS = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.kernels
@pytest.mark.parametrize("checks", ["products", "planes", "attention", "others", "decoding", "fused"])
def test_the_interpreter_gives_what_torch_gives(checks: str) -> None:
    # In a process of its own: Triton decides at its import whether it interprets.
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "helpers.triton_checks", checks]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all equal\n"), done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("check", "given"),
    [
        pytest.param(check, given, id=f"{check.__name__} {given}")
        for checks in triton_checks.CHECKS.values()
        for check, every in checks
        for given in every
    ],
)
def test_a_device_gives_what_torch_gives(check: Callable[..., None], given: tuple[Any, ...]) -> None:
    check("cuda", *given)


def test_where_triton_runs_its_products_are_for_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (int4, int8, rounding):
        monkeypatch.setattr(module, "kernels_of", lambda _: Kernels.TRITON)
    for inputs in (256, 576):
        assert Int4Linear(Int4().pack(torch.randn(16, inputs)), None, torch.float32).kernels is Kernels.TRITON
    odd = Int8().pack(torch.randn(16, 40))
    assert Int8Linear(odd, None, torch.float32).kernels is Kernels.TRITON


@pytest.mark.parametrize(
    ("tokens", "inside", "takes"),
    [(5, torch.no_grad, 1), (65, torch.no_grad, 0), (5, torch.enable_grad, 0), (5, _autocast, 0)],
    ids=["few", "many", "gradients", "autocast"],
)
def test_attention_over_few_tokens_without_gradients_is_for_triton(
    tokens: int, inside: Callable[[], AbstractContextManager[Any]], takes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny.llama(), tiny.prompt(tokens)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    given = mock.Mock(side_effect=lambda *tensors, stock: stock())
    monkeypatch.setattr("selfspec.runtime.few_rows.runs_triton", lambda _: True)
    monkeypatch.setattr("selfspec.kernels.triton_attention.tried_attention", given)
    with inside():
        found = for_grouped_queries(model)(ids, attention_mask=mask, use_cache=False).logits
        assert torch.equal(found, model(ids, attention_mask=mask, use_cache=False).logits)
    assert given.call_count == takes * tiny.DEPTH


@dataclass
class Code:
    """Holds the code that a kernel was compiled to, for one device."""

    ptx: str
    cubin: bytes

    @property
    def loops(self) -> list[str]:
        """Loops of the kernel."""
        lines = self.ptx.splitlines()
        starts = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"(\$L\w+):", line.strip()))}
        ends = ((at, label) for at, line in enumerate(lines) for label in re.findall(r"\bbra\S*\s+(\$L\w+);", line))
        return ["\n".join(lines[starts[label] : at]) for at, label in ends if starts[label] < at]

    def use(self, path: Path) -> dict[str, int]:
        """Registers of a thread, and bytes of the stack that it spills to."""
        path.write_bytes(self.cubin)
        tool = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
        words = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        return {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", words)}


@dataclass
class Compiling:
    """Stands for a kernel: where it is launched, it is compiled for each device, and not run."""

    kernel: Any
    compiled: set[str]
    made: list[Code] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.compile

    def compile(self, *args: Any, **kwargs: Any) -> None:
        names = [name for name in self.kernel.arg_names if name not in kwargs]
        constants = {name: value for name, value in kwargs.items() if name in self.kernel.arg_names}
        signature = {name: _type(value) for name, value in zip(names, args, strict=True)}
        # What is missing is known to be.
        constants |= {name: None for name, value in zip(names, args, strict=True) if value is None}
        signature |= dict.fromkeys(constants, "constexpr")
        aligned = {place: [["tt.divisibility", 16]] for place in _even(args)}
        source = triton.compiler.ASTSource(self.kernel, signature, constants, aligned)
        options = {name: value for name, value in kwargs.items() if name not in constants}
        for capability, shared in TARGETS.items():
            target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
            made = triton.compile(source, target=target, options=options)
            assert made.asm["cubin"]
            self.made.append(Code(made.asm["ptx"], made.asm["cubin"]))
            assert made.metadata.shared <= shared, (self.kernel.__name__, capability, signature, constants)
        self.compiled.add(self.kernel.__name__)


def _even(values: tuple[Any, ...]) -> Iterator[tuple[int, ...]]:
    """Say where arguments are multiples of 16, as where they are launched: addresses of tensors, and some sizes."""
    for place, value in enumerate(values):
        if isinstance(value, tuple):
            yield from ((place, *inside) for inside in _even(value))
        elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            yield (place,)


def _type(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_type, value))
    if isinstance(value, Tensor):
        return "*" + triton.runtime.jit.type_canonicalisation_dict[str(value.dtype).removeprefix("torch.")]
    assert isinstance(value, (int, float)) or value is None
    return "i32" if isinstance(value, int) else "fp32"


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", triton_checks.ATTENTION_OFF_BY, ids=str)
def test_every_kernel_compiles_for_devices_that_are_not_here(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    modules = [import_module(f"selfspec.kernels.{path.stem}") for path in Path(kernels.__path__[0]).glob("triton_*.py")]
    every, compiled = set(), set[str]()
    for module in modules:
        for name, kernel in vars(module).copy().items():
            # What others call inside is not launched.
            if isinstance(kernel, triton.runtime.JITFunction) and f" {name}[" in inspect.getsource(module):
                every.add(name)
                monkeypatch.setattr(module, name, Compiling(kernel, compiled))
    for tokens, slots, width, masked_by in ((1, 70, 64, dtype), (64, 600, 128, torch.bool), (17, 70, 256, torch.bool)):
        queries, keys = (torch.zeros(1, *sizes, width, dtype=dtype) for sizes in ((4, tokens), (2, slots)))
        block_attention(queries, keys, keys, torch.zeros(1, 1, tokens, slots, dtype=masked_by), 0.1)
    for bits, rows in product((8, 4), (1, 3)):
        rounded = formats()[f"int{bits}"]().pack(torch.zeros(64, 2304))
        low_bits_product(torch.zeros(rows, 2304, dtype=dtype), *triton_checks.held_by_triton(rounded))
        factors, levels, scales = ([each] * 2 for each in triton_checks.held_by_triton(rounded))
        joint_product(torch.zeros(rows, 2304, dtype=dtype), levels, factors, scales, gate="silu")
    for rows in (1, 3, 64) if dtype != torch.float64 else ():
        states, weights = torch.zeros(rows, 576, dtype=dtype), [torch.zeros(64, 576, dtype=dtype)] * 3
        joint_product(states, weights, biases=[each[:, 0].contiguous() for each in weights])
        joint_product(states, weights[:2], gate="gelu_by_tanh")
    planes = {part: Planes().pack(torch.zeros(64, 128))[part] for part in triton_checks.PLANE_PARTS}
    for rows, parts in product((1, 3), (triton_checks.PLANE_PARTS, ("upper", "rows"))):
        product_in_planes(torch.zeros(rows, 128, dtype=dtype), *map(planes.get, parts))
        joint_in_planes(torch.zeros(rows, 128, dtype=dtype), [[*map(planes.get, parts)]] * 2, gate="silu")
    for to in (torch.bfloat16, torch.float32):
        rows_in_planes(128, to, torch.arange(2), *planes.values())
    if dtype != torch.float64:
        some, weight = torch.zeros(2, 576, dtype=dtype), torch.zeros(576, dtype=dtype)
        rms_norm(some, weight, 1e-5)
        added_norm(some, some, weight, 1e-5, 1.0, (weight, 1e-5, 1.0))
    heads = torch.zeros(1, 2, 3, 64, dtype=dtype)
    norms = heads[0, 0, 0], heads[0, 0, 1]
    rotated_to_cache(heads, heads, heads, heads[:, 0], heads[:, 0], (heads, heads), torch.arange(3), norms, 1e-5, 1.0)
    for each in (dtype, torch.int8):
        slots_moved([torch.zeros(1, 2, 9, 80, dtype=each)], *torch.tensor([[[2, 3]], [[1, 2]]]))
    # Norms in float64 are not computed in it.
    assert compiled == every - ({"normalize_token"} if dtype == torch.float64 else set())


def compiled(
    monkeypatch: pytest.MonkeyPatch, cache: Path, module: Any, kernel: str, launch: Callable[[], object]
) -> list[Code]:
    """What a kernel of a module is compiled to where it is launched, for each device."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    compiling = Compiling(getattr(module, kernel), set())
    monkeypatch.setattr(module, kernel, compiling)
    launch()
    assert len(compiling.made) == len(TARGETS)
    return compiling.made


def by_planes(parts: tuple[str, ...], weights: int, dtype: torch.dtype) -> Tensor:
    planes = Planes().pack(torch.zeros(64, 192))
    return joint_in_planes(torch.zeros(1, 192, dtype=dtype), [[planes[part] for part in parts]] * weights)


def by_few_bits(bits: int, rows: int, dtype: torch.dtype) -> Tensor:
    if bits > 8:
        return joint_product(torch.zeros(rows, 192, dtype=dtype), [torch.zeros(64, 192, dtype=dtype)] * 3)
    rounded = formats()[f"int{bits}"]().pack(torch.zeros(64, 192))
    found: Tensor = low_bits_product(torch.zeros(rows, 192, dtype=dtype), *triton_checks.held_by_triton(rounded))
    return found


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("module", "kernel", "launch", "narrow"),
    [
        # Escapes are read one by one, once before the loop and once in it.
        (module_of_planes, "few_rows_in_planes", partial(by_planes, triton_checks.PLANE_PARTS, 1, torch.bfloat16), 1),
        (module_of_planes, "few_rows_in_planes", partial(by_planes, ("upper", "rows"), 1, torch.bfloat16), 0),
        (module_of_planes, "few_rows_in_planes", partial(by_planes, triton_checks.PLANE_PARTS, 3, torch.bfloat16), 1),
        *(
            (module_of_products, "one_row", partial(by_few_bits, bits, 1, dtype), 0)
            for bits, dtype in product((16, 8, 4), (torch.bfloat16, torch.float32))
        ),
    ],
    ids=[
        "planes",
        "upper plane",
        "planes of three weights",
        *(f"{bits} bits, {dtype}" for bits, dtype in product(("all", 8, 4), ("bf16", "float32"))),
    ],
)
def test_one_row_reads_16_bytes_at_once_and_waits_for_no_thread_while_it_does(
    module: Any,
    kernel: str,
    launch: Callable[[], Tensor],
    narrow: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for code in compiled(monkeypatch, tmp_path, module, kernel, launch):
        main = max(code.loops, key=len)
        assert not re.search(r"bar\.|barrier|shfl|(ld|st)\.(shared|local)", main)
        loads = re.findall(r"ld\.global\S*\.b\d+", main)
        assert sum(not load.endswith(".v4.b32") for load in loads) == narrow, loads
        use = code.use(tmp_path / "cubin")
        assert use["STACK"] == use["LOCAL"] == 0
        assert use["REG"] <= 168


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_several_rows_spill_nothing(
    bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch = partial(by_few_bits, bits, 3, dtype)
    for code in compiled(monkeypatch, tmp_path, module_of_products, "few_rows", launch):
        use = code.use(tmp_path / "cubin")
        assert use["STACK"] == use["LOCAL"] == 0
        assert use["REG"] <= 128
        # Weights are copied past registers, 16 bytes at once.
        assert "cp.async.cg.shared.global" in code.ptx


def test_a_sum_is_split_where_programs_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = mock.MagicMock()
    for kernel in ("few_rows", "add_parts"):
        monkeypatch.setattr(module_of_products, kernel, launched)
    for outputs, inputs in ((1024, 4096), (4096, 4096), (1024, 256)):
        levels = torch.zeros(outputs, inputs, dtype=torch.int8)
        low_bits_product(torch.zeros(3, inputs), torch.ones(inputs), levels, torch.ones(outputs).bfloat16())
    grids = [call.args[0] for call in launched.__getitem__.call_args_list]
    assert grids == [(32, 1, 4), (12,), (128, 1, 1), (32, 1, 1)]

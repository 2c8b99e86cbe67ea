"""Traced programs have fewer operations after fusing, and give the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import selfspec
from helpers import tiny
from selfspec.kernels import native
from selfspec.runtime import Traced
from selfspec.runtime.fusions import drop_conversions, fuse


def fused(function: Callable[..., Tensor], *example: Tensor) -> tuple[list[str], Tensor]:
    """The kinds of operations after fusing, and what they give."""
    names = [f"tensor{number}" for number in range(len(example))]
    graph, _ = torch._C._create_graph_by_tracing(
        lambda *tensors: (function(*tensors),), example, lambda _: "", True, False, None, names
    )
    drop_conversions(graph)
    torch._C._jit_pass_erase_shape_information(graph)
    torch._C._jit_pass_constant_propagation_immutable_types(graph)  # type: ignore[attr-defined]
    fuse(graph)
    torch._C._jit_pass_dce(graph)
    graph.lint()
    kinds = [node.kind() for node in graph.nodes() if node.kind() not in ("prim::Constant", "prim::TupleConstruct")]
    program = torch._C.CompilationUnit().create_function("program", graph, True)
    return kinds, program(*example)[0]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def test_what_computes_nothing_goes() -> None:
    def function(x: Tensor) -> Tensor:
        x = x.to(torch.float32)[:, :]
        return x[:, : x.shape[-1] // 2].neg()

    example = drawn(3, 6)
    kinds, found = fused(function, example)
    assert kinds == ["aten::size", "aten::floordiv", "aten::slice", "aten::neg"]
    assert torch.equal(found, function(example))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.float64) * 2,
        lambda x: x.to(torch.float32, copy=True).mul_(2),
        lambda x: x[:, 1:] * 2,
        lambda x: x[:, ::2] * 2,
        lambda x: x[:, : x.shape[0]] * 2,
    ],
)
def test_what_computes_something_stays(function: Callable[[Tensor], Tensor]) -> None:
    example = drawn(3, 6)
    before = example.clone()
    _, found = fused(function, example)
    assert torch.equal(example, before)
    assert torch.equal(found, function(example))


@pytest.fixture
def kernels() -> None:
    native.build_kernels()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned: Tensor = apply_rotary_pos_emb(x, x, cos, sin)[0]
    return turned


@pytest.mark.kernels
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [2, 6, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2])
def test_rotations_are_one_operation(size: int, dtype: torch.dtype, rows: int) -> None:
    x = drawn(3, 5, 4, size, dtype=dtype).transpose(1, 2)
    cos, sin = drawn(3 if rows > 1 else 1, 5, size, dtype=dtype), drawn(1, 5, size, dtype=dtype)
    kinds, found = fused(rotated, x, cos, sin)
    assert kinds.count("selfspec::rotate") == 1
    assert "aten::cat" not in kinds
    assert torch.equal(found, rotated(x, cos, sin))


@pytest.mark.kernels
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", ["interleaved", "other way", "other sign", "two sums", "other sources"])
def test_other_sums_are_no_rotations(case: str) -> None:
    x, cos, sin = drawn(1, 4, 3, 8), drawn(1, 1, 3, 8), drawn(1, 1, 3, 8)

    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        left, right = x[..., :half], x[..., half:]
        if case == "interleaved":
            return x * cos + torch.cat([-x[..., 1::2], x[..., ::2]], -1) * sin
        if case == "other way":
            return x * cos + torch.cat([right.neg(), left], -2).view_as(x) * sin
        if case == "other sign":
            return x * cos + torch.cat([-left, right], -1) * sin
        if case == "two sums":
            return torch.add(x * cos, torch.cat([-right, left], -1) * sin, alpha=2)
        return (x + 1) * cos + torch.cat([-right, left], -1) * sin

    kinds, found = fused(function, x, cos, sin)
    assert "selfspec::rotate" not in kinds
    assert torch.equal(found, function(x, cos, sin))


@pytest.mark.kernels
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", native.DTYPES)
def test_products_of_the_same_states_are_joined(dtype: torch.dtype) -> None:
    x, bias = drawn(2, 3, 40, dtype=dtype), drawn(7, dtype=dtype)
    first, second, third = (drawn(outputs, 40, dtype=dtype) for outputs in (300, 7, 90))

    def function(x: Tensor, first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> Tensor:
        late = third * 2
        apart = native.few_rows(x + 1, first, None)
        made = [native.few_rows(x, first, None), native.few_rows(x, second, bias), native.few_rows(x, late, None)]
        return torch.cat([*made, apart, native.few_rows(x, late + 1, None)], -1)

    kinds, found = fused(function, x, first, second, third, bias)
    assert kinds.count("selfspec::few_rows_together") == 1
    assert kinds.count("selfspec::few_rows") == 2
    assert torch.equal(found, function(x, first, second, third, bias))


@pytest.mark.kernels
@pytest.mark.usefixtures("kernels")
def test_bits_of_joined_products_do_not_depend_on_threads() -> None:
    x, weights = drawn(5, 200), [drawn(n, 200) for n in (301, 1, 64, 403)]
    alone = [native.few_rows(x, weight, None) for weight in weights]
    nothing: list[Tensor | None] = [None] * len(weights)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            together = torch.ops.selfspec.few_rows_together(x, weights, nothing, nothing)
            assert all(map(torch.equal, together, alone))
    finally:
        torch.set_num_threads(before)


@pytest.mark.kernels
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_programs_are_used_and_give_the_stock_text(architecture: str) -> None:
    model, prompt = tiny.BUILDERS[architecture](), tiny.prompt(9)
    wanted = selfspec.wrap(model, selfspec.drafts.EarlyExit(1), draft_length=3, runtime=selfspec.runtime.Eager())
    found = selfspec.wrap(model, selfspec.drafts.EarlyExit(1), draft_length=3, runtime=Traced(after=0))
    for seed in range(3):
        texts = [
            each.generate(prompt, max_new_tokens=40, do_sample=True, seed=seed).sequences for each in (wanted, found)
        ]
        assert torch.equal(*texts)

"""The CPU kernels: torch's products up to rounding, the same bits for any number of rows and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import selfspec
from helpers import tiny
from helpers.reference import every_number, restored
from helpers.snapshot import kernels
from selfspec.formats.int4 import Int4, Int4Linear
from selfspec.formats.int8 import Int8, Int8Linear
from selfspec.formats.packed import PackedLinear
from selfspec.kernels import native
from selfspec.runtime.few_rows import for_few_rows
from selfspec.runtime.native.instructions import FIRST_TENSOR

# Each tile, halves of tiles, and halves of these.
ROWS = (*range(1, 18), 27, 41, 64, 203)
HALVES = (torch.bfloat16, torch.float16)


pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True, params=native.variants())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test runs on the kernels for every kind of processor that this one can stand for."""
    with kernels(request.param):
        yield request.param


def test_what_runs_is_what_was_asked_for(variant: str) -> None:
    library: Any = native.library()
    assert library.variant == variant


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 15), (40, 16), (33, 100), (5, 260)])
def test_products_are_torchs(dtype: torch.dtype, bias: bool, outputs: int, inputs: int) -> None:
    weight, shift = drawn(outputs, inputs).to(dtype), drawn(outputs).to(dtype) if bias else None
    for rows in ROWS:
        states = drawn(rows, inputs).to(dtype)
        exact = torch.nn.functional.linear(states.double(), weight.double(), None if shift is None else shift.double())
        found = native.few_rows(states, weight, shift)
        assert found.dtype == dtype
        tolerance = 16 * torch.finfo(dtype).eps * (1 + inputs**0.5)
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("outputs", "inputs"), [(7, 15), (33, 100), (24, 576)])
def test_products_with_weights_in_16_bits_are_those_in_float32(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, states = drawn(outputs, inputs).to(dtype), drawn(ROWS[-1], inputs).float()
    for rows in ROWS:
        expected = native.few_rows(states[:rows], weight.float(), None)
        assert torch.equal(native.few_rows(states[:rows], weight, None), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_in_16_bits_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    numbers = every_number(dtype)
    found = torch.empty(len(numbers))
    sizes = (native.NUMBERS[dtype], len(numbers), 1, len(numbers), native.NUMBERS[torch.float32], 0)
    given = (*sizes, numbers, None, None, None, torch.arange(len(numbers)), found)
    native.run_one(native.Kind.EMBED, given, 1)
    assert_same_bits(found, numbers.float())
    # In all places of a vector.
    weight = torch.zeros(len(numbers), 32, dtype=dtype)
    places = torch.arange(len(numbers))
    weight[places, places % 32] = numbers
    assert_same_bits(native.few_rows(torch.ones(1, 32), weight, None)[0], numbers.float() + 0.0)


@pytest.mark.parametrize("dtype", HALVES)
def test_slots_in_16_bits_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    exact = every_number(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    # Numbers halfway between two, those beside them, beyond the last, and all others.
    halfway = exact[:-1] + exact.diff() / 2
    beyond = torch.tensor([65504.0, 65519.99, 65520, 7e4, 3.4e38, torch.inf, torch.nan])
    near = [halfway, halfway.nextafter(exact[1:]), halfway.nextafter(exact[:-1])]
    states = torch.cat([exact, *near, beyond, -beyond, drawn(999).float()])
    slots, found = torch.zeros(1, dtype=torch.int64), torch.empty(len(states), dtype=dtype)
    sizes = native.NUMBERS[dtype], 1, 1, 1, len(states), True
    program = (0, native.Kind.WRITE, *sizes, FIRST_TENSOR, 0, FIRST_TENSOR + 1, 0, 0, 0, 0, 1, native.Kind.END)
    given = (0, 1, slots.data_ptr(), *[0] * (FIRST_TENSOR - 3))
    library: Any = native.library()
    library.run(native.words(program), native.words((*given, found.data_ptr(), states.data_ptr())), 1)
    assert_same_bits(found, states.to(dtype))


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Numbers are the same, zeros of the same sign, and what is no number is none."""
    numbers = expected == expected
    assert torch.equal(found == found, numbers)
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    assert torch.equal(found.view(bits)[numbers], expected.view(bits)[numbers])


def dense(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """A product whose inputs fill no tile."""
    weight = (100 * drawn(301, 1003)).to(dtype)
    if dtype == torch.int8:
        levels = native.Operands(weight, (drawn(301).float(),), native.NUMBERS[dtype], 1003)
        return lambda states: native.few_rows_packed(states[:, :1003].float().contiguous(), levels)
    return lambda states: native.few_rows(states[:, :1003].to(dtype).contiguous(), weight, None)


PRODUCTS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    **{str(dtype): partial(dense, dtype) for dtype in (*native.DTYPES, torch.int8)},
    "int4": lambda: Int4Linear(Int4().pack(drawn(301, 1056).float()), None, torch.float32),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_bits_depend_on_neither_rows_nor_threads(name: str) -> None:
    # Enough work for two threads.
    product, states = PRODUCTS[name](), drawn(ROWS[-1], 1056).float()
    alone = torch.cat([product(row[None]) for row in states])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in ROWS:
                assert torch.equal(product(states[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(before)


def of_eight_bits(rows: int, inputs: int, group: int) -> torch.Tensor:
    """States that products round to themselves: multiples of another step in every group."""
    states = torch.randint(-127, 128, (rows, inputs), generator=torch.Generator().manual_seed(rows)).float()
    states[:, ::group] = 127
    steps = 2.0 ** (torch.arange(inputs) // group % 7 - 10)
    return states * steps


@pytest.mark.parametrize(
    ("kind", "group", "outputs", "inputs"),
    # Some processors round the inputs of weights in 8 bits in groups of 64.
    [(Int8Linear, 64, *sizes) for sizes in ((1, 1), (24, 50), (7, 64), (33, 172), (24, 704))]
    + [(Int4Linear, native.GROUP_SIZE, *sizes) for sizes in ((1, 32), (7, 96), (24, 128), (33, 704))],
)
def test_products_are_what_their_levels_stand_for(
    kind: type[PackedLinear], group: int, outputs: int, inputs: int
) -> None:
    factors = 2.0 ** (torch.arange(inputs) % 5 - 2)
    rounded = (Int8() if kind is Int8Linear else Int4()).pack(drawn(outputs, inputs).float() + 0.5, factors)
    linear = kind(rounded, None, torch.float32)
    weight = restored(rounded).double()
    for rows in (*ROWS, native.MOST_ROWS + 3):
        states = of_eight_bits(rows, inputs, group) / factors
        states[0, :group] = 0
        torch.testing.assert_close(linear(states).double(), states.double() @ weight.t(), rtol=1e-5, atol=1e-4)
        others = drawn(rows, inputs).float()
        exact = others.double() @ weight.t()
        sizes = (others * factors).norm() * (weight / factors).norm()
        assert (linear(others) - exact).norm() < 0.01 * (sizes / outputs**0.5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_stay_in_their_row(value: float) -> None:
    states, weight = torch.ones(3, 160), drawn(5, 160).float()
    states[1, 133] = value
    linears = (
        Int8Linear(Int8().pack(weight), None, torch.float32),
        Int4Linear(Int4().pack(weight), None, torch.float32),
    )
    for product in (lambda given: native.few_rows(given, weight, None), *linears):
        assert product(states).isfinite().all(1).tolist() == [True, False, True]


def test_tiny_values_in_four_bits_are_zeros_and_no_nans() -> None:
    linear = Int4Linear(Int4().pack(drawn(5, 64).float()), None, torch.float32)
    assert linear(torch.full((1, 64), 1e-44)).abs().max() < 1e-37


@pytest.mark.parametrize("rows", [1, 4])
@torch.no_grad()
def test_autocast_computes_in_its_own_dtype(rows: int) -> None:
    linear, states = torch.nn.Linear(40, 24), drawn(rows, 40).float()
    view = for_few_rows(linear)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = view(states), linear(states)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)


BYTES = torch.ones(2, 20, dtype=torch.uint8)


def _packed(states: torch.Tensor, weight: torch.Tensor, _: None) -> torch.Tensor:
    return native.few_rows_packed(states, native.Operands(weight, (), native.FOUR_BITS, 32))


@pytest.mark.parametrize(
    ("product", "states", "weight", "message"),
    [
        (native.few_rows, torch.ones(1, 3), torch.ones(2, 4), "sizes"),
        (native.few_rows, torch.ones(1, 4), torch.ones(4, 2).t(), "contiguous"),
        (native.few_rows, torch.ones(1, 4), torch.ones(2, 4, dtype=torch.int32), "weights in"),
        (_packed, torch.ones(1, 64), BYTES, "sizes"),
        (_packed, torch.ones(1, 32), torch.ones(20, 2, dtype=torch.uint8).t(), "contiguous"),
    ],
)
def test_what_it_cannot_multiply_is_refused(
    product: Callable[..., torch.Tensor], states: torch.Tensor, weight: torch.Tensor, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        product(states, weight, None)


@pytest.mark.parametrize(
    "draft",
    [None, selfspec.drafts.EarlyExit(2), selfspec.drafts.LowPrecision(), selfspec.drafts.LowPrecision(4)],
    ids=["plain", "exit", "int8", "int4"],
)
def test_generation_runs_on_them(draft: selfspec.drafts.Drafter | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama().float()
    ids = tiny.prompt(9, 2)
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    product = mock.Mock(wraps=native.few_rows_packed)
    monkeypatch.setattr(native, "few_rows_packed", product)
    spec = selfspec.wrap(model, draft, draft_length=3, runtime=selfspec.runtime.Eager())
    for _ in range(3):
        assert torch.equal(spec.generate(ids, max_new_tokens=24, do_sample=False).sequences, wanted)
    asked = {call.args[1].weight.dtype for call in product.call_args_list}
    assert torch.float32 in asked
    assert (torch.int8 in asked) == (draft == selfspec.drafts.LowPrecision())
    assert (torch.uint8 in asked) == (draft == selfspec.drafts.LowPrecision(4))

"""Time the pieces of a pass: products in fewer bits, attention of blocks, and over new lengths; few rows on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from device.kit import CANNOT, Bench, Rows
from device.models import DTYPE
from torch import Tensor, nn
from torch.nn import functional

from selfspec.device import Timer, has_graphs, has_streams
from selfspec.formats.format import formats
from selfspec.formats.packed import Packed, PackedLinear
from selfspec.formats.rounding import kernels_of
from selfspec.kernels.trial import runs_triton
from selfspec.measure.estimate import Estimate
from selfspec.runtime.attention import for_new_lengths
from selfspec.runtime.cuda_graphs import Recorder
from selfspec.runtime.few_rows import for_few_rows

# Outputs and inputs: of SmolLM2-135M, Llama-3.2-1B with its head, and Llama-3.1-8B.
_SHAPES = (
    *((576, 576), (1536, 576)),
    *((2048, 2048), (8192, 2048), (2048, 8192), (128_256, 2048)),
    *((1024, 4096), (4096, 4096), (14_336, 4096), (4096, 14_336)),
)
NO_TRITON = CANNOT + "kernels in Triton run neither on a CPU nor on CUDA devices of a capability below 8.0"
# Inputs and outputs of layers on a CPU, and rows of a block there.
_LAYERS, _FEW = ((256, 704), (576, 1536), (1024, 4096)), (1, 2, 3, 4, 6, 8, 12, 16, 32, 48)
_ROWS = (1, 8)
_REPEATS = 9
# More than any cache of a device holds, so that weights come from its memory.
_BYTES = 240 * 2**20
_HEADS, _KEY_HEADS, _HEAD_DIM, _TOKENS, _LENGTHS = 32, 8, 64, 8, 12
# Tokens of a block and slots of a cache: a draft step, a chain and a tree.
_BLOCKS = ((1, 4096), (8, 512), (8, 4096), (8, 32_768), (32, 4096))


def piece_cases(bench: Bench) -> dict[str, Callable[[], Rows]]:
    """Products of each precision, and attention of blocks and over new lengths."""
    return {
        **{f"products, {bits} bits": partial(_products, bench, bits) for bits in (8, 4)},
        "copies from the host": partial(_from_host, bench),
        "attention of blocks": partial(_blocks, bench),
        "attention over new lengths": partial(_attention, bench),
    }


def _products(bench: Bench, bits: int) -> Rows:
    rows: dict[str, dict[str, Estimate | float | str]] = {}
    most = _bytes_a_microsecond(bench)
    for outputs, inputs in ((64, 128),) if bench.miniature else _SHAPES:
        weight = torch.randn(outputs, inputs, device=bench.device, dtype=DTYPE)
        format = formats()[f"int{bits}"]()
        rounded, kind = format.pack(weight), format.layer
        for number in _ROWS:
            states = torch.randn(number, inputs, device=bench.device, dtype=DTYPE)
            dense = _timed(bench, partial(functional.linear, states), _copies(bench, weight))
            few = _timed(bench, lambda layer, x=states: layer(x), _layers(bench, rounded, kind))
            rows[f"{outputs} x {inputs}, {number} rows"] = {
                "bfloat16, us": dense,
                "bfloat16, % of a copy's bandwidth": _share(weight.nbytes, dense, most),
                f"{bits} bits, us": few,
                f"{bits} bits, % of a copy's bandwidth": _share(rounded.nbytes, few, most),
                "by": kernels_of(bench.device).name.lower(),
            }
    return rows


def _bytes_a_microsecond(bench: Bench) -> float:
    """Return the bytes a microsecond that the device reads and writes while one large block is copied to another."""
    source = torch.zeros(2**20 if bench.miniature else 2**30, device=bench.device, dtype=DTYPE)
    target, timer = torch.empty_like(source), Timer(time.perf_counter, bench.device)
    return 2 * source.nbytes / (1e6 * min(timer.of(lambda: target.copy_(source)) for _ in range(_REPEATS)))


def _from_host(bench: Bench) -> Rows:
    """Copy a block of page-locked memory of the host, as weights that are streamed are copied."""
    if not has_streams(bench.device):
        return {"": {"rate, GB/s": CANNOT + "a CPU has its weights where it computes"}}
    source = torch.empty(2**20 if bench.miniature else 2**28, dtype=torch.uint8, pin_memory=True)
    target, timer = torch.empty_like(source, device=bench.device), Timer(time.perf_counter, bench.device)
    seconds = [timer.of(lambda: target.copy_(source, non_blocking=True)) for _ in range(_REPEATS)]
    return {"": {"rate, GB/s": Estimate.of_median([source.nbytes / each / 1e9 for each in seconds])}}


def _share(nbytes: int, taken: Estimate, most: float) -> float:
    return 100 * nbytes / taken.value / most


def _copies(bench: Bench, weight: Tensor) -> list[Tensor]:
    return [weight.clone() for _ in range(1 if bench.miniature else max(1, _BYTES // weight.nbytes))]


def _layers(bench: Bench, rounded: Packed, kind: type[PackedLinear]) -> list[torch.nn.Module]:
    number = 1 if bench.miniature else max(1, _BYTES // rounded.nbytes)
    return [
        kind(replace(rounded, parts={**rounded.parts, "levels": rounded["levels"].clone()}), None, DTYPE)
        for _ in range(number)
    ]


@torch.inference_mode()
def _timed(bench: Bench, product: Callable[..., Tensor], weights: list[Tensor] | list[torch.nn.Module]) -> Estimate:
    """Time one product, launched with the others of a graph where there are such, as a pass launches it."""
    timer = Timer(time.perf_counter, bench.device)

    def all_of_them() -> tuple[Tensor, ...]:
        return tuple(map(product, weights))

    all_of_them()
    run: Callable[[], object] = all_of_them
    if has_graphs(bench.device):
        run = Recorder(bench.device).record(all_of_them).replay
        run()
    return Estimate.of_median([1e6 * timer.of(run) / len(weights) for _ in range(_REPEATS)])


def _blocks(bench: Bench) -> Rows:
    """Attention with a mask and grouped queries, as `transformers` computes it and in Triton."""
    rows: dict[str, dict[str, Estimate | float | str]] = {}
    for tokens, slots in ((2, 16),) if bench.miniature else _BLOCKS:
        made = partial(torch.randn, device=bench.device, dtype=DTYPE)
        queries, caches = made(1, _HEADS, tokens, _HEAD_DIM), made(2, 1, _KEY_HEADS, slots, _HEAD_DIM)
        mask = torch.ones(1, 1, tokens, slots, device=bench.device, dtype=torch.bool).tril(slots - tokens)
        rows[f"{tokens} tokens, {slots} slots"] = {
            "by torch, us": _timed(bench, partial(_by_torch, queries, mask), _copies(bench, caches)),
            "by Triton, us": _by_triton(bench, queries, mask, caches),
        }
    return rows


def _by_torch(queries: Tensor, mask: Tensor, caches: Tensor) -> Tensor:
    keys, values = (part.repeat_interleave(_HEADS // _KEY_HEADS, 1) for part in caches)
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def _by_triton(bench: Bench, queries: Tensor, mask: Tensor, caches: Tensor) -> Estimate | str:
    if not runs_triton(bench.device):
        return NO_TRITON
    from selfspec.kernels.triton_attention import block_attention

    def attend(each: Tensor) -> Tensor:
        return block_attention(queries, each[0], each[1], mask, _HEAD_DIM**-0.5)

    return _timed(bench, attend, _copies(bench, caches))


@torch.inference_mode()
def _attention(bench: Bench) -> Rows:
    """Time each length once: its first pass is what is measured."""
    timer = Timer(time.perf_counter, bench.device)
    query = torch.randn(1, _HEADS, _TOKENS, _HEAD_DIM, device=bench.device, dtype=DTYPE)

    def milliseconds(length: int) -> float:
        key = torch.randn(1, _HEADS, length, _HEAD_DIM, device=bench.device, dtype=DTYPE)
        mask = torch.ones(1, 1, _TOKENS, length, device=bench.device, dtype=torch.bool)
        return 1e3 * timer.of(lambda: functional.scaled_dot_product_attention(query, key, key, attn_mask=mask))

    def over(first: int) -> Estimate:
        # The first three also load the kernels.
        return Estimate.of_median([milliseconds(length) for length in range(first, first + _LENGTHS)][3:])

    as_torch_chooses = over(500)
    with for_new_lengths(bench.device):
        chosen = over(700)
    return {"": {"as torch chooses, ms": as_torch_chooses, "as selfspec's passes have it, ms": chosen}}


def row_cases(bench: Bench) -> dict[str, Callable[[], Rows]]:
    """Return layers over few rows on a CPU, as torch multiplies them and as selfspec's view does; none elsewhere."""
    layers = ((64, 128),) if bench.miniature else _LAYERS
    given = product(("float32", "bfloat16"), layers, (1, 2)) if bench.device.type == "cpu" else ()
    return {
        f"{dtype}, {layer[0]} to {layer[1]}, {threads} threads": partial(_few_rows, bench, dtype, *layer, threads)
        for dtype, layer, threads in given
    }


def _few_rows(bench: Bench, dtype: str, inputs: int, outputs: int, threads: int) -> Rows:
    before, kind = torch.get_num_threads(), getattr(torch, dtype)
    torch.set_num_threads(threads)
    number = 1 if bench.miniature else max(2, _BYTES // (kind.itemsize * inputs * outputs))
    layers: list[torch.nn.Module] = [nn.Linear(inputs, outputs, bias=False, dtype=kind) for _ in range(number)]
    ways = {"torch, us": layers, "selfspec, us": [*map(for_few_rows, layers)]}
    found: dict[str, dict[str, Estimate | float | str]] = {}
    for rows in _FEW:
        states = torch.randn(1, rows, inputs, dtype=kind)
        found[f"{rows} rows"] = {way: _timed(bench, lambda layer, x=states: layer(x), ways[way]) for way in ways}
    torch.set_num_threads(before)
    return found

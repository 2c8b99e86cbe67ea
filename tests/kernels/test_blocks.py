"""Weights in blocks of GGUF are those of the package gguf, and products those over dense weights, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from selfspec.formats.gguf import PLAIN, BlocksLinear, Gguf
from selfspec.formats.packed import Packed
from selfspec.kernels import native
from selfspec.kernels.native import BLOCKS

TYPES = {kind: gguf.GGMLQuantizationType[kind] for kind in (*BLOCKS, *PLAIN)}
# Bytes of a block that are numbers in float16.
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}


pytestmark = pytest.mark.usefixtures("variant")


def random_blocks(kind: str, outputs: int, inputs: int) -> torch.Tensor:
    """Make rows of blocks with any levels and scales, `[outputs, bytes]`."""
    generator = np.random.default_rng(0)
    if kind in PLAIN:
        weight = generator.standard_normal((outputs, inputs), np.float32)
        return torch.from_numpy(gguf.quantize(weight, TYPES[kind]).view(np.uint8))
    size, nbytes = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    blocks = generator.integers(0, 256, (outputs, inputs // size, nbytes), np.uint8)
    for place in HALVES.get(kind, (0,)):
        halves = generator.standard_normal((outputs, inputs // size)).astype(np.float16)
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(outputs, -1))


@pytest.mark.parametrize("kind", TYPES)
def test_products_are_those_of_the_dense_weight_to_the_bit(kind: str, variant: str | None) -> None:
    outputs, inputs = 70, 768
    blocks = random_blocks(kind, outputs, inputs)
    dense = torch.from_numpy(gguf.dequantize(blocks.numpy(), TYPES[kind]).astype(np.float32))
    layer = BlocksLinear(Packed(dense.shape, {"blocks": blocks}), None, torch.float32, kind, 0)
    assert torch.equal(layer.join(), dense)
    some = torch.tensor([[3, 0], [69, 3]])
    assert torch.equal(layer.rows_of(some), dense[some])
    states = torch.randn(40, inputs, generator=torch.Generator().manual_seed(1))
    for rows in (1, 2, 3, 4, 5, 7, 10, 11, 40):
        if variant is None:
            expected = torch.nn.functional.linear(states[:rows], dense)
        else:
            expected = native.few_rows(states[:rows], dense, None)
            found = native.few_rows_packed(states[:rows], layer.operands)
            assert torch.equal(found, expected), rows
        torch.testing.assert_close(layer.product(states[:rows]), expected, rtol=1e-4, atol=1e-2)


def test_rows_of_heads_are_put_in_order() -> None:
    blocks = random_blocks("Q8_0", 16, 32)
    in_order = BlocksLinear(Packed(torch.Size((16, 32)), {"blocks": blocks}), None, torch.float32, "Q8_0", 0).join()
    found = BlocksLinear(Packed(torch.Size((16, 32)), {"blocks": blocks}), None, torch.float32, "Q8_0", 2).join()
    assert torch.equal(found, in_order[[0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]])


@pytest.mark.parametrize("kind", TYPES)
def test_bytes_are_those_of_a_file(kind: str) -> None:
    shape = (4, 512)
    assert Gguf(kind).nbytes(shape) == random_blocks(kind, *shape).numel()

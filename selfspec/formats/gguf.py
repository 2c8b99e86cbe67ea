"""Weights in the blocks of GGUF, the files of GGML: levels of 4 to 8 bits that share scales, as a file has them.

A weight is what the package gguf makes of its block, in float32, to the last bit. In float32 a product by few rows is
`selfspec.kernels.native.few_rows` by these weights, to the last bit too, without making them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from selfspec.formats.format import FormatOfFiles
from selfspec.formats.packed import KernelLinear, Packed, PackedWeight, fixed, some_rows
from selfspec.kernels import native
from selfspec.kernels.native import BLOCKS

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose numbers lie by themselves."""

DTYPES = (torch.float32, torch.float64)
"""Dtypes that models in blocks compute in: others would round weights."""

# Weights that are made floats at once where rows are many.
_PANEL = 1 << 20


class BlocksLinear(KernelLinear):
    """Multiplies by a weight of a type of GGUF; `heads`: of rows that lie in pairs, which it puts in order."""

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype, kind: str, heads: int) -> None:
        super().__init__(packed, bias, dtype)
        self.kind, blocks = kind, packed["blocks"]
        if heads:
            blocks = blocks.view(heads, -1, 2, blocks.shape[-1]).transpose(1, 2).reshape(blocks.shape)
        self.blocks = fixed(blocks.view(PLAIN[kind]) if kind in PLAIN else blocks)

    @property
    def operands(self) -> native.Operands:
        number = native.NUMBERS[PLAIN[self.kind]] if self.kind in PLAIN else BLOCKS[self.kind].number
        return native.Operands(self.blocks, (), number, self.in_features)

    def decoded(self, numbers: Tensor) -> Tensor:
        if self.kind in PLAIN:
            return self.blocks[numbers].float()
        import gguf

        return torch.from_numpy(gguf.dequantize(self.blocks[numbers].numpy(), gguf.GGMLQuantizationType[self.kind]))

    def _of_many(self, states: Tensor) -> Tensor:
        # Never the whole weight: a model in blocks has a quarter of its bytes.
        ids = torch.arange(self.out_features)
        panels = some_rows(self.weight, _PANEL)
        return torch.cat([functional.linear(states, self.rows_of(ids[some])) for some in panels], -1)


@dataclass(frozen=True)
class Gguf(FormatOfFiles):
    """Reads the weights of a GGUF file.

    Attributes:
        kind: the file's type of a weight, such as "Q4_K".
        heads: of a weight whose rows are units of heads, those rotated together side by side, as GGML has them;
            modules of `transformers` have them half a head apart. 0: rows lie in order.
    """

    name = "gguf"
    help = "weights as they lie in a GGUF file"
    bits = 8
    parts = ("blocks",)
    fetched = ("blocks",)
    layer: ClassVar[type[BlocksLinear]] = BlocksLinear

    kind: str = "Q8_0"
    heads: int = 0

    def empty(self, shape: Sequence[int], device: torch.device) -> Packed:
        *outputs, inputs = shape
        if self.kind in PLAIN:
            size = inputs * PLAIN[self.kind].itemsize
        else:
            size = inputs // BLOCKS[self.kind].weights * BLOCKS[self.kind].nbytes
        return Packed(torch.Size(shape), {"blocks": torch.empty(*outputs, size, dtype=torch.uint8, device=device)})

    def takes(self, weight: Tensor) -> bool:
        return False

    def runs_on(self, kind: str) -> bool:
        return kind == "cpu"

    def parameter(self, packed: Packed, dtype: torch.dtype, transposed: bool = False) -> nn.Parameter:
        return fixed(PackedWeight(BlocksLinear(packed, None, dtype, self.kind, self.heads), transposed))

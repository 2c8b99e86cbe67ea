"""Checks of norms and rotary positions in Triton. As a program: by its interpreter, with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

WIDTHS = (1, 48, 64, 1003)
# Rows, heads, heads of keys, tokens and width.
HEADS = ((1, 4, 2, 1, 64), (3, 3, 3, 5, 10), (2, 9, 3, 2, 80))


def check_norms(dtype: torch.dtype, device: str) -> None:
    """Norms of tokens are the module's, and a token's are the same beside others."""
    from selfspec.kernels.triton_norms import MOST_OFF, rms_norm

    for width in WIDTHS:
        module = LlamaRMSNorm(width, eps=1e-3).to(device, dtype)
        module.weight.data.normal_()
        states = 10 * torch.randn(2, width, 3).to(device, dtype).transpose(1, 2)
        found, expected = rms_norm(states, module.weight.data, 1e-3), module(states).detach()
        assert found.dtype == dtype
        off = (found.double() - expected.double()).abs().amax() / expected.double().abs().amax()
        assert off <= MOST_OFF[dtype], (width, dtype, off)
        assert torch.equal(rms_norm(states[:1, 1:2], module.weight.data, 1e-3), found[:1, 1:2])


def check_rotary(dtype: torch.dtype, device: str) -> None:
    """Queries and keys are turned as torch turns them, bit for bit."""
    from selfspec.kernels.triton_rotary import rotated

    for rows, heads, key_heads, tokens, width in HEADS:
        for positions in {1, rows}:
            queries, keys = _heads(rows, tokens, heads, width), _heads(rows, tokens, key_heads, width)
            angles = torch.randn(positions, tokens, width)
            given = [each.to(device, dtype) for each in (queries, keys, angles.cos(), angles.sin())]
            for found, expected in zip(rotated(*given), apply_rotary_pos_emb(*given), strict=True):
                # The interpreter does not round to bfloat16 but cuts off.
                off = 0.05 if device == "cpu" and dtype == torch.bfloat16 else 0.0
                torch.testing.assert_close(found, expected, rtol=0.0, atol=off)


def _heads(rows: int, tokens: int, heads: int, width: int) -> Tensor:
    return torch.randn(rows, tokens, heads, width).transpose(1, 2)


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in (torch.float32, torch.float16, torch.bfloat16):
        check_norms(each, "cpu")
        check_rotary(each, "cpu")
    check_rotary(torch.float64, "cpu")
    print("all equal")

"""Checks of attention in Triton. As a program: by Triton's interpreter on the CPU, with TRITON_INTERPRET=1."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

OFF_BY = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Of batch, heads, heads of keys, tokens, slots, width and value width: chains, trees of 17 rows and more, runs to join.
SHAPES = [(1, 4, 4, 1, 5, 16, 16), (2, 6, 2, 3, 70, 24, 40), (3, 8, 2, 17, 33, 64, 64), (2, 4, 1, 5, 600, 48, 48)]


def block_mask(batch: int, tokens: int, slots: int, window: int | None = None) -> Tensor:
    """What the nodes of a tree see at the end of rows of several lengths, `[batch, 1, tokens, slots]`.

    What lies past a row's block is masked, and so is the left padding of every other row.
    """
    mask = torch.zeros(batch, 1, tokens, slots, dtype=torch.bool)
    for row in range(batch):
        start = max(0, slots - tokens - 3 * row)
        for token in range(tokens):
            seen = [start + token]
            while token:
                token = (token - 1) // 2
                seen.append(start + token)
            mask[row, 0, seen[0] - start, :start] = True
            mask[row, 0, seen[0] - start, seen] = True
        mask[row, 0, :, : 2 * (row % 2)] = False
        if window is not None:
            mask[row, 0, :, : max(0, start - window)] = False
    return mask


def check(shape: tuple[int, ...], dtype: torch.dtype, device: str, window: int | None, added: bool) -> None:
    """Attention of a tree, over tensors that are not contiguous, is torch's."""
    from selfspec.kernels.triton_attention import block_attention

    batch, heads, key_heads, tokens, slots, width, value_width = shape
    made = partial(torch.randn, device=device, dtype=dtype)
    queries = made(batch, tokens, heads, width).transpose(1, 2)
    keys = made(batch, key_heads, slots + 9, 2 * width)[:, :, :slots, ::2]
    values = made(batch, key_heads, slots + 9, value_width)[:, :, :slots]
    mask = block_mask(batch, tokens, slots, window).to(device)
    if added:
        # For each head its own, as with slopes.
        mask = torch.where(mask, made(heads, 1, slots), torch.finfo(dtype).min)
    scale = 1.3 * width**-0.5
    found = block_attention(queries, keys, values, mask, scale)
    exact = mask.double() if added else mask
    expected = functional.scaled_dot_product_attention(
        queries.double(), keys.double(), values.double(), attn_mask=exact, scale=scale, enable_gqa=True
    )
    assert found.dtype == dtype
    off = (found.double() - expected.transpose(1, 2)).abs().amax() / expected.abs().amax()
    assert off < OFF_BY[dtype], f"{shape}, {dtype}, window {window}, added {added}: off by {off:.2g}"


def check_unseen(device: str) -> None:
    """What nobody sees is not read, and a token that sees nothing gets zeros."""
    from selfspec.kernels.triton_attention import block_attention

    queries = torch.randn(1, 2, 2, 16, device=device)
    keys, values = torch.randn(2, 1, 1, 300, 16, device=device)
    mask = torch.ones(1, 1, 2, 300, dtype=torch.bool, device=device)
    mask[..., 1, :] = mask[..., 280:] = False
    whole = block_attention(queries, keys, values, mask, 0.25)
    keys[:, :, 280:] = values[:, :, 280:] = torch.nan
    assert torch.equal(block_attention(queries, keys, values, mask, 0.25), whole)
    assert whole[:, 0].abs().min() > 0
    assert not whole[:, 1].any()


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype in OFF_BY:
        # The interpreter multiplies matrices in bfloat16 as if they were integers.
        if dtype != torch.bfloat16:
            for shape in SHAPES:
                for window, added in ((None, False), (20, False), (None, True)):
                    check(shape, dtype, "cpu", window, added)
    check_unseen("cpu")
    print("all equal")

"""Checks of moved slots in Triton. As a program: by Triton's interpreter on the CPU, with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8)
# Of three rows: one moves all, one some and then stays, one stays; and where they go.
SOURCES, TARGETS = [[3, 5, 9], [8, 7, 8], [1, 2, 3]], [[2, 3, 4], [6, 7, 8], [1, 2, 3]]


def check(dtype: torch.dtype, device: str) -> None:
    """Slots of layers of several sizes are moved as torch moves them, and all else stays."""
    from selfspec.kernels.triton_slots import moved_at_once, slots_moved

    stored = [
        (torch.randn(4, heads, 12, width) * 50).to(dtype).to(device) for heads, width in ((2, 24), (3, 1), (2, 24))
    ]
    # The first rows of what is stored.
    parts = [each[:3] for each in stored]
    sources, targets, rows = (torch.tensor(each, device=device) for each in (SOURCES, TARGETS, range(3)))
    expected = [each.clone() for each in stored]
    moves = slots_moved, moved_at_once, moved_at_once
    for move in moves:
        for each in expected:
            each[rows[:, None], :, targets] = each[rows[:, None], :, sources]
        assert move(parts, sources, targets) in (None, True)
        assert all(torch.equal(one, other) for one, other in zip(stored, expected, strict=True)), (dtype, move)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype in DTYPES:
        check(dtype, "cpu")
    print("all equal")

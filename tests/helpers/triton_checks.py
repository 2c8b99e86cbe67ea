"""Checks of slots, verdicts, norms and rotary positions in Triton. As a program: by its interpreter on the CPU."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from selfspec.accept import TokenLevel
from selfspec.draft import Draft

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8)
# Of three rows: one moves all, one some and then stays, one stays; and where they go.
SOURCES, TARGETS = [[3, 5, 9], [8, 7, 8], [1, 2, 3]], [[2, 3, 4], [6, 7, 8], [1, 2, 3]]


def check_slots(dtype: torch.dtype, device: str) -> None:
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


# Of a vocabulary that a program looks at in one go, and one that it does not.
SIZES = [(3, 1, 7), (8, 4, 50), (2, 3, 5000)]


def check_verdicts(rows: int, nodes: int, vocabulary: int, device: str) -> None:
    """Chains, drawn or not, sampled or decided, cut or not, are judged as the rule judges them, to the token."""
    from selfspec.kernels.triton_judge import judge_chain

    rule = TokenLevel()
    for drawn, sampled, cut, broken in product((True, False), repeat=4):
        logits = torch.randn(rows, nodes + 1, vocabulary, device=device)
        p = logits.softmax(-1)
        # Some rows draft what the target says, so that a residual is empty.
        q = torch.where((torch.arange(rows, device=device) % 3 == 0)[:, None, None], logits, torch.randn_like(logits))
        q = q[:, :-1].softmax(-1)
        tokens = torch.where(torch.rand(rows, nodes, device=device) < 0.7, p[:, :-1].argmax(-1), q.argmax(-1))
        if not sampled:
            p = torch.zeros_like(p).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        if broken:
            p[0, nodes // 2] = 0.0
        uniform = torch.rand(rows, nodes, device=device, dtype=torch.float64) if sampled else None
        noise = torch.empty(rows, vocabulary, device=device).exponential_().clamp_min_(1e-38) if sampled else None
        judged = torch.rand(rows, nodes, device=device) < 0.8 if cut else None
        draft = Draft.chain(tokens, q if drawn and sampled else None)
        chances = rule.accept_probs(draft, p, logits)
        mask = chances > 0.5 if uniform is None else uniform < chances
        place = rule.accepted(mask if judged is None else mask & judged, draft.tree)
        left = rule.recovery_probs(draft, p, place)
        expected = torch.stack([place, (left if noise is None else left / noise).argmax(-1)], 1)
        found = judge_chain(p, draft.probs, tokens, uniform, judged, noise)
        assert torch.equal(found, expected), (drawn, sampled, cut, broken, found, expected)


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
    for dtype in DTYPES:
        check_slots(dtype, "cpu")
    for sizes in SIZES:
        check_verdicts(*sizes, "cpu")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check_norms(dtype, "cpu")
        check_rotary(dtype, "cpu")
    check_rotary(torch.float64, "cpu")
    print("all equal")

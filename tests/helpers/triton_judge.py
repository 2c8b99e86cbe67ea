"""Checks of the judge in Triton. As a program: by Triton's interpreter on the CPU, with TRITON_INTERPRET=1."""

from __future__ import annotations

from itertools import product

import torch

from selfspec.accept import TokenLevel
from selfspec.draft import Draft

# Of a vocabulary that a program looks at in one go, and one that it does not.
SIZES = [(3, 1, 7), (8, 4, 50), (2, 3, 5000)]


def check(rows: int, nodes: int, vocabulary: int, device: str) -> None:
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


if __name__ == "__main__":
    torch.manual_seed(0)
    for sizes in SIZES:
        check(*sizes, "cpu")
    print("all equal")

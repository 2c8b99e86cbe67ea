"""Chains for hypothesis: zeros, disjoint supports, p = q, one-hot, near-ties, in float32 and float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from helpers.exact import Chain

_KINDS = ("dense", "peaked", "sparse", "one-hot", "near-tie")


@dataclass(frozen=True)
class Case:
    """A target and a draft distribution over `drafted` tokens, p with one conditional more."""

    p: Chain
    q: Chain

    @property
    def tolerance(self) -> float:
        return 2e-6 if self.p.tables[0].dtype == torch.float32 else 1e-12


def _rows(kind: str, shape: list[int], generator: torch.Generator) -> Tensor:
    """Distributions over the last axis."""
    noise = torch.rand(shape, generator=generator, dtype=torch.float64) + 1e-3
    if kind == "peaked":
        noise = noise**20
    elif kind == "sparse":
        noise = noise * (torch.rand(shape, generator=generator) < 0.5)
        noise[..., 0] += noise.sum(-1) == 0
    elif kind == "one-hot":
        noise = torch.zeros_like(noise).scatter_(-1, noise.argmax(-1, keepdim=True), 1.0)
    elif kind == "near-tie":
        noise = 1.0 + 1e-9 * noise
    return noise / noise.sum(-1, keepdim=True)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Vocabularies of 2 to 64 and draft lengths 0 to 6, as long as the joint stays small."""
    drafted = draw(st.integers(0, 6))
    largest = {0: 64, 1: 64, 2: 16, 3: 6, 4: 4, 5: 3, 6: 2}[drafted]
    vocab = draw(st.integers(2, largest))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    p, q = [], []
    for position in range(drafted + 1):
        shape = [vocab] * (position + 1)
        p.append(_rows(draw(st.sampled_from(_KINDS)), shape, generator))
        relation = draw(st.sampled_from(["independent", "independent", "equal", "last bits", "disjoint"]))
        if relation == "equal":
            q.append(p[-1])
        elif relation == "last bits":
            nudged = p[-1] * (1 + 1e-7 * torch.rand(shape, generator=generator, dtype=torch.float64))
            q.append(nudged / nudged.sum(-1, keepdim=True))
        elif relation == "disjoint" and bool((p[-1] == 0).any(-1).all()):
            outside = (p[-1] == 0).double()
            q.append(outside / outside.sum(-1, keepdim=True))
        else:
            q.append(_rows(draw(st.sampled_from(_KINDS)), shape, generator))
    # Without a drafted token q is never looked at, but a chain has at least one conditional.
    return Case(
        Chain(tuple(table.to(dtype) for table in p)), Chain(tuple(table.to(dtype) for table in q[: max(drafted, 1)]))
    )

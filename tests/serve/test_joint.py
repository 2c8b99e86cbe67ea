"""Rows without a seed, in a crowded batch beside greedy and seeded ones, are draws from their exact joint."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import selfspec
from helpers import tiny_joint
from helpers.joints import Warp, holm_rejects, p_value
from helpers.serving import Seen, Stepped
from selfspec.control import Control, FixedLength
from selfspec.serve.row_request import RowRequest, SamplingParams

WARPS = (Warp(), Warp(temperature=0.6), Warp(temperature=1.4, top_k=4))
DRAFTS: dict[str, tuple[str, int | Control | None]] = {
    "exit": ("exit:1", 2),
    "tree": ("exit:1", FixedLength(2, nodes=5)),
    "cascade": ("lookup+exit:1", 2),
    "recycle": ("recycle", FixedLength(2, nodes=4)),
}


def draws(draft: str, accept: str | None) -> dict[str, float]:
    """How well rows of each kind fit their joint, p-values: drawn ones of several settings, and coupled ones."""
    model = tiny_joint.network()
    name, length = DRAFTS[draft]
    engine = Stepped(selfspec.wrap(model, name, draft_length=length, accept=accept), 32, 64)
    drawn: dict[Warp, list[Seen]] = {warp: [] for warp in WARPS}
    coupled: list[Seen] = []
    for number in range(500):
        for warp, seen in drawn.items():
            seen.append(engine.submit(_request(warp, None)))
        coupled.append(engine.submit(_request(WARPS[0], number)))
        # Beside them rows of other lengths, which change how long drafts are, and greedy ones.
        engine.submit(RowRequest((3, 1, 4), 1 + number % 9, SamplingParams(temperature=0.0 if number % 2 else 2.0)))
    engine.run()
    joints = {warp: tiny_joint.joint(model, warp) for warp in WARPS}
    found = {str(warp): p_value(_texts(seen), joints[warp]) for warp, seen in drawn.items()}
    return {**found, "coupled": p_value(_texts(coupled), joints[WARPS[0]])}


def _request(warp: Warp, seed: int | None) -> RowRequest:
    sampling = SamplingParams(temperature=warp.temperature, top_k=warp.top_k, seed=seed)
    return RowRequest(tiny_joint.PROMPT, tiny_joint.TOKENS, sampling)


def _texts(seen: Sequence[Seen]) -> list[tuple[int, ...]]:
    return [tuple(each.tokens) for each in seen]


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("draft", "accept"),
    [
        ("exit", None),
        ("exit", "coupled"),
        ("tree", "token"),
        ("cascade", None),
        ("cascade", "coupled"),
        ("recycle", "token"),
    ],
)
def test_sampled_rows_of_a_crowded_batch_follow_the_joint(draft: str, accept: str | None) -> None:
    assert holm_rejects(draws(draft, accept), 0.01) == []

"""Random mixes of requests that come, go, are cancelled and fail: each row is what it is alone, and nothing is left.

Rows without a seed, in a crowded batch beside greedy and seeded ones, are draws from their exact joint.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny, tiny_joint
from helpers.joints import Warp, holm_rejects, p_value
from helpers.serving import Seen, Stepped, check_mix, random_requests, small
from helpers.shrunken import shrunken
from selfspec.cache.shared_cache import SharedCache
from selfspec.control import Control, CostAware, FixedLength
from selfspec.serve.row_request import RowRequest, SamplingParams

DRAFTS: dict[str, tuple[str | None, int | Control | None]] = {
    "exit": ("exit:1", 3),
    "tree": ("exit:1", FixedLength(3, nodes=6)),
    "lookup": ("lookup", 4),
    "int8": ("int8", 3),
    "cascade": ("lookup+exit:1", 4),
    "recycle": ("recycle", FixedLength(3, nodes=6)),
    "suffix": ("suffix", FixedLength(3, nodes=6)),
    "union": ("union:suffix+recycle+exit:1", CostAware(3, nodes=6)),
    "cost aware": ("lookup+exit:2", None),
    "none": (None, None),
}
MOST = 26


def run_mix(model: PreTrainedModel, number: int, requests: int, draft: str) -> Stepped:
    rng = random.Random(number)
    name, length = DRAFTS[draft]
    spec = selfspec.wrap(model, name, draft_length=length)
    tokens = rng.choice([MOST, 2 * MOST, 5 * MOST, None])
    engine = Stepped(spec, rng.randint(1, 9), rng.choice([1, 3, 16, 200]), tokens, rng.choice([0, 4, 64]))
    asked = random_requests(rng, requests, engine.vocabulary, MOST)
    check_mix(model, engine, asked)
    return engine


@pytest.mark.parametrize("draft", DRAFTS)
def test_rows_of_a_mix_are_what_they_are_alone(draft: str) -> None:
    run_mix(small(), sum(map(ord, draft)), 10, draft)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("dtype", "number"),
    [*((torch.float64, number) for number in range(15)), *((torch.float32, 500 + number) for number in range(5))],
)
def test_rows_of_many_mixes_are_what_they_are_alone(dtype: torch.dtype, number: int) -> None:
    run_mix(small(dtype=dtype), number, 32, list(DRAFTS)[number % 500 % len(DRAFTS)])


@pytest.mark.parametrize(
    ("architecture", "draft"),
    [
        pytest.param("bloom", "exit", marks=pytest.mark.contract),
        pytest.param("gemma2", "tree", marks=pytest.mark.contract),
        pytest.param("mamba2", "lookup", marks=pytest.mark.contract),
        ("lfm2", "exit"),
        ("mistral", "exit"),
        ("gpt2", "exit"),
        pytest.param("qwen3_next", "lookup", marks=pytest.mark.contract),
    ],
)
def test_other_architectures(architecture: str, draft: str) -> None:
    made = tiny.BUILDERS.get(architecture)
    model = shrunken(architecture).double() if made is None else made(vocab_size=24, num_hidden_layers=3)
    run_mix(model, 7, 5, draft)


@pytest.mark.contract
def test_no_cache_outlives_its_rows() -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(each, SharedCache) for each in gc.get_objects())

    before = alive()
    engine = run_mix(small(), 3, 6, "cascade")
    assert alive() == before
    assert not engine.scheduler.busy


WARPS = (Warp(), Warp(temperature=0.6), Warp(temperature=1.4, top_k=4))


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

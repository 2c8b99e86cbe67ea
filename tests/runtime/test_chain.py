"""Chains drafted in one go: the tokens and distributions that single steps draw, and samples of the exact joint."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import selfspec
from helpers import tiny
from helpers.captures import ticking, wrapped
from helpers.reference import begun
from selfspec.decode.noise import drawn_by_blocks, drawn_by_inversion
from selfspec.decode.processors import Suppression, SuppressionAt, Warping, choice_of, read_processing
from selfspec.model.layer_path import LayerPath
from selfspec.runtime import Native
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.request import Chain, Choice, Draws, PassRequest
from selfspec.runtime.runner import RecordedRunner

pytestmark = pytest.mark.kernels

INT8 = selfspec.drafts.LowPrecision()
WARPS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "plain": {"top_k": 0},
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top-k": {"temperature": 1.4, "top_k": 5},
    "top-p": {"temperature": 1.4, "top_k": 20, "top_p": 0.7},
    "suppressed": {"do_sample": False, "suppress_tokens": [*range(0, 50, 2)], "begin_suppress_tokens": [7]},
}


class Counted:
    """Counts the chains of runners, or lets them take single steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chains, self.steps, self.allowed = 0, 0, True
        inner = RecordedRunner.chain

        def chain(runner: RecordedRunner, *args: Any) -> Chain | None:
            found = inner(runner, *args) if self.allowed else None
            if found is None:
                return None
            self.chains += 1
            return Chain(found.probs, self._counted(found))

        monkeypatch.setattr(RecordedRunner, "chain", chain)

    def _counted(self, chain: Chain) -> Generator[Any, None, None]:
        for step in chain.steps:
            self.steps += 1
            yield step


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def _model(vocabulary: int) -> PreTrainedModel:
    return tiny.llama(vocab_size=vocabulary).float()


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("vocabulary", [50, 8450])
def test_tokens_are_those_of_single_steps(counted: Counted, warp: str, reduced: bool, vocabulary: int) -> None:
    kept = tuple(range(1, vocabulary, 3))
    draft = selfspec.drafts.ReducedVocabulary(INT8, kept) if reduced else INT8
    spec = wrapped(_model(vocabulary), Native(after=0), draft)
    prompts, mask = torch.cat([tiny.prompt(6, seed=seed) for seed in range(2)]), torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    options: dict[str, Any] = {"do_sample": True, **WARPS[warp]}

    def run(seed: int) -> list[list[int]]:
        noise: dict[str, Any] = {"seed": seed} if options["do_sample"] else {}
        tokens: list[list[int]] = spec.generate(prompts, mask, max_new_tokens=24, **options, **noise).sequences.tolist()
        return tokens

    run(0)
    run(1)
    counted.chains = 0
    in_one_go = [run(seed) for seed in range(2, 5)]
    assert counted.chains
    counted.allowed = False
    assert in_one_go == [run(seed) for seed in range(2, 5)]


@pytest.mark.parametrize("control", [selfspec.CostAware(6, costs=selfspec.Costs(draft=0.3)), 4])
def test_the_control_decides_after_each_step(counted: Counted, control: Any) -> None:
    spec = selfspec.wrap(_model(50), INT8, draft_length=control, runtime=Native(after=0))
    spec.programs = GraphCache(Native(after=0), ticking())
    prompt = tiny.prompt(6)
    for _ in range(2):
        spec.generate(prompt, max_new_tokens=30, do_sample=False)
    counted.steps = 0
    chained = spec.generate(prompt, max_new_tokens=30, do_sample=False)
    assert counted.steps == chained.stats.drafted > 0
    counted.allowed = False
    single = spec.generate(prompt, max_new_tokens=30, do_sample=False)
    assert torch.equal(single.sequences, chained.sequences)
    assert single.stats.drafted == chained.stats.drafted


def test_processors_that_look_at_more_take_single_steps(counted: Counted) -> None:
    spec = wrapped(_model(50), Native(after=0), INT8)
    mass = {"do_sample": True, "top_p": 0.8, "top_k": 0, "seed": 1}
    others: list[dict[str, Any]] = [{"repetition_penalty": 1.2}, mass]
    for options in others:
        for _ in range(3):
            spec.generate(tiny.prompt(6), max_new_tokens=20, **options)
    assert spec.programs.proved
    assert not counted.chains


class Bench:
    """A model whose cache holds a prompt, with a program for passes over one token of each of two rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        programs = GraphCache(Native(after=0), ticking())
        self.runner = begun(model, torch.cat([tiny.prompt(7, seed=seed) for seed in range(2)]), [7, 7], programs)
        self.path = LayerPath.full(self.runner.depth)
        self.last = torch.tensor([[3], [4]])
        while not programs.proved:
            self.runner.run(PassRequest(self.path, self.last))
            self.runner.cache.commit([1, 1])

    def chained(self, draws: Draws) -> Chained:
        chain: Any = self.runner.chain(PassRequest(self.path, self.last), draws)
        steps = list(chain.steps)
        tokens = torch.cat([step.token for step in steps], 1)
        read = torch.cat([self.last, tokens[:, :-1]], 1)
        confidences = torch.tensor([step.confidences for step in steps]).T
        return Chained(tokens, chain.probs, confidences, self.runner.run(PassRequest(self.path, read)).logits)


@dataclass(frozen=True)
class Chained:
    """A chain, and the logits of the same steps by one pass over its tokens."""

    tokens: Tensor
    probs: Tensor | None
    confidences: Tensor
    logits: Tensor


def _draws(choice: Choice, vocabulary: int, steps: int = 5) -> Draws:
    numbers = torch.rand(1 + (vocabulary > 8192), 2, steps, dtype=torch.float64, generator=_generator())
    return Draws(choice, numbers, vocabulary)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


CHOICES = {
    "plain": Choice(1.0),
    "temperature": Choice(0.6),
    "top-k": Choice(1.4, 5),
    "one": Choice(1.4, 1),
    "all": Choice(1.4, 10_000),
    "top-p": Choice(1.4, 20, 0.7),
    "least mass": Choice(1.4, 20, 1e-6),
    "suppressed": Choice(1.4, 20, 0.7, suppressed=tuple(range(0, 50, 3))),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("vocabulary", [50, 8450])
def test_tokens_are_drawn_from_what_warpers_leave(name: str, vocabulary: int) -> None:
    choice = CHOICES[name]
    draws = _draws(choice, vocabulary)
    found: Any = Bench(_model(vocabulary)).chained(draws)
    warpers = LogitsProcessorList(
        [
            *([Suppression(torch.tensor(choice.suppressed))] if choice.suppressed else []),
            TemperatureLogitsWarper(choice.temperature),
            *([TopKLogitsWarper(choice.top_k)] if choice.top_k else []),
            *([TopPLogitsWarper(choice.top_p)] if choice.top_p < 1 else []),
        ]
    )
    assert choice_of(Warping(warpers), 1) == choice
    flat = found.logits.flatten(0, 1)
    for warper in warpers:
        flat = warper(None, flat)
    q = flat.softmax(-1).reshape(found.logits.shape)
    torch.testing.assert_close(found.probs, q, rtol=1e-4, atol=1e-7)
    assert torch.equal(found.probs > 0, q > 0)
    torch.testing.assert_close(found.confidences, found.probs.amax(-1))
    drawn = drawn_by_inversion if vocabulary < 8192 else drawn_by_blocks
    assert torch.equal(found.tokens, drawn(found.probs, *draws.uniform))


@torch.no_grad()
@pytest.mark.parametrize("suppressed", [(), tuple(range(1, 50, 2))], ids=["all", "some suppressed"])
def test_the_likeliest_token_is_chosen(suppressed: tuple[int, ...]) -> None:
    # Numbers that are no tokens are suppressed in vain.
    beyond = (-1, 50) if suppressed else ()
    found = Bench(_model(50)).chained(_draws(Choice(0.0, suppressed=(*suppressed, *beyond)), 50))
    logits = found.logits
    logits[..., suppressed] = -torch.inf
    assert found.probs is None
    assert torch.equal(found.tokens, logits.argmax(-1))
    torch.testing.assert_close(found.confidences, logits.softmax(-1).amax(-1))


@torch.no_grad()
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["plain", "top-k"])
def test_logits_that_are_not_finite_draw_from_all_tokens_alike(bad: float, name: str) -> None:
    model = _model(50)
    bench = Bench(model)
    model.lm_head.weight.fill_(bad)
    found = bench.chained(_draws(CHOICES[name], 50))
    assert found.probs is not None
    assert torch.equal(found.probs, torch.full_like(found.probs, 1 / 50))
    assert not found.confidences.any()
    assert found.tokens.unique().numel() > 1


def test_what_a_choice_does_not_say_is_not_chosen_by_it() -> None:
    cold, few, likely = TemperatureLogitsWarper(0.5), TopKLogitsWarper(3), TopPLogitsWarper(0.9)
    assert choice_of(Warping(LogitsProcessorList()), 1) == Choice(1.0)
    assert choice_of(Warping(LogitsProcessorList([cold, few, likely])), 1) == Choice(0.5, 3, 0.9)
    others = (
        [few, cold],
        [likely],
        [MinPLogitsWarper(0.1)],
        [TopKLogitsWarper(3, filter_value=-9.0)],
        [few, TopPLogitsWarper(0.9, min_tokens_to_keep=2)],
    )
    assert [choice_of(Warping(LogitsProcessorList(each)), 1) for each in others] == [None] * len(others)
    never, at_first = Suppression(torch.tensor([3, 5])), SuppressionAt(torch.tensor([7]), 4)
    begun = read_processing(LogitsProcessorList([never, at_first, cold]), frozenset(), 99)
    assert choice_of(begun, 4) is None
    assert choice_of(begun, 5) == Choice(0.5, suppressed=(3, 5))
    late = Warping(LogitsProcessorList([few, never]))
    assert choice_of(late, 5) is None


def test_a_second_chain_of_a_round_begins_where_the_first_did() -> None:
    bench = Bench(_model(50))
    first, second = (bench.chained(_draws(Choice(0.0), 50)) for _ in range(2))
    assert torch.equal(second.tokens, first.tokens)
    assert torch.equal(second.logits, first.logits)
    assert torch.equal(second.confidences, first.confidences)

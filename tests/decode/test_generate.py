"""The loop: lengths, trees, small biases that text does not show, and numbers that are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.captures import StandIn
from helpers.drafting import Altered, Oracle, Propose, Remembering, poisoning
from helpers.joints import (
    BATCHES,
    MANY,
    PAIR,
    PROMPTS,
    ROWS,
    THREE,
    Warp,
    assert_rows_are_stock,
    holm_rejects,
    joint,
    network,
    p_value,
    p_values,
    small,
)
from helpers.tiny import in_turns
from selfspec.cache.tree import Tree
from selfspec.decode.group import BatchSampling
from selfspec.draft import Budget, Draft, Drafter
from selfspec.runtime import Runtime


def test_a_seed_gives_the_same_tokens_and_another_seed_others(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=4)

    def run(seed: int | None) -> list[int]:
        output = spec.generate(tiny.prompt(4), do_sample=True, max_new_tokens=40, seed=seed)
        return output.sequences[0].tolist()

    assert run(1) == run(1)
    assert run(1) != run(2)
    torch.manual_seed(5)
    first = run(None)
    assert run(None) != first
    torch.manual_seed(5)
    assert run(None) == first


def test_stats_add_up(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.LayerSkip(mlp=[2]), draft_length=3)
    chunks = list(spec.stream(tiny.prompt(4), do_sample=False, max_new_tokens=31))
    output = spec.generate(tiny.prompt(4), do_sample=False, max_new_tokens=31)
    stats = output.stats
    assert stats.rounds == stats.row_rounds == len(chunks)
    assert stats.accepted == sum(chunk.rows[0].accepted for chunk in chunks) > 0
    assert stats.drafted == sum(len(chunk.rows[0].draft) for chunk in chunks)
    # Every round commits one token of the target's own.
    assert stats.new_tokens == 31 == stats.accepted + stats.rounds
    rejected = sum(chunk.rows[0].accepted < len(chunk.rows[0].draft) for chunk in chunks)
    assert stats.judged == stats.accepted + rejected
    assert stats.mean_accepted_length == pytest.approx(31 / stats.rounds)
    assert stats.acceptance_rate == pytest.approx(stats.accepted / (stats.accepted + rejected))
    assert set(stats.seconds) == {"prefill", "draft", "verify", "accept", "commit"}


def plant_not_finite(model: PreTrainedModel, value: float, position: int) -> None:
    """Make the target's logits `value` wherever the input at that position is read."""

    def corrupt(module: torch.nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return torch.where((args[0].sum(-1, keepdim=True) * 0 + planted["now"]) > 0, value, output)

    planted = {"now": 0.0}

    def watch(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        planted["now"] = (kwargs["position_ids"] == position).to(torch.float64)[..., None]

    model.model.register_forward_pre_hook(watch, with_kwargs=True)
    model.lm_head.register_forward_hook(corrupt)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "draft",
    [
        None,
        selfspec.drafts.EarlyExit(2),
        selfspec.drafts.LayerSkip(mlp=[1]),
        selfspec.drafts.LowPrecision(layers=[2, 3]),
    ],
)
def test_logits_that_are_not_finite_end_the_row_and_keep_what_was_committed(
    llama: PreTrainedModel, value: float, sampled: bool, draft: Drafter | None
) -> None:
    options: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": 20}
    if sampled:
        options["seed"] = 3
    plant_not_finite(llama, value, position=10)
    spec = selfspec.wrap(llama, draft, draft_length=3)
    with pytest.raises(selfspec.errors.NonFiniteLogitsError, match="row 0 after 7 new tokens") as caught:
        spec.generate(tiny.prompt(4), **options)
    # Positions 4..10 hold new tokens; the logits at position 10 would have given the next.
    assert caught.value.rows == (0,)
    assert caught.value.output.lengths == (7,)
    if not sampled:
        clean = tiny.llama().generate(tiny.prompt(4), do_sample=False, max_new_tokens=7)
        assert torch.equal(caught.value.output.sequences, clean)


def test_a_row_that_is_not_finite_leaves_the_others_alone(llama: PreTrainedModel) -> None:
    prompts = torch.cat([tiny.prompt(4, seed=1), tiny.prompt(4, seed=2)])
    expected = llama.generate(prompts, do_sample=False, max_new_tokens=12)
    first = int(prompts[0, 0])
    assert first != int(prompts[1, 0])

    def poison(module: torch.nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return torch.where((args[0] == first)[..., None], float("nan"), output)

    llama.model.embed_tokens.register_forward_hook(poison)
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=4)
    with pytest.raises(selfspec.errors.NonFiniteLogitsError) as caught:
        spec.generate(prompts, do_sample=False, max_new_tokens=12)
    assert caught.value.rows == (0,)
    assert caught.value.output.lengths[0] == 0
    if first not in expected[1, 4:]:
        assert torch.equal(caught.value.output.sequences[1], expected[1])


def test_a_draft_that_is_not_finite_still_samples_exactly() -> None:
    model = small()
    drafting = []

    def overflowing(propose: Propose, batch: Any, budget: Budget) -> selfspec.drafts.Draft:
        drafting.append(True)
        draft = propose(batch, budget)
        drafting.clear()
        return draft

    def overflow(module: torch.nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return output * float("nan") if drafting else output

    model.lm_head.register_forward_hook(overflow)
    found = p_values(
        selfspec.wrap(model, Altered(selfspec.drafts.EarlyExit(2), overflowing), draft_length=2), Warp(temperature=0.8)
    )
    assert holm_rejects(found, 0.01) == []


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_tokens_before_logits_that_are_not_finite_still_follow_the_joint(rule: str) -> None:
    prompt, clean, kept = PROMPTS[0], small(seed=1), 3
    expected: dict[tuple[int, ...], float] = {}
    for outcome, chance in joint(clean, prompt, Warp(), None).items():
        expected[outcome[:kept]] = expected.get(outcome[:kept], 0.0) + chance
    model = small(seed=1)
    plant_not_finite(model, float("nan"), position=len(prompt) + kept - 1)
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=4, accept=rule)
    seen = []
    for seed in range(BATCHES):
        with pytest.raises(selfspec.errors.NonFiniteLogitsError) as caught:
            spec.generate(
                torch.tensor([prompt]).expand(ROWS, -1), max_new_tokens=8, seed=seed, do_sample=True, top_k=None
            )
        assert set(caught.value.output.lengths) == {kept}
        seen += [tuple(row[len(prompt) :]) for row in caught.value.output.sequences.tolist()]
    assert p_value(seen, expected) > 1e-3


RUNTIMES = {"stock": selfspec.runtime.Eager(), "buckets": StandIn(0, bucket=16)}


@pytest.mark.parametrize(
    ("draft", "attention", "runtime"),
    in_turns(
        (selfspec.drafts.EarlyExit(1), selfspec.drafts.EarlyExit(3), selfspec.drafts.LayerSkip(layers=[0])),
        ("sdpa", "eager"),
        RUNTIMES,
    ),
)
def test_a_draft_token_that_spoils_the_block_does_not_end_the_row(
    draft: Drafter, attention: str, runtime: Runtime
) -> None:
    # NaN in the keys and values of a rejected token reaches the positions before it: masked, but 0 * NaN is NaN.
    model = tiny.llama(attention=attention)
    prompts = [tiny.prompt(4, seed=1), tiny.prompt(9, seed=2)]
    expected = [model.generate(prompt, do_sample=False, max_new_tokens=24)[0] for prompt in prompts]
    spec = selfspec.wrap(model, poisoning(model, draft, torch.cat(expected)), draft_length=3, runtime=runtime)
    for prompt, text in zip(prompts, expected, strict=True):
        assert torch.equal(spec.generate(prompt, do_sample=False, max_new_tokens=24).sequences[0], text)
    assert_rows_are_stock(model, spec, prompts, max_new_tokens=24)


FORK = Tree((-1, -1, 0, 0, 1, 2, 4))
SHAPES = [Tree((-1, -1, -1)), FORK, Tree((-1, 0, -1, 2, 3, 3))]


PLAIN: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def never(ids: Tensor, scores: Any) -> Tensor:
    """A criterion with memory, as far as one can know: it needs all rows at one length."""
    return torch.zeros(ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("tree", SHAPES, ids=str)
def test_greedy_text_of_a_tree_is_stock_text(architecture: str, tree: Tree, lockstep: bool) -> None:
    model, ids = tiny.BUILDERS[architecture](), tiny.prompt(9, 3)
    expected = model.generate(ids, max_new_tokens=24, **PLAIN)
    spec = selfspec.wrap(model, Oracle(tree, expected[:, ids.shape[1] :]), draft_length=len(tree))
    output = spec.generate(ids, max_new_tokens=24, stopping_criteria=[never] if lockstep else None, **PLAIN)
    assert torch.equal(output.sequences, expected)
    assert output.stats.mean_accepted_length > 1.5
    assert len(output.stats.judged_per_depth) == tree.depth


def test_scores_and_processors_follow_the_path(llama: PreTrainedModel) -> None:
    ids = tiny.prompt(9, 2)
    options: dict[str, Any] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "max_new_tokens": 20, **PLAIN}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = llama.generate(ids, **options)
    spec = selfspec.wrap(llama, Oracle(FORK, expected.sequences[:, ids.shape[1] :]), draft_length=len(FORK))
    output = spec.generate(ids, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.stats.mean_accepted_length > 1.5
    for name in ("scores", "logits"):
        torch.testing.assert_close(output[name], expected[name], atol=1e-5, rtol=0, check_dtype=False)
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="stateless = True"):
        spec.generate(ids, logits_processor=LogitsProcessorList([Remembering()]), **options)


WARM, SHARP = Warp(temperature=1.5), Warp(temperature=0.7)
FILTERED = Warp(temperature=1.4, top_k=4, top_p=0.85)


def chance_by_q(draft: Draft) -> dict[tuple[int, ...], float]:
    """The joint of drafted texts that the draft itself claims: q of each position given the tokens before it."""
    assert draft.probs is not None
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for position in range(draft.length):
        rows = {tuple(before): row for row, before in enumerate(draft.tokens[:, :position].tolist())}
        texts = {
            (*text, token): chance * probability
            for text, chance in texts.items()
            # A text that was never drafted has no q that could be looked at.
            for token, probability in enumerate(draft.probs[rows[text], position].tolist() if text in rows else [1.0])
        }
    return texts


DRAFTERS = (
    selfspec.drafts.EarlyExit(1),
    selfspec.drafts.LayerSkip(attention=[1]),
    selfspec.drafts.LowPrecision(4),
    selfspec.drafts.LowPrecision(8, fewer=selfspec.drafts.EarlyExit(1)),
)


@pytest.mark.contract
@pytest.mark.parametrize(("drafter", "warp"), in_turns(DRAFTERS, (WARM, SHARP, FILTERED), mark=pytest.mark.statistical))
def test_a_draft_is_drawn_from_the_q_it_is_scored_with(drafter: Drafter, warp: Warp) -> None:
    kept: list[Draft] = []

    def keeping(propose: Propose, batch: Any, budget: Budget) -> Draft:
        kept.append(propose(batch, budget))
        return kept[-1]

    # Kernels in fewer bits take no smaller width.
    width = 32 if isinstance(drafter, selfspec.drafts.LowPrecision) else 8
    spec = selfspec.wrap(network(width=width), Altered(drafter, keeping), draft_length=THREE)
    next(spec.stream(torch.tensor(PAIR).expand(2 * MANY, -1), max_new_tokens=THREE + 1, seed=0, **warp.options))
    (draft,) = kept
    assert p_value(map(tuple, draft.tokens.tolist()), chance_by_q(draft)) > 1e-3


@pytest.mark.parametrize(
    "draft",
    [selfspec.drafts.EarlyExit(3), selfspec.drafts.LayerSkip(mlp=[2]), selfspec.drafts.LowPrecision(4, layers=[3])],
    ids=str,
)
def test_coupled_drafts_are_accepted_as_often_as_is_promised(
    llama: PreTrainedModel, draft: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: list[Tensor] = []
    drafted: list[Tensor | None] = []
    decide, judged = BatchSampling.decide, BatchSampling.judged

    def deciding(self: BatchSampling, p: Tensor, *given: Any) -> Tensor:
        target.extend([p[:, :1]] if p.shape[1] > 1 else [])
        return decide(self, p, *given)

    def judging(self: BatchSampling, found: Draft) -> Draft:
        drafted.append(found.probs)
        return judged(self, found)

    monkeypatch.setattr(BatchSampling, "decide", deciding)
    monkeypatch.setattr(BatchSampling, "judged", judging)
    spec = selfspec.wrap(llama, draft, draft_length=1, accept="coupled")
    stats = spec.generate(
        tiny.prompt(4, batch=32), max_new_tokens=72, do_sample=True, top_k=None, temperature=2.0, seed=0
    ).stats
    # (1 - TV) / (1 + TV) is convex in 1 - TV, so the mean over places is no less than this of the mean.
    each = zip(target, drafted, strict=True)
    optimum = torch.cat([torch.minimum(p, q).sum(-1).flatten() for p, q in each if q is not None]).mean().item()
    assert stats.judged > 1000
    assert stats.acceptance_rate < optimum < 1
    assert stats.acceptance_rate > optimum / (2 - optimum) - 0.05

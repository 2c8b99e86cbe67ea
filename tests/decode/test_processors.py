"""Logits processors see the whole prefix of each place, in drafts and in verification alike."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    generation,
)
from transformers.generation import RepetitionPenaltyLogitsProcessor

import selfspec
from helpers import tiny
from helpers.drafting import Altered, Propose, assert_alike, poisoning
from helpers.joints import EOS, Text, drawn, enumerated, holm_rejects, small
from selfspec.decode.group import BatchSampling, Group, Sampling
from selfspec.decode.noise import Noise
from selfspec.decode.processors import PrefixProcessing, Warping, read_processing, without_search
from selfspec.decode.stopping import Prefixes, Sequences, Stopping
from selfspec.draft import Budget, Drafter

WIDTH, NEW = 10, 20
PADDING = (4, 0, 7)
DRAFTS: tuple[Drafter | None, ...] = (None, selfspec.drafts.EarlyExit(3), selfspec.drafts.LayerSkip(mlp=[2]))
IN_FEWER_BITS = selfspec.drafts.LowPrecision(4, layers=[2, 3])


def ragged() -> dict[str, Any]:
    ids, mask = tiny.prompt(WIDTH, 3), torch.ones(3, WIDTH, dtype=torch.long)
    for row, padding in enumerate(PADDING):
        ids[row, :padding] = mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def by_last_token_and_row(row: int, ids: Tensor) -> list[int]:
    last = int(ids[-1])
    return [(7 * last + row) % 50, (last + 3) % 50, (last + 29) % 50]


class Frequency(LogitsProcessor):
    """A penalty for each time a token stands in the prefix."""

    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.ndim == scores.ndim == 2
        assert len(input_ids) == len(scores)
        return scores.scatter_add(1, input_ids, torch.full_like(input_ids, -0.7, dtype=scores.dtype))


class Unsaid(Frequency):
    """The same, without saying that it has no memory."""

    stateless = False


class InPlace(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_add_(1, input_ids[:, -2:], torch.full_like(input_ids[:, -2:], -5.0, dtype=scores.dtype))


OPTIONS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "n-grams": {"no_repeat_ngram_size": 2},
    "n-grams of the prompt": {"encoder_no_repeat_ngram_size": 1},
    "penalty on the prompt": {"encoder_repetition_penalty": 1.5},
    "bad words": {"bad_words_ids": [[38], [4, 5], [20, 21, 22]]},
    "sequence bias": {"sequence_bias": [[[7], 5.0], [[7, 9], -9.0]]},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(0, 50, 3))},
    "min_length": {"min_length": 17, "eos_token_id": list(range(0, 50, 4))},
    "forced end": {"forced_eos_token_id": 5},
    "forced begin": {"forced_bos_token_id": 5},
    "decay": {"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": 7},
    "suppressed": {"suppress_tokens": [1, 2, 3, 20, 22]},
    "suppressed at first": {"begin_suppress_tokens": [1, 2, 3, *range(20, 40)]},
    "normalised": {"renormalize_logits": True},
    "watermark": {"watermarking_config": {"bias": 5.5}},
    "watermark of itself": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}, "max_new_tokens": 4},
    "prefix function": {"prefix_allowed_tokens_fn": by_last_token_and_row},
    "the caller's own": {"logits_processor": LogitsProcessorList([Frequency()])},
    "a plain function": {"logits_processor": LogitsProcessorList([lambda ids, scores: Frequency()(ids, scores)])},
    "one that may have memory": {"logits_processor": LogitsProcessorList([Unsaid()])},
    "one that writes": {"logits_processor": LogitsProcessorList([InPlace()])},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 5, "eos_token_id": [3, 9]},
}
"""Everything that reads a prefix or a length, as `generate` takes it."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_equals_stock_generate_on_a_ragged_batch(llama: PreTrainedModel, name: str) -> None:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **OPTIONS[name]}
    wanted = llama.generate(**ragged(), **options)
    plain = llama.generate(**ragged(), **{**options, **dict.fromkeys(OPTIONS[name])})
    assert torch.equal(wanted, plain) == (name in ("forced begin", "normalised"))
    for draft, rule in zip((*DRAFTS, IN_FEWER_BITS), ("token", "token", "block", "block"), strict=True):
        spec = selfspec.wrap(llama, draft, draft_length=4, accept=rule)
        assert torch.equal(spec.generate(**ragged(), **options).sequences, wanted), (draft, rule)


# The joint distribution of several tokens.

SETTINGS: tuple[tuple[list[LogitsProcessor], int | None], ...] = (
    ([RepetitionPenaltyLogitsProcessor(1.8)], None),
    ([generation.NoRepeatNGramLogitsProcessor(2)], None),
    ([generation.MinNewTokensLengthLogitsProcessor(4, 2, EOS)], EOS),
    ([RepetitionPenaltyLogitsProcessor(0.5), generation.MinNewTokensLengthLogitsProcessor(4, 1, EOS)], EOS),
)


def p_values(
    spec: selfspec.SelfSpeculative, processors: LogitsProcessorList, eos: int | None, seed: int
) -> dict[str, float]:
    """How well what a wrapper draws fits the joint of the processed logits of its model."""

    def joint(prompt: Text) -> dict[Text, float]:
        def chances(prefix: Text, logits: Tensor) -> list[float]:
            scores = processors(torch.tensor([[*prompt, *prefix]]), logits.float()[None].clone())
            found: list[float] = scores.softmax(-1)[0].tolist()
            return found

        return enumerated(spec.model, prompt, chances, eos)

    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "eos_token_id": eos, "logits_processor": processors}
    return drawn(spec, ((1, 2, 3, 1), (2, 1, 3, 2)), seed=seed, **options).fits(joint)


@pytest.mark.statistical
def test_samples_follow_the_exact_joint() -> None:
    found = {}
    drafts = (None, "exit:1", "skip:attn=1", "int4")
    for number, (draft, (given, eos)) in enumerate(itertools.product(drafts, SETTINGS)):
        rule, length = ("token", "block", "coupled")[number % 3], 1 + number % 4
        spec = selfspec.wrap(small(seed=number), draft, draft_length=length, accept=rule)
        for prompt, value in p_values(spec, LogitsProcessorList(given), eos, seed=100 * number).items():
            found[f"{draft} {rule} length {length} setting {number % 4} prompt {prompt}"] = value
    assert holm_rejects(found, 0.01) == []


def test_left_padding_is_penalised_where_transformers_does(llama: PreTrainedModel) -> None:
    ids = torch.tensor([[7, 7, 7, 1, 2, 3], [4, 5, 6, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 7, "repetition_penalty": 5.0}
    for draft in (None, selfspec.drafts.EarlyExit(2), selfspec.drafts.Suffixes()):
        spec = selfspec.wrap(llama, draft, draft_length=3)
        wanted = assert_alike(spec, inputs=ids, attention_mask=mask, **options)
    # By the attention mask, of which the processor is told from 5.23 on: then a row is what it is without padding.
    alone = llama.generate(ids[:1, 3:], attention_mask=mask[:1, 3:], **options)
    assert 7 in alone[0, 3:]
    is_told = Version(transformers.__version__) >= Version("5.23.0.dev0")
    assert torch.equal(alone[0], wanted[0, 3:]) == is_told


# What a processor is given.


class Witness(LogitsProcessor):
    stateless = True

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.ndim == 2
        self.seen.append(input_ids.tolist())
        return scores


def unable(propose: Propose, batch: Any, budget: Budget) -> selfspec.drafts.Draft:
    """Draft the same token over and over, so that much is rejected."""
    draft = propose(batch, budget)
    draft.tokens.fill_(11)
    return draft


def test_every_prefix_is_the_committed_text_and_then_the_draft(llama: PreTrainedModel) -> None:
    witness = Witness()
    prompt = tiny.prompt(5)
    spec = selfspec.wrap(llama, Altered(selfspec.drafts.EarlyExit(2), unable), draft_length=3)
    out = spec.generate(prompt, max_new_tokens=9, do_sample=False, logits_processor=[witness])
    text = out.sequences[0].tolist()
    assert out.stats.judged > out.stats.accepted
    for (ids,) in witness.seen:
        shared = next((n for n, (a, b) in enumerate(zip(ids, text, strict=False)) if a != b), len(ids))
        # A rejected token is never counted: after what is not the text's stand only tokens of one draft.
        assert shared >= 5
        assert len(ids) - shared <= 3
    judged = {tuple(ids) for (ids,) in witness.seen}
    assert all(tuple(text[:length]) in judged for length in range(5, len(text)))


def test_a_draft_beyond_the_end_of_the_text_is_no_prefix(llama: PreTrainedModel) -> None:
    text = llama.generate(tiny.prompt(5), max_new_tokens=12, do_sample=False)[0].tolist()
    eos = text[9]
    witness = Witness()
    spec = selfspec.wrap(llama, selfspec.drafts.LayerSkip(mlp=[3]), draft_length=5)
    spec.generate(tiny.prompt(5), max_new_tokens=12, do_sample=False, eos_token_id=eos, logits_processor=[witness])
    assert witness.seen
    assert all(eos not in ids[5:] for (ids,) in witness.seen)
    assert max(len(ids) for (ids,) in witness.seen) < 17


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("name", ["several", "n-grams", "the caller's own"])
def test_a_draft_as_good_as_the_target_is_accepted_whole(name: str, rule: str) -> None:
    spec = selfspec.wrap(tiny.as_good_as_the_target(), selfspec.drafts.EarlyExit(3), draft_length=4, accept=rule)
    for sampled in (False, True):
        options = {**OPTIONS[name], "max_new_tokens": NEW, "do_sample": sampled, "eos_token_id": None}
        options.pop("min_new_tokens", None)
        assert spec.generate(tiny.prompt(5), seed=1, **options).stats.acceptance_rate == 1


class Dead(LogitsProcessor):
    """Leaves no token to choose where a draft goes on, and one in plain decoding; it can go back."""

    undone = 0

    def rollback(self, calls: int) -> None:
        self.undone += calls

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert (input_ids[:, 5:] % 2 == 0).all(), "a token that was never allowed"
        odd = torch.arange(scores.shape[-1]) % 2 == 1
        scores = scores.masked_fill(odd, -torch.inf)
        # Only the target's logits are of this model's scale.
        return scores.masked_fill(scores.amax(-1, keepdim=True) > 50, -torch.inf)


def test_a_draft_that_runs_into_a_dead_end_shows_the_processor_no_further_token(llama: PreTrainedModel) -> None:
    def loud(propose: Propose, batch: Any, budget: Budget) -> selfspec.drafts.Draft:
        passes = batch.runner.run
        try:
            batch.runner.run = lambda request: _louder(passes(request))
            return propose(batch, budget)
        finally:
            batch.runner.run = passes

    options: dict[str, Any] = {"max_new_tokens": 15, "do_sample": False}
    wanted = llama.generate(tiny.prompt(5), logits_processor=[Dead()], **options)
    processor = Dead()
    out = selfspec.wrap(llama, Altered(selfspec.drafts.LayerSkip(mlp=[3]), loud), draft_length=4).generate(
        tiny.prompt(5), logits_processor=[processor], **options
    )
    assert torch.equal(out.sequences, wanted)
    assert processor.undone == out.stats.rounds - (out.stats.drafted == 0)


def _louder(step: Any) -> Any:
    step.logits.add_(1000.0)
    return step


class Alternating(LogitsProcessor):
    """Favours another token with each call: a wrong number of calls gives another distribution."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 50] += 2.5
        scores[:, (self.calls + 2) % 50] = -torch.inf
        return scores


def test_a_draft_token_that_spoils_the_block_is_not_shown_to_processors() -> None:
    # NaN in the values of a rejected token reaches the places before it: masked, but 0 * NaN is NaN.
    llama = tiny.llama(attention="eager")
    options: dict[str, Any] = {"max_new_tokens": 18, "do_sample": False}
    text = llama.generate(tiny.prompt(5, 2), logits_processor=[Alternating()], **options)
    processor = Alternating()
    # A path that skips the first layer leaves nothing to resume: the target reads the whole block at once.
    drafter = poisoning(llama, selfspec.drafts.LayerSkip(layers=[0]), text, rows=slice(1))
    spec = selfspec.wrap(llama, drafter, draft_length=3)
    out = spec.generate(tiny.prompt(5, 2), logits_processor=[processor], **options)
    assert torch.equal(out.sequences, text)
    assert processor.calls == 18


def test_places_of_rows_at_different_lengths_are_processed_with_their_own_prefixes() -> None:
    def lengths_and_last(ids: Tensor, scores: Tensor) -> Tensor:
        assert len(ids) == len(scores) == 2
        return scores + ids.shape[1] * 100 + ids[:, -1:]

    text = Sequences(torch.tensor([[1, 2], [3, 4]]), pad=0)
    text.committed[0] += [5, 6]
    processing = PrefixProcessing(LogitsProcessorList([lengths_and_last]), frozenset(), limit=99)
    drafted = [torch.tensor([[7], [8]]), torch.tensor([[9], [10]])]
    logits = torch.zeros(2, 3, 1)
    found = processing.scores(logits, Prefixes(text, drafted))[..., 0]
    assert found.tolist() == [[406, 507, 609], [204, 308, 410]]
    step = processing.scores(logits[:, :1], Prefixes(text, drafted))[..., 0]
    assert step.tolist() == [[609], [410]]
    assert (logits == 0).all()


# Suppressed tokens.

SUPPRESSED = [3, 0, 17]
ALWAYS = generation.SuppressTokensLogitsProcessor(SUPPRESSED)
AT_FOUR = generation.SuppressTokensAtBeginLogitsProcessor(SUPPRESSED, 4)


def test_the_vocabulary_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Tensor] = []
    search = torch.isin

    def counted(among: Tensor, tokens: Tensor) -> Tensor:
        searches.append(tokens)
        return search(among, tokens)

    monkeypatch.setattr(torch, "isin", counted)
    processing = read_processing(LogitsProcessorList([ALWAYS]), frozenset(), 9)
    assert isinstance(processing, Warping)
    for _ in range(3):
        processing.processors[0](torch.zeros(1, 4), torch.randn(1, 20))
    assert len(searches) == 1
    assert isinstance(read_processing(LogitsProcessorList([ALWAYS, AT_FOUR]), frozenset(), 9), PrefixProcessing)


def test_processors_that_do_not_suppress_stay_what_they_are() -> None:
    class Own(generation.SuppressTokensLogitsProcessor):
        pass

    others: list[LogitsProcessor] = [Own(SUPPRESSED), generation.MinLengthLogitsProcessor(3, 2)]
    assert all(without_search(each) is each for each in others)


# What processed logits become: the probabilities that plain decoding would draw from.


def sampling_of(warpers: LogitsProcessorList, greedy: bool, rows: int) -> BatchSampling:
    prompts, noise = torch.empty(rows, 0, dtype=torch.long), Noise(0, range(rows), torch.device("cpu"))
    return BatchSampling([Group(Sequences(prompts, pad=0), Sampling(Warping(warpers), greedy), Stopping(1), noise)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_probabilities_are_those_of_float32_logits_whatever_their_dtype(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    for warpers, temperature in (([], 1.0), ([TemperatureLogitsWarper(0.5)], 0.5)):
        sampling = sampling_of(LogitsProcessorList(warpers), greedy=False, rows=2)
        found = sampling.probabilities(sampling.scores(logits))
        torch.testing.assert_close(found, (logits.float() / temperature).softmax(-1), rtol=1e-6, atol=0.0)


GREEDY: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])


@pytest.fixture
def broken(llama: PreTrainedModel) -> PreTrainedModel:
    """One token's logit is never a number, another's is infinite, of a sign that goes with the text."""
    weight = llama.get_output_embeddings().weight.data
    weight[7] = torch.nan
    weight[9] = 0.0
    weight[9, 0] = 1e39
    return llama


@pytest.mark.parametrize("draft", [*DRAFTS, IN_FEWER_BITS], ids=str)
def test_text_scores_and_logits_are_those_of_transformers(broken: PreTrainedModel, draft: Drafter | None) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    spec, options = selfspec.wrap(broken, draft, draft_length=3), {"remove_invalid_values": True, **GREEDY}
    new = assert_alike(spec, inputs=tiny.prompt(7, 3), attention_mask=MASK, **options)[:, 7:]
    assert 0 < (new == 9).sum() < new.numel()
    options |= {"repetition_penalty": 1.3, **asked}
    stock = broken.generate(tiny.prompt(7), **options)
    out: Any = spec.generate(tiny.prompt(7), **options)
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(stock.scores))
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(stock.logits), equal_nan=True)

"""Whole verifications: exact models pass in every dtype, planted errors do not, near-ties are told from errors.

What selfspec's passes say of a text is held to stock passes and pruned models, places to sample at to enumerations.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

import selfspec
from helpers import tiny
from helpers.reference import zeroed
from helpers.saved_folders import PROMPTS, checkpoint_folder
from helpers.shrunken import shrunken
from helpers.snapshot import Snapshot
from selfspec.accept import TokenLevel
from selfspec.adapters import ADAPTERS
from selfspec.decode.noise import Noise
from selfspec.decode.output import Stats
from selfspec.draft import Budget, Draft, Drafter, EarlyExit, LayerSkip, RowsView, Stateless
from selfspec.draft.along_layer_path import LayerPathDrafter, LayerPathProposer
from selfspec.errors import DraftConfigError, NonFiniteLogitsError, PromptError
from selfspec.measure.rounding import Bound, largest_difference
from selfspec.measure.stock import blockwise_logits, read_reference, stepwise_logits
from selfspec.measure.teacher_forced import draft_step_logits
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import find_adapter
from selfspec.model.stock_passes import over_cache
from selfspec.runtime import BatchInvariant, Eager
from selfspec.runtime.request import NO_LOGITS, PassRequest, PassResult
from selfspec.runtime.runner import ModelRunner
from selfspec.tools.verify.fit import NEW_TOKENS, Outcome, Place, choose_places
from selfspec.tools.verify.report import Check, DraftReport, Exactness, VerifyReport
from selfspec.tools.verify.settings import Settings
from selfspec.tools.verify.verification import default_drafts, forced_logits, verify

QUICK = Settings(max_new_tokens=16, samples=300)
# Where the texts matter, and where the tests of fit do.
TEXTS = replace(QUICK, samples=100)
FITS = replace(QUICK, max_new_tokens=8, samples=600)
# One that is accepted most of the time, and one that is half of the time.
DRAFTS = (selfspec.drafts.LayerSkip(attention=[1]), selfspec.drafts.EarlyExit(4))


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    return [tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS[1:]]


def verified(
    model: PreTrainedModel, prompts: Sequence[Tensor], settings: Settings = QUICK, drafts: Sequence[Drafter] = DRAFTS
) -> VerifyReport:
    report = verify(model, prompts, drafts, settings)
    # What is said in JSON is what is.
    said = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert said["verdict"] == report.exactness
    assert said["exact"] == report.exact == (not said["failures"])
    assert len(said["divergences"]) == len(report.divergences)
    assert len(said["drafts"]) == len(drafts) + 1
    return report


def test_an_exact_model_in_float32(stories: PreTrainedModel, prompts: list[Tensor]) -> None:
    before = Snapshot(stories)
    report = verified(stories, prompts)
    before.assert_same(stories)
    assert report.exactness is Exactness.EXACT
    assert report.sentence.startswith("EXACT: all 96 greedy tokens are the model's own, 64 coupled tokens")
    assert report.failures == ()
    assert (report.dtype, report.device, report.depth, report.prompts) == ("float32", "cpu", 5, 2)
    assert [draft.name for draft in report.drafts] == ["none", "skip:attn=1", "exit:4"]
    for draft in report.drafts:
        assert draft.compared(Check.FREE_RUNNING, "token").equal_texts == 2
        assert draft.compared(Check.TEACHER_FORCED).tokens == 32
        assert draft.logits_off <= report.bound.most_off
    assert [[each.equal_texts for each in draft.of(Check.PLAIN)] for draft in report.drafts] == [[], [2], [2]]
    # Draft tokens were accepted and rejected, so both were verified.
    assert all(0 < draft.stats.accepted < draft.stats.judged for draft in report.drafts[1:])
    # Rates are lines of the lab's table, by its columns and with its intervals.
    plain, *lines = (draft.figures(report.bound) for draft in report.drafts)
    assert (plain["mean_accepted_length"], plain["equal"], plain.get("alpha")) == (1.0, 1.0, None)
    for draft, line in zip(report.drafts[1:], lines, strict=True):
        assert (line["n"], line["new_tokens"], line["equal"], line["refused"]) == (2, 32, 1.0, False)
        assert line["mean_accepted_length"] == pytest.approx(draft.stats.mean_accepted_length)
        assert line["acceptance_rate"] == pytest.approx(draft.stats.acceptance_rate)
        assert line["acceptance_rate_low"] < line["acceptance_rate"] < line["acceptance_rate_high"]
        assert line["accepted_by_position"] == draft.stats.accepted_per_depth
    tests = [(fit.draft, fit.rule) for fit in report.fits]
    drafting = [(draft.name, rule) for draft in report.drafts[1:] for rule in ("token", "block")]
    assert tests == [("none", "coupled"), *drafting]
    assert all(fit.cells > 5 and fit.noncentrality < 1e-6 for fit in report.fits)
    assert {fit.temperature for fit in report.fits} == {0.8, 1.0}
    assert report.settings.lossless


@pytest.mark.tools
def test_an_exact_model_in_half_precision(prompts: list[Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.bfloat16)
    report = verified(model, prompts, TEXTS, DRAFTS[:1])
    assert report.exact
    assert report.dtype == "bfloat16"
    assert 1e-3 < report.bound.largest < 1
    assert all(divergence.is_near_tie(report.bound) for divergence in report.divergences)


@pytest.mark.kernels
def test_batch_invariant_passes_keep_every_bit_and_others_are_told(
    prompts: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.bfloat16)
    settings = replace(TEXTS, accept=["token", "coupled"], runtime="batch-invariant")
    report = verified(model, prompts, settings, DRAFTS[1:])
    assert report.exact
    assert "every draft's logits plain decoding's to the bit" in report.sentence
    assert not [each for each in report.divergences if each.check in (Check.PLAIN, Check.COUPLED)]
    monkeypatch.setattr(BatchInvariant, "viewed", Eager.viewed)
    report = verified(model, prompts, settings, DRAFTS[1:])
    assert report.exactness is Exactness.NOT_EXACT
    assert failed(report, "exit:4: logits are off plain decoding's by")


@pytest.mark.tools
def test_texts_of_a_prompt_by_several_rules_are_no_further_texts() -> None:
    exact, relaxed = (
        Stats(row_rounds=rounds, new_tokens=16, judged_per_depth=[rounds], accepted_per_depth=[16 - rounds])
        for rounds in (10, 8)
    )
    report = DraftReport("int8", texts={0: [exact, relaxed], 1: [relaxed, exact]})
    figures = report.figures(Bound((2, 4)))
    assert [figures[name] for name in ("n", "new_tokens", "rounds")] == [2, 32, 18]
    assert (figures["judged_by_position"], figures["equal"], report.stats.new_tokens) == ([18], 1.0, 64)


def test_equal_settings_give_equal_reports(llama: PreTrainedModel) -> None:
    drafts = [selfspec.drafts.EarlyExit(2)]
    short = replace(TEXTS, max_new_tokens=8)
    one, two = (verified(llama, [tiny.prompt(5)], short, drafts) for _ in range(2))
    assert one.to_dict() == two.to_dict()
    other = verified(llama, [tiny.prompt(5)], replace(short, seed=1), drafts)
    assert [fit.statistic for fit in other.fits] != [fit.statistic for fit in one.fits]


def test_as_many_steps_are_told_as_were_announced(llama: PreTrainedModel) -> None:
    told: list[int | str] = []
    watch: Any = SimpleNamespace(begin=told.append, step=told.append)
    short = replace(TEXTS, max_new_tokens=4)
    verify(llama, [tiny.prompt(5), tiny.prompt(3)], [selfspec.drafts.EarlyExit(2)], short, watch=watch)
    announced, *steps = told
    assert announced == len(steps)


def test_generation_defaults_of_the_model_play_no_part(llama: PreTrainedModel) -> None:
    llama.generation_config = GenerationConfig(repetition_penalty=1.5, top_k=3, min_p=0.2, do_sample=True, num_beams=3)
    report = verified(llama, [tiny.prompt(5)], TEXTS, [selfspec.drafts.EarlyExit(2)])
    assert report.exactness is Exactness.EXACT


@pytest.mark.tools
def test_texts_that_end_early(stories: PreTrainedModel, prompts: list[Tensor]) -> None:
    copied = copy.copy(stories)
    # A full stop ends the text.
    copied.generation_config = GenerationConfig(eos_token_id=426, pad_token_id=0)
    report = verified(copied, prompts, TEXTS, DRAFTS[:1])
    assert report.drafts[0].compared(Check.FREE_RUNNING, "token").tokens < 2 * TEXTS.max_new_tokens
    assert report.exactness is Exactness.EXACT


def failed(report: VerifyReport, part: str) -> bool:
    return any(part in failure for failure in report.failures)


def recovered_from_p(self: object, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
    return p[torch.arange(p.shape[0]), place]


RECOVERY, CHOICE, JOINED = TokenLevel.recovery_probs, Noise.choose, ExactStates.concatenated


def too_sure(self: TokenLevel, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
    weights = RECOVERY(self, draft, p, place)
    return torch.where((place == draft.length)[:, None], weights**2, weights)


def from_the_place_before(self: TokenLevel, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
    wrong = p[torch.arange(p.shape[0]), (place - 1).clamp(min=0)]
    whole = (place == draft.length) & (place > 0)
    return torch.where(whole[:, None], wrong, RECOVERY(self, draft, p, place))


def shifted(parts: Sequence[ExactStates]) -> ExactStates:
    return ExactStates(JOINED(parts).hidden.roll(1, 1), JOINED(parts).attention)


def by_block(self: Noise, weights: Tensor, positions: Tensor) -> Tensor:
    return CHOICE(self, weights, positions - positions[:, :1])


def favouring(self: Noise, weights: Tensor, positions: Tensor) -> Tensor:
    return CHOICE(self, weights**2, positions)


NOT_FORCED = {Check.FREE_RUNNING, Check.PLAIN, Check.COUPLED}


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "settings", "draft", "failures", "sound", "parted"),
    [
        # Greedy decoding cannot see a residual from p, and the other rule has one of its own.
        (
            *(TokenLevel, "recovery_probs", recovered_from_p, replace(FITS, accept=["token", "block"]), DRAFTS[1]),
            ["exit:4: tokens sampled under token do not fit the model's distribution"],
            "under block",
            set(),
        ),
        (
            *(TokenLevel, "recovery_probs", too_sure, replace(FITS, accept=["token"]), DRAFTS[0]),
            ["skip:attn=1: tokens sampled under token do not fit"],
            "none:",
            set(),
        ),
        # The passes are right; what is made of them is not.
        pytest.param(
            *(TokenLevel, "recovery_probs", from_the_place_before, TEXTS, DRAFTS[0]),
            *(["skip:attn=1: free-running token"], "teacher-forced", NOT_FORCED),
            marks=pytest.mark.tools,
        ),
        # Without a draft nothing is resumed.
        pytest.param(
            *(ExactStates, "concatenated", staticmethod(shifted), TEXTS, DRAFTS[1]),
            *(["exit:4: teacher-forced token", "exit:4: logits are off by"], "none:", set(Check)),
            marks=pytest.mark.tools,
        ),
        pytest.param(
            *(Noise, "choose", by_block, replace(TEXTS, accept=["coupled"]), DRAFTS[1]),
            *(["exit:4: coupled token"], "teacher-forced", {Check.COUPLED}),
            marks=pytest.mark.tools,
        ),
        # Drafting and plain decoding agree; both are wrong.
        pytest.param(
            *(Noise, "choose", favouring, replace(FITS, accept=["coupled"]), DRAFTS[1]),
            *(["none: tokens sampled under coupled do not fit"], "exit:4:", set()),
            marks=pytest.mark.tools,
        ),
    ],
)
def test_a_planted_error_shows(
    stories: PreTrainedModel,
    prompts: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    wrong: Any,
    settings: Settings,
    draft: Drafter,
    failures: list[str],
    sound: str,
    parted: set[Check],
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    report = verified(stories, prompts, settings, [draft])
    assert report.exactness is Exactness.NOT_EXACT
    assert all(failed(report, part) for part in failures)
    assert not failed(report, sound)
    assert {divergence.check for divergence in report.divergences} <= parted


@pytest.mark.tools
def test_a_relaxed_rule_is_not_exact(stories: PreTrainedModel, prompts: list[Tensor]) -> None:
    report = verified(stories, prompts, replace(FITS, accept=["token", "relaxed-top-k"]), DRAFTS[1:])
    assert report.exactness is Exactness.NOT_EXACT
    assert not report.settings.lossless
    assert report.to_dict()["lossless"] is False
    assert report.failures[-1] == "relaxed-top-k is not lossless, whatever was measured"
    greedy = {each.rule: each.equal_texts for each in report.drafts[-1].of(Check.FREE_RUNNING)}
    assert greedy["token"] == 2
    assert greedy["relaxed-top-k"] < 2
    assert not failed(report, "under token")


PAIR = [tiny.prompt(5), tiny.prompt(9, seed=1)]


def nudged_twin(monkeypatch: pytest.MonkeyPatch, nudge: float) -> PreTrainedModel:
    """A model with two equal tokens, and selfspec's passes made to prefer the second of them by `nudge`."""
    model = tiny.llama(dtype=torch.float32)
    common = model.generate(PAIR[0], max_new_tokens=16, do_sample=False)[0, 5:].mode().values.item()
    twin = common + 1
    with torch.no_grad():
        model.get_output_embeddings().weight[twin] = model.get_output_embeddings().weight[common]
    right = ModelRunner.run

    def nudged(passes: ModelRunner, *arguments: Any, **named: Any) -> PassResult:
        done = right(passes, *arguments, **named)
        if done.logits is not NO_LOGITS:
            done.logits[..., twin] += nudge
        return done

    monkeypatch.setattr(ModelRunner, "run", nudged)
    return model


@pytest.mark.tools
@pytest.mark.parametrize(
    ("nudge", "exactness", "said"),
    [(3e-6, Exactness.WITHIN_ROUNDING, ""), (1e-2, Exactness.NOT_EXACT, "exit:2: logits are off by 0.01")],
)
def test_near_ties_are_excused_and_logits_beyond_rounding_are_not(
    monkeypatch: pytest.MonkeyPatch, nudge: float, exactness: Exactness, said: str
) -> None:
    report = verified(nudged_twin(monkeypatch, nudge), PAIR, TEXTS, [selfspec.drafts.EarlyExit(2)])
    assert report.exactness is exactness
    assert report.divergences
    for divergence in report.divergences:
        assert divergence.is_near_tie(report.bound)
        assert divergence.gap is not None
        assert divergence.gap <= 3e-6
    assert failed(report, said) == bool(said)


EXIT, PROMPT = selfspec.drafts.EarlyExit(2), tiny.prompt(5)


@pytest.mark.parametrize(
    ("prompt", "drafts", "new_tokens", "error", "said"),
    [
        ([PROMPT], [selfspec.drafts.EarlyExit(4)], 64, DraftConfigError, r"choose 1\.\.3"),
        ([PROMPT], [EXIT, EXIT], 64, DraftConfigError, "exit:2 is named more than once"),
        ([PROMPT], [], 64, DraftConfigError, "at least one draft"),
        ([], [EXIT], 64, PromptError, "no prompt"),
        ([tiny.prompt(5, batch=2)], [EXIT], 64, PromptError, r"shape \[1, prompt\]"),
        ([PROMPT], [EXIT], 124, PromptError, "context of 128"),
        ([PROMPT + tiny.VOCABULARY], [EXIT], 64, PromptError, "outside the vocabulary"),
    ],
)
def test_bad_input_is_refused_before_any_pass(
    llama: PreTrainedModel, prompt: list[Tensor], drafts: list[Drafter], new_tokens: int, error: Any, said: str
) -> None:
    llama.register_forward_hook(lambda *_: pytest.fail("a pass was made"))
    with pytest.raises(error, match=said):
        verify(llama, prompt, drafts, Settings(max_new_tokens=new_tokens))


def test_logits_that_are_not_finite_are_an_error(llama: PreTrainedModel) -> None:
    with torch.no_grad():
        llama.get_output_embeddings().weight[3] = torch.nan
    with pytest.raises(NonFiniteLogitsError):
        verify(llama, [tiny.prompt(5)], [selfspec.drafts.EarlyExit(2)], QUICK)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 12, 80])
def test_every_depth_has_drafts_that_fit_and_differ(depth: int) -> None:
    drafts = default_drafts(depth)
    assert len(drafts) == {1: 2, 2: 3, 3: 5}.get(depth, 5)
    paths = set()
    for draft in drafts:
        assert isinstance(draft, LayerPathDrafter)
        paths.add(draft.path(depth))
    assert len(paths) == len(drafts)


NEW = 11
DRAFT = 3


def forced(model: PreTrainedModel, drafter: Drafter | None, prompt: Tensor, tokens: list[int]) -> Tensor:
    spec = selfspec.wrap(model, drafter, draft_length=DRAFT, adapter=ADAPTERS[model.config.model_type])
    return forced_logits(spec, prompt, tokens)


@pytest.mark.parametrize("past", [1, 9])
def test_every_pass_gives_the_logits_of_the_text(architecture: str, past: int) -> None:
    model = tiny.BUILDERS[architecture]()
    # Any text will do, the model's own or not.
    prompt, tokens = tiny.prompt(past), tiny.prompt(NEW, seed=1)[0].tolist()
    wanted = stepwise_logits(model, prompt, tokens)
    with torch.no_grad():
        whole = model(torch.cat([prompt, torch.tensor([tokens])], 1)).logits[0, past - 1 : -1]
    torch.testing.assert_close(wanted, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(blockwise_logits(model, prompt, tokens, 4), wanted, atol=1e-6, rtol=0)
    for drafter in (None, *default_drafts(tiny.DEPTH), selfspec.drafts.LayerSkip(attention=[0])):
        torch.testing.assert_close(forced(model, drafter, prompt, tokens), wanted.float(), atol=1e-6, rtol=0)


def test_drafts_are_as_long_as_in_the_loop(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = []
    propose = LayerPathProposer.propose

    def watched(self: LayerPathProposer, batch: RowsView, budget: Budget) -> Draft:
        drafted.append(budget.depth)
        return propose(self, batch, budget)

    monkeypatch.setattr(LayerPathProposer, "propose", watched)
    forced(llama, selfspec.drafts.EarlyExit(2), tiny.prompt(5), tiny.prompt(NEW, seed=1)[0].tolist())
    # Rounds of 4 and 4 tokens, and one of 3.
    assert drafted == [3, 3, 2]


def test_a_drafter_that_says_its_own_is_judged_by_the_text(llama: PreTrainedModel) -> None:
    class Stubborn(Stateless):
        def propose(self, batch: RowsView, budget: Budget) -> Draft:
            return Draft.chain(torch.full((1, budget.depth), 7))

    prompt, tokens = tiny.prompt(5), [7, 7, 1, 7, 7, 7, 7, 7, 7, 2]
    wanted = stepwise_logits(llama, prompt, tokens)
    torch.testing.assert_close(forced(llama, Stubborn(), prompt, tokens), wanted.float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "smallest", "largest"),
    [(torch.float64, 0.0, 1e-6), (torch.float32, 1e-7, 1e-4), (torch.bfloat16, 1e-3, 1.0)],
)
def test_the_bound_is_of_the_size_of_rounding(dtype: torch.dtype, smallest: float, largest: float) -> None:
    model = tiny.llama(dtype=dtype)
    bound = Bound((2, 4))
    reference = read_reference(model, tiny.prompt(6), 24)
    bound.measure(model, reference)
    said = bound.to_dict()
    assert reference.tokens == reference.logits.argmax(-1).tolist()
    assert smallest <= bound.largest <= largest
    assert said["logits_quantile_99"] <= bound.largest
    assert bound.gap_largest <= 2 * bound.largest
    assert said["positions"] == 2 * len(bound.gaps) == 48
    assert bound.near_tie == 2 * max(bound.gap_largest, bound.rounding)
    assert bound.rounding > 0


def test_differences_of_what_is_not_finite() -> None:
    inf, nan = torch.inf, torch.nan
    own = torch.tensor([[1.0, -inf], [1.0, -inf], [nan, 0.0]])
    other = torch.tensor([[1.5, -inf], [1.0, 2.0], [nan, 0.0]])
    most = torch.finfo(torch.float32).max
    assert largest_difference(own, other).tolist() == [0.5, most, most]


BLOCK = 5
DRAFTS_COMPARISON = (EarlyExit(1), EarlyExit(3), LayerSkip(attention=[1]), LayerSkip(mlp=[2]), LayerSkip(layers=[0, 2]))
MODELS = {"llama": tiny.llama, "mistral": tiny.mistral, "gpt2": tiny.gpt2, "qwen3": tiny.qwen3}


@torch.no_grad()
def draft_logits(model: PreTrainedModel, draft: LayerPathDrafter, ids: Tensor) -> Tensor:
    """Logits of draft steps over the last `BLOCK` tokens of texts, whose beginning the full model has read."""
    adapter = find_adapter(model)
    cache = adapter.shared_cache(model, ids.shape[0], ids.shape[1] + 1, slack=BLOCK, device=ids.device)
    passes = ModelRunner(model, adapter, cache)
    past = ids.shape[1] - BLOCK
    passes.run(PassRequest(LayerPath.full(tiny.DEPTH), ids[:, :past], headless=True))
    cache.commit([past] * ids.shape[0])
    path = draft.path(tiny.DEPTH)
    steps = [PassRequest(path, token, first=number - 1) for number, token in enumerate(ids[:, past:].split(1, 1))]
    return torch.cat([passes.run(step).logits for step in steps], 1)


@torch.no_grad()
def pruned_logits(model: PreTrainedModel, pruned: PreTrainedModel, ids: Tensor) -> Tensor:
    """The same by `transformers` alone: the full model reads the beginning, a pruned copy continues."""
    cache, past = DynamicCache(config=model.config), ids.shape[1] - BLOCK
    model(ids[:, :past], **over_cache(model, cache))
    logits: Tensor = pruned(ids[:, past:], **over_cache(pruned, cache)).logits
    return logits


@pytest.mark.parametrize("draft", DRAFTS_COMPARISON, ids=str)
@pytest.mark.parametrize("architecture", MODELS)
def test_a_right_adapter_drafts_as_the_pruned_model(architecture: str, draft: LayerPathDrafter) -> None:
    model, ids = MODELS[architecture](), tiny.prompt(14, batch=2)
    drafted = draft_logits(model, draft, ids)
    assert drafted.shape == (2, BLOCK, tiny.VOCABULARY)
    pruned = zeroed(model, draft.path(tiny.DEPTH).skipped)
    torch.testing.assert_close(drafted, pruned_logits(model, pruned, ids))
    # As it reads a text by itself.
    alone = draft_step_logits(model, find_adapter(model), draft, ids[:1])
    torch.testing.assert_close(alone, pruned(ids[:1]).logits)


SAMPLES = 400
TEXTS_COMPARISON = [tuple(tiny.prompt(12, seed=seed)[0].tolist()) for seed in range(3)]


def probabilities(model: PreTrainedModel, place: Place, outcomes: list[Outcome]) -> list[float]:
    """The model's probability of outcomes of one length, by one pass over the whole texts."""
    texts = torch.tensor([[*place.prefix, *outcome] for outcome in outcomes])
    with torch.no_grad():
        logits = model(texts).logits[:, len(place.prefix) - 1 : -1]
    chosen = (logits.float() / place.temperature).softmax(-1).gather(-1, texts[:, len(place.prefix) :, None])
    found: list[float] = chosen[..., 0].prod(-1).tolist()
    return found


@pytest.mark.parametrize("eos", [None, 3])
def test_cells_are_the_likely_outcomes_with_the_models_probabilities(llama: PreTrainedModel, eos: int | None) -> None:
    llama.generation_config = GenerationConfig(eos_token_id=eos)
    with torch.no_grad():
        # One token ends many of the texts.
        llama.get_output_embeddings().weight[3] = llama.get_output_embeddings().weight[:10].mean(0)
    places = choose_places(llama, TEXTS_COMPARISON, SAMPLES)
    assert [place.temperature for place in places] == [1.0, 0.8]
    for place in places:
        assert any(place.prefix == text[at : at + 6] for text in TEXTS_COMPARISON for at in range(7))
        assert math.isclose(sum(place.cells.values()) + place.rest, 1.0)
        for outcome, probability in place.cells.items():
            assert math.isclose(probability, probabilities(llama, place, [outcome])[0], rel_tol=1e-4)
            assert len(outcome) == NEW_TOKENS or outcome[-1] == eos
            assert eos not in outcome[:-1]
            assert probability * SAMPLES >= 5
        assert place.rest * SAMPLES >= 5


def test_no_likely_outcome_is_left_out() -> None:
    model = tiny.llama(vocab_size=6)
    texts = [tuple(tiny.prompt(12, vocabulary=6)[0].tolist())]
    place = choose_places(model, texts, SAMPLES)[0]
    outcomes = list(itertools.product(range(6), repeat=NEW_TOKENS))
    joint = dict(zip(outcomes, probabilities(model, place, outcomes), strict=True))
    likely = {outcome for outcome, probability in joint.items() if probability * SAMPLES >= 5}
    # The smallest may have been pooled with what is too small by itself.
    assert len(likely - place.cells.keys()) <= 1
    assert place.cells.keys() <= likely


# States of the size that this type has by default would take gigabytes over all branches.
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
RECURRENT: dict[str, dict[str, Any]] = {"jamba": {}, "lfm2": {}, "mamba": {}, "mamba2": {}, "qwen3_next": DELTA}


@pytest.mark.parametrize("model_type", RECURRENT)
def test_branches_of_models_with_states(model_type: str) -> None:
    model = shrunken(model_type, **RECURRENT[model_type])
    rare = torch.full((50,), -40.0)
    rare[3:7] = 0.0
    # Few outcomes, so that many branches are followed, and some prefixes have none.
    handle = model.get_output_embeddings().register_forward_hook(lambda _, __, logits: logits * 0.3 + rare.to(logits))
    try:
        for place in choose_places(model, TEXTS_COMPARISON, SAMPLES):
            assert len(place.cells) > NEW_TOKENS
            for outcome, probability in place.cells.items():
                assert math.isclose(probability, probabilities(model, place, [outcome])[0], rel_tol=1e-3)
    finally:
        handle.remove()


def test_every_token_of_an_outcome_varies() -> None:
    texts = [tuple(tiny.prompt(20, seed=seed, vocabulary=6)[0].tolist()) for seed in range(3)]
    one, two = choose_places(tiny.llama(vocab_size=6), texts, SAMPLES)
    assert one.prefix != two.prefix
    for place in (one, two):
        assert place.rest < 0.5
        for position in range(NEW_TOKENS):
            assert len({outcome[position] for outcome in place.cells}) > 1
    # A text may be shorter than the prefix.
    assert choose_places(tiny.llama(vocab_size=6), [(5, 4)], SAMPLES)[0].prefix == (5, 4)

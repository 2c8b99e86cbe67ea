"""What selfspec's passes say of a text, against stock passes and pruned models; places to sample at, by enumeration."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.reference import zeroed
from helpers.shrunken import shrunken
from selfspec.adapters import ADAPTERS
from selfspec.draft import Budget, Draft, Drafter, EarlyExit, LayerSkip, RowsView, Stateless
from selfspec.draft.along_layer_path import LayerPathDrafter, LayerPathProposer
from selfspec.errors import DraftConfigError, PromptError
from selfspec.measure.rounding import Bound, largest_difference, tie_gap
from selfspec.measure.stock import blockwise_logits, read_reference, stepwise_logits
from selfspec.model.registry import find_adapter
from selfspec.tools.verify.comparison import forced_logits
from selfspec.tools.verify.fit import NEW_TOKENS, Outcome, Place, choose_places
from selfspec.tools.verify.pruned import draft_logits, pruned_logits
from selfspec.tools.verify.verification import default_drafts

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


def test_a_gap_has_no_sign() -> None:
    logits = torch.tensor([1.0, 3.5])
    assert tie_gap(logits, 0, 1) == tie_gap(logits, 1, 0) == 2.5


BLOCK = 5
DRAFTS = (EarlyExit(1), EarlyExit(3), LayerSkip(attention=[1]), LayerSkip(mlp=[2]), LayerSkip(layers=[0, 2]))
MODELS = {"llama": tiny.llama, "mistral": tiny.mistral, "gpt2": tiny.gpt2, "qwen3": tiny.qwen3}


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@pytest.mark.parametrize("architecture", MODELS)
def test_a_right_adapter_drafts_as_the_pruned_model(architecture: str, draft: LayerPathDrafter) -> None:
    model, ids = MODELS[architecture](), tiny.prompt(14, batch=2)
    drafted = draft_logits(model, draft, ids, BLOCK)
    assert drafted.shape == (2, BLOCK, tiny.VOCABULARY)
    torch.testing.assert_close(drafted, pruned_logits(model, zeroed(model, draft.path(tiny.DEPTH).skipped), ids, BLOCK))


@pytest.mark.parametrize(("part", "draft"), [("without_mlp", DRAFTS[3]), ("without_attention", DRAFTS[2])], ids=str)
def test_a_wrong_adapter_is_told(part: str, draft: LayerPathDrafter) -> None:
    model = tiny.llama()
    ids = tiny.prompt(14)
    pruned = pruned_logits(model, zeroed(model, draft.path(tiny.DEPTH).skipped), ids, BLOCK)
    adapter = find_adapter(model)
    right = draft_logits(model, draft, ids, BLOCK, adapter=adapter)
    torch.testing.assert_close(right, pruned)
    wrong = draft_logits(model, draft, ids, BLOCK, adapter=replace(adapter, **{part: "input"}))  # type: ignore[arg-type]
    assert (wrong - pruned).abs().max() > 1e-3


@pytest.mark.parametrize("block", [0, 14, 15, -1])
def test_blocks_and_drafts_that_do_not_fit_are_refused(block: int) -> None:
    model = tiny.llama()
    with pytest.raises(PromptError, match="does not fit"):
        draft_logits(model, EarlyExit(1), tiny.prompt(14), block)
    with pytest.raises(PromptError, match="does not fit"):
        pruned_logits(model, model, tiny.prompt(14), block)
    with pytest.raises(DraftConfigError, match="out of range"):
        draft_logits(model, EarlyExit(9), tiny.prompt(14), BLOCK)


SAMPLES = 400
TEXTS = [tuple(tiny.prompt(12, seed=seed)[0].tolist()) for seed in range(3)]


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
    places = choose_places(llama, TEXTS, SAMPLES)
    assert [place.temperature for place in places] == [1.0, 0.8]
    for place in places:
        assert any(place.prefix == text[at : at + 6] for text in TEXTS for at in range(7))
        assert math.isclose(sum(place.cells.values()) + place.rest, 1.0)
        assert place.discrepancy < 1e-9
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


# States of the sizes that these types have by default would take gigabytes over all branches.
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": {},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 8},
    "falcon_mamba": {},
    "granitemoehybrid": {},
    "jamba": {},
    "lfm2": {},
    "mamba": {},
    "mamba2": {},
    "olmo_hybrid": {},
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
}


@pytest.mark.parametrize("model_type", RECURRENT)
def test_branches_of_models_with_states(model_type: str) -> None:
    model = shrunken(model_type, **RECURRENT[model_type])
    rare = torch.full((50,), -40.0)
    rare[3:7] = 0.0
    # Few outcomes, so that many branches are followed, and some prefixes have none.
    handle = model.get_output_embeddings().register_forward_hook(lambda _, __, logits: logits * 0.3 + rare.to(logits))
    try:
        for place in choose_places(model, TEXTS, SAMPLES):
            assert len(place.cells) > NEW_TOKENS
            assert place.discrepancy < 1e-6
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


def test_a_text_shorter_than_the_prefix(llama: PreTrainedModel) -> None:
    assert choose_places(llama, [(5, 6)], SAMPLES)[0].prefix == (5, 6)

"""What selfspec's passes say of a text, against the stock model's one-token passes and pruned copies of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.reference import zeroed
from selfspec.adapters import ADAPTERS
from selfspec.draft import Budget, Draft, Drafter, EarlyExit, LayerSkip, RowsView, Stateless
from selfspec.draft.along_layer_path import LayerPathDrafter, LayerPathProposer
from selfspec.errors import DraftConfigError, PromptError
from selfspec.measure.rounding import Bound, largest_difference, tie_gap
from selfspec.measure.stock import blockwise_logits, read_reference, stepwise_logits
from selfspec.model.gated_view import ExactStates
from selfspec.model.registry import find_adapter
from selfspec.tools.verify.comparison import forced_logits
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


def test_shifted_states_show(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ExactStates.concatenated
    monkeypatch.setattr(
        ExactStates, "concatenated", lambda parts: ExactStates(right(parts).hidden.roll(1, 1), right(parts).attention)
    )
    prompt, tokens = tiny.prompt(5), tiny.prompt(NEW, seed=1)[0].tolist()
    off = largest_difference(
        forced(llama, selfspec.drafts.EarlyExit(2), prompt, tokens), stepwise_logits(llama, prompt, tokens).float()
    )
    assert off.max() > 1


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


def _both(model: PreTrainedModel, draft: LayerPathDrafter, of: LayerPathDrafter) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tiny.prompt(14, batch=2)
    left_out = of.path(model.config.num_hidden_layers).skipped
    return draft_logits(model, draft, ids, BLOCK), pruned_logits(model, zeroed(model, left_out), ids, BLOCK)


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@pytest.mark.parametrize("architecture", MODELS)
def test_a_right_adapter_drafts_as_the_pruned_model(architecture: str, draft: LayerPathDrafter) -> None:
    drafted, pruned = _both(MODELS[architecture](), draft, draft)
    assert drafted.shape == (2, BLOCK, tiny.VOCABULARY)
    torch.testing.assert_close(drafted, pruned)


def test_another_draft_is_told_apart() -> None:
    drafted, pruned = _both(tiny.llama(), LayerSkip(mlp=[2]), LayerSkip(mlp=[1]))
    assert (drafted - pruned).abs().max() > 1e-3


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
def test_blocks_that_do_not_fit_are_refused(block: int) -> None:
    model = tiny.llama()
    with pytest.raises(PromptError, match="does not fit"):
        draft_logits(model, EarlyExit(1), tiny.prompt(14), block)
    with pytest.raises(PromptError, match="does not fit"):
        pruned_logits(model, model, tiny.prompt(14), block)


def test_drafts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DraftConfigError, match="out of range"):
        draft_logits(tiny.llama(), EarlyExit(9), tiny.prompt(14), BLOCK)

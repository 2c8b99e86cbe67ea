"""Processors and criteria with memory see what plain decoding shows them, and the output is plain decoding's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import Altered, Propose
from selfspec.draft import Budget


class Alternating(LogitsProcessor):
    """Favours another token with each call: a wrong number of calls gives another distribution."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + favoured(self.calls, scores.shape[-1])


def favoured(call: int, vocab: int) -> Tensor:
    scores = torch.zeros(vocab)
    scores[call % vocab] = 2.5
    scores[(call + 2) % vocab] = -torch.inf
    return scores


class Dead(Alternating):
    """Leaves no token to choose where a draft goes on, and one in plain decoding; it can go back."""

    undone = 0

    def rollback(self, calls: int) -> None:
        self.undone += calls
        self.calls -= calls

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        assert (input_ids[:, 5:] % 2 == 0).all(), "a token that was never allowed"
        odd = torch.arange(scores.shape[-1]) % 2 == 1
        scores = scores.masked_fill(odd, -torch.inf)
        # Only the target's logits are of this model's scale.
        return scores.masked_fill(scores.amax(-1, keepdim=True) > 50, -torch.inf)


def test_a_draft_that_runs_into_a_dead_end_shows_the_processor_no_further_token(llama: PreTrainedModel) -> None:
    def loud(propose: Propose, batch: Any, budget: Budget) -> selfspec.drafts.Draft:
        """Draft with scores that the processor refuses."""
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


def test_a_prefix_function_says_itself_that_it_has_no_memory(llama: PreTrainedModel) -> None:
    calls: list[int] = []

    def allowed(row: int, ids: Tensor) -> list[int]:
        calls.append(len(ids))
        return [len(calls) % 50, 7]

    wanted = llama.generate(tiny.prompt(5), max_new_tokens=12, do_sample=False, prefix_allowed_tokens_fn=allowed)
    calls.clear()
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(3), draft_length=4)
    out = spec.generate(tiny.prompt(5), max_new_tokens=12, do_sample=False, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(out.sequences, wanted)
    assert calls == list(range(5, 17))
    calls.clear()
    allowed.stateless = True  # type: ignore[attr-defined]
    spec.generate(tiny.prompt(5), max_new_tokens=12, do_sample=False, prefix_allowed_tokens_fn=allowed)
    assert len(calls) > 12


def test_a_draft_token_that_spoils_the_block_is_not_shown_to_processors() -> None:
    # NaN in the values of a rejected token reaches the places before it: masked, but 0 * NaN is NaN.
    llama = tiny.llama(attention="eager")
    options: dict[str, Any] = {"max_new_tokens": 18, "do_sample": False}
    text = llama.generate(tiny.prompt(5, 2), logits_processor=[Alternating()], **options)
    poison = next(token for token in range(50) if token not in set(text.flatten().tolist()))
    with torch.no_grad():
        llama.model.embed_tokens.weight[poison] = torch.nan

    def poisoning(propose: Propose, batch: Any, budget: Budget) -> selfspec.drafts.Draft:
        made = propose(batch, budget)
        made.tokens[0, -1] = poison
        return made

    processor = Alternating()
    # A path that skips the first layer leaves nothing to resume: the target reads the whole block at once.
    spec = selfspec.wrap(llama, Altered(selfspec.drafts.LayerSkip(layers=[0]), poisoning), draft_length=3)
    out = spec.generate(tiny.prompt(5, 2), logits_processor=[processor], **options)
    assert torch.equal(out.sequences, text)
    assert processor.calls == 18

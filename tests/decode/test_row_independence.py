"""A row's sampled tokens do not depend on the rows beside it: which they are, how they fare, and when they end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import Remembering
from helpers.tiny import in_turns
from selfspec.cache.tree import Tree
from selfspec.decode.judge import ended, within
from selfspec.decode.noise import Noise
from selfspec.draft import Draft, Drafter

ROWS, WIDTH, NEW = 5, 9, 20
PADDING = (0, 3, 0, 4, 1)
# Many tokens that end a row, so that rows end at different times and are dropped from the batch.
ENDS = [3, 17, 29]
DRAFTS: dict[str, Drafter | str | None] = {
    "plain": None,
    "exit": "exit:2",
    "skip": "skip:attn=1;mlp=3",
    "8 bits": "int8",
    "look-up": selfspec.drafts.PromptLookup(shortest=1),
    "suffixes": "suffix",
    "recycling": "recycle",
    "union": "union:suffix+recycle+exit:2",
    "union without a model": "union:suffix+recycle",
    "cascade": selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(shortest=1), selfspec.drafts.EarlyExit(2)),
    "cascade of three": "lookup+recycle+exit:2",
}


def prompts(seed: int = 0) -> dict[str, Tensor]:
    """Rows of different lengths over few tokens, so that some have a match for a look-up and others none."""
    ids = tiny.prompt(WIDTH, ROWS, seed=seed, vocabulary=12)
    mask = torch.stack([torch.arange(WIDTH) >= padding for padding in PADDING]).long()
    return {"input_ids": ids.where(mask > 0, 0), "attention_mask": mask}


def chosen(batch: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in batch.items()}


def texts(spec: selfspec.SelfSpeculative, batch: dict[str, Any], width: int = WIDTH, **options: Any) -> list[list[int]]:
    options = {
        "max_new_tokens": NEW,
        "do_sample": True,
        "temperature": 0.9,
        "eos_token_id": ENDS,
        "pad_token_id": 0,
        "return_dict_in_generate": False,
        **options,
    }
    stream = spec.stream(**batch, **options)
    for _ in stream:
        pass
    out = stream.output()
    return [row[:length] for row, length in zip(out.sequences[:, width:].tolist(), out.lengths, strict=True)]


@pytest.mark.parametrize("draft", ["suffixes", "recycling", "union", "cascade of three"])
def test_a_row_is_the_same_beside_others_after_the_same_calls(llama: PreTrainedModel, draft: str) -> None:
    found = []
    for rows in ([0], [0, 1, 2]):
        spec = selfspec.wrap(llama, DRAFTS[draft], draft_length=3, accept="token")
        texts(spec, prompts(seed=2), seed=2)
        found.append(texts(spec, chosen(prompts(), rows), seed=0)[0])
    assert found[0] == found[1]


@pytest.mark.parametrize("draft", ["suffixes", "recycling", "union without a model"])
def test_rows_apart_teach_later_calls(llama: PreTrainedModel, draft: str) -> None:
    spec = selfspec.wrap(llama, DRAFTS[draft], draft_length=3, accept="token")
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.1, "max_new_tokens": 24, "pad_token_id": 0}
    options = {**options, **prompts()}
    first, again = (spec.generate(**options, seed=4).stats for _ in range(2))
    assert again.mean_accepted_length > first.mean_accepted_length


# Rows that have ended are run no more.

LENGTHS = (4, 13, 1, 24, 10)
KINDS = ("plain", "exit", "skip", "8 bits")
# Rows that have ended are padded where there is an end token; this one never comes.
GREEDY: dict[str, Any] = {
    "max_new_tokens": 24,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": 49,
    "suppress_tokens": [49],
}
OPTIONS: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.05}, {"no_repeat_ngram_size": 6}]


def batches(model: PreTrainedModel) -> list[int]:
    """Notes how many rows each pass over the embeddings reads."""
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[0]))
    return seen


def own_length(ids: Tensor, scores: Any) -> Tensor:
    """Ends each row at a length of its own."""
    return torch.tensor([ids.shape[1] >= WIDTH + length for length in LENGTHS])


@pytest.mark.parametrize(("architecture", "options", "draft"), in_turns(sorted(tiny.BUILDERS), OPTIONS, KINDS))
def test_greedy_rows_are_what_they_are_alone(architecture: str, draft: str, options: dict[str, Any]) -> None:
    model = tiny.BUILDERS[architecture]()
    options = {**prompts(), **GREEDY, **options}
    wanted = model.generate(**options)
    seen = batches(model)
    spec = selfspec.wrap(model, DRAFTS[draft], draft_length=3)
    stream, run = spec.stream(**options, stopping_criteria=[own_length]), set()
    for chunk in stream:
        # Never as many ended rows as live ones.
        live = sum(bool(row.tokens) for row in chunk.rows)
        assert seen[-1] < 2 * live
        run.add(seen[-1])
    out = stream.output()
    assert out.lengths == LENGTHS
    for row, length in enumerate(LENGTHS):
        assert torch.equal(out.sequences[row, : WIDTH + length], wanted[row, : WIDTH + length])
    assert {1, ROWS} <= run


def in_order() -> LogitsProcessorList:
    return LogitsProcessorList([Remembering()])


@pytest.mark.parametrize("draft", ["plain", "exit", "skip", "look-up", "cascade"])
@pytest.mark.parametrize(("rule", "memory"), [("token", True), ("block", False), ("coupled", True)])
def test_dropping_rows_that_have_ended_changes_nothing(
    llama: PreTrainedModel, draft: str, rule: str, memory: bool
) -> None:
    spec = selfspec.wrap(llama, DRAFTS[draft], draft_length=3, accept=rule)
    processors = in_order() if memory else LogitsProcessorList()
    seen = batches(llama)
    dropped = texts(spec, prompts(), seed=2, logits_processor=processors)
    assert min(seen) < ROWS
    seen.clear()
    # A cache that is returned keeps all its rows.
    assert texts(spec, prompts(), seed=2, logits_processor=processors, return_dict_in_generate=True) == dropped
    assert set(seen) == {ROWS}


@pytest.mark.parametrize("draft", ["plain", "exit", "skip", "look-up", "cascade", "union"])
@pytest.mark.parametrize(("rule", "memory"), [("token", False), ("block", True)])
def test_greedy_decoding_draws_nothing(
    llama: PreTrainedModel, draft: str, rule: str, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("uniform", "draw", "choose"):
        monkeypatch.setattr(Noise, name, None)
    before = torch.random.get_rng_state()
    spec = selfspec.wrap(llama, DRAFTS[draft], draft_length=3, accept=rule)
    processors = in_order() if memory else LogitsProcessorList()
    texts(spec, prompts(), do_sample=False, temperature=None, seed=0, logits_processor=processors)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_tree_that_was_not_drawn_ends_at_the_depth_of_its_row() -> None:
    tree = Tree((-1, -1, 0, 1))
    draft = Draft(torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]]), tree)
    judged = within(draft, [1, 2])
    assert judged is not None
    assert judged.tolist() == [[True, True, False, False], [True] * 4]
    probs = ended(draft, judged, torch.full((2, 5, 6), 1 / 6)).probs
    assert probs is not None
    assert torch.equal(probs, torch.nn.functional.one_hot(draft.tokens, 6) * judged[..., None].float())

"""Drafting along a path: how often each token passes each sublayer, in prefill and in a round."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.reference import Calls, first_linear, layers_of, sublayer_module, with_layers
from selfspec.draft import Drafter, EarlyExit, LayerSkip
from selfspec.model.layer_path import sublayers

ALL = sublayers(tiny.DEPTH)
PROMPT = 7

DRAFTS = {
    **{f"exit {layer}": EarlyExit(layer) for layer in (1, 2, 3)},
    "attention 0": LayerSkip(attention=[0]),
    "mlp 0": LayerSkip(mlp=[0]),
    "layer 0": LayerSkip(layers=[0]),
    "attention 2 first": LayerSkip(attention=[2], mlp=[2, 3]),
    "mlp 1 first": LayerSkip(attention=[3], mlp=[1]),
    "attention 1, layer 3": LayerSkip(attention=[1], layers=[3]),
    "last layer": LayerSkip(layers=[3]),
    "last attention": LayerSkip(attention=[3]),
    "last mlp": LayerSkip(mlp=[3]),
}


def _watched(model: PreTrainedModel) -> Calls:
    calls = Calls()
    for index, layer in enumerate(layers_of(model)):
        calls.watch(("layer", index), layer)
    for sublayer in ALL:
        calls.watch(sublayer, sublayer_module(model, sublayer))
        calls.watch(("linear", sublayer), first_linear(model, sublayer))
    calls.watch("head", model.get_output_embeddings())
    return calls


def _expected(draft: EarlyExit | LayerSkip, drafted: int) -> dict[object, int]:
    """Tokens through each module in one round, counted by hand from what a round should do."""
    path = draft.path(tiny.DEPTH)
    left_out = [s for s in ALL if not path.runs(s)]
    # Verification goes on at the first sublayer left out; where that is the very first, it starts from the tokens.
    resume = ALL.index(left_out[0])
    tokens: dict[object, int] = {}
    for place, sublayer in enumerate(ALL):
        drafting = drafted if path.runs(sublayer) else 0
        bringing_the_last_up = 1 if place < resume else 0
        verifying = drafted + 1 if place >= resume else 0
        tokens[sublayer] = tokens["linear", sublayer] = drafting + bringing_the_last_up + verifying
    for layer in range(tiny.DEPTH):
        runs = [place for place, s in enumerate(ALL) if s.layer == layer]
        tokens["layer", layer] = (
            (drafted if any(path.runs(ALL[place]) for place in runs) else 0)
            + (1 if min(runs) < resume else 0)
            + (drafted + 1 if max(runs) >= resume else 0)
        )
    tokens["head"] = drafted + (drafted + 1)
    return tokens


@pytest.mark.parametrize("draft_length", [1, 3])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_no_token_passes_an_exact_sublayer_twice(
    architecture: str, draft: EarlyExit | LayerSkip, draft_length: int
) -> None:
    model = tiny.BUILDERS[architecture]()
    calls = _watched(model)
    expected = _expected(draft, draft_length)
    before = {name: 0 if name == "head" else PROMPT - 1 for name in calls.tokens}
    stream = selfspec.wrap(model, draft, draft_length=draft_length).stream(tiny.prompt(PROMPT), max_new_tokens=50)
    for _ in range(3):
        chunk = next(stream)
        assert len(chunk.rows[0].draft) == draft_length
        assert {name: count - before[name] for name, count in calls.tokens.items()} == expected
        before = dict(calls.tokens)


def test_without_a_draft_each_token_is_read_once_and_the_head_gives_one_row_a_pass(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    calls = _watched(model)
    # The prompt's pass gives the first token.
    stream = selfspec.wrap(model).stream(tiny.prompt(PROMPT), max_new_tokens=5)
    for number in range(1, 6):
        next(stream)
        assert calls.tokens.pop("head") == number
        assert set(calls.tokens.values()) == {PROMPT - 1 + number}
        assert {count for name, count in calls.calls.items() if name != "head"} == {number}
        calls.tokens["head"] = number


def test_a_prompt_of_one_token_has_no_prefill(llama: PreTrainedModel) -> None:
    calls = _watched(llama)
    next(selfspec.wrap(llama).stream(tiny.prompt(1), max_new_tokens=5))
    assert set(calls.tokens.values()) == {1}


@pytest.mark.parametrize("draft", [EarlyExit(2), LayerSkip(mlp=[1])], ids=str)
def test_the_last_round_drafts_no_more_than_can_be_committed(llama: PreTrainedModel, draft: Drafter) -> None:
    calls = _watched(llama)
    wanted = 7
    committed = 0
    before = calls.tokens["head"]
    for chunk in selfspec.wrap(llama, draft, draft_length=4).stream(tiny.prompt(PROMPT), max_new_tokens=wanted):
        drafted = len(chunk.rows[0].draft)
        assert drafted == min(4, wanted - committed - 1)
        assert calls.tokens["head"] - before == 2 * drafted + 1
        before = calls.tokens["head"]
        committed += len(chunk.tokens)
    assert committed == wanted


def test_rows_of_different_lengths_share_the_passes(llama: PreTrainedModel) -> None:
    calls = _watched(llama)
    prompts = tiny.prompt(PROMPT, 3)
    mask = prompts.new_ones(prompts.shape)
    mask[0, :4] = mask[2, :6] = 0
    draft = LayerSkip(attention=[2])
    stream = selfspec.wrap(llama, draft, draft_length=3).stream(prompts, mask, max_new_tokens=40)
    before = {name: 0 if name == "head" else PROMPT - 1 for name in calls.tokens}
    for _ in range(3):
        next(stream)
        assert {name: count - before[name] for name, count in calls.tokens.items()} == _expected(draft, 3)
        before = dict(calls.tokens)


def test_a_sampled_draft_is_scored_by_what_it_was_drawn_from(llama: PreTrainedModel) -> None:
    """Scored as one-hot it would still be exact, only wasteful: acceptance would fall to sum(p * q)."""
    spec = selfspec.wrap(llama, LayerSkip(mlp=[3]), draft_length=4)
    # At this temperature p and q are nearly uniform: sum(min(p, q)) is nearly 1, sum(p * q) nearly 1 / 50.
    out = spec.generate(tiny.prompt(PROMPT, 8), max_new_tokens=60, do_sample=True, temperature=4.0, top_k=0, seed=1)
    assert out.stats.judged > 300
    assert out.stats.acceptance_rate > 0.7


def test_drafts_are_the_greedy_text_of_the_model_cut_there(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    for layer in (1, 3):
        cut = with_layers(model, range(layer))
        text = tiny.prompt(11)[0].tolist()
        spec = selfspec.wrap(model, EarlyExit(layer), draft_length=3)
        for chunk in spec.stream(tiny.prompt(11), max_new_tokens=12):
            (row,) = chunk.rows
            assert list(row.draft) == greedy_text(cut, text, len(row.draft))
            text += row.tokens
        assert len(text) == 23


def greedy_text(model: PreTrainedModel, prefix: list[int], length: int) -> list[int]:
    """The next tokens, each from a forward over all before it: no cache, no `generate`."""
    text = list(prefix)
    with torch.no_grad():
        for _ in range(length):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].float().argmax()))
    return text[len(prefix) :]

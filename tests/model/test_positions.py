"""Texts across the length at which rotary tables change, and texts that are read in blocks: exact, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import selfspec
from helpers import tiny
from helpers.captures import StandIn, ticking
from helpers.serving import Stepped
from helpers.shrunken import shrunken
from helpers.tokenizers import PLAIN
from selfspec.cli.conversation import ChatTurn, Conversation
from selfspec.compat import cache_argument
from selfspec.decode.generation import Limits
from selfspec.errors import UnsupportedOptionError
from selfspec.measure.rounding import Bound
from selfspec.measure.stock import blockwise_logits, read_reference
from selfspec.model import stock_passes
from selfspec.model.stock_passes import block_logits
from selfspec.runtime.graph_cache import GraphCache
from selfspec.serve.chat.template import ChatTemplate
from selfspec.serve.row_request import RowRequest

BOUNDARY = 24
CHAT_BOUNDARY = 60
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
DRAFTS = {
    "plain": None,
    "exit": selfspec.drafts.EarlyExit(2),
    "skip": selfspec.drafts.LayerSkip(layers=[1]),
    "lookup": selfspec.drafts.PromptLookup(),
    "int8": selfspec.drafts.LowPrecision(),
}


def rope(half: int = 4) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * half,
        "long_factor": [8.0] * half,
        "original_max_position_embeddings": BOUNDARY,
        "short_mscale": 1.0,
        "long_mscale": 1.4,
    }


def phi3(model_type: str = "phi3") -> PreTrainedModel:
    """A model whose `generate` drops a past that it would rotate otherwise."""
    partial: dict[str, Any] = {"partial_rotary_factor": 1.0} if model_type == "phi3" else {}
    return shrunken(model_type, original_max_position_embeddings=BOUNDARY, rope_parameters=rope(), **partial)


def llama(**options: Any) -> PreTrainedModel:
    return tiny.llama(rope_parameters=rope(), **options)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "phi3": phi3,
    "phimoe": lambda: phi3("phimoe"),
    "minicpm3": lambda: shrunken("minicpm3", rope_parameters=rope(2)),
}


def words(length: int, rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def generated(where: Any, ids: Tensor, new: int, past: DynamicCache | None = None, mask: Tensor | None = None) -> Any:
    model = where.model if isinstance(where, selfspec.SelfSpeculative) else where
    cache = {} if past is None else {cache_argument(model): past}
    mask = torch.ones_like(ids) if mask is None else mask
    return where.generate(ids, attention_mask=mask, max_new_tokens=new, **cache, **GREEDY)


def equal(found: Any, wanted: Any) -> None:
    """Fail where texts differ, or where what they were chosen from does."""
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        *(("llama", draft) for draft in DRAFTS),
        ("phi3", "plain"),
        pytest.param("phimoe", "exit", marks=pytest.mark.contract),
        pytest.param("minicpm3", "exit", marks=pytest.mark.contract),
    ],
)
def test_a_past_from_below_is_read_anew_beyond(name: str, draft: str) -> None:
    model = MODELS[name]()
    spec = selfspec.wrap(model, DRAFTS[draft], draft_length=3)
    past = DynamicCache()
    ids = generated(spec, words(12), 8, past).sequences
    # Far beyond, and as near as a request may begin: a prompt's last token is not read with the others.
    for more in (12, 6):
        text = torch.cat([ids, words(more, seed=1)], 1)
        held = generated(spec, ids[:, :12], 8, past := DynamicCache())
        assert torch.equal(held.sequences, ids)
        found = generated(spec, text, 9, past)
        equal(found, generated(model, text, 9))
        # What the turn gives back holds for the one after it.
        assert past.get_seq_length() == found.sequences.shape[1] - 1
        longer = torch.cat([found.sequences, words(5, seed=2)], 1)
        equal(generated(spec, longer, 9, past), generated(model, longer, 9))


def test_a_ragged_batch_is_read_anew() -> None:
    model = llama()
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    past = DynamicCache()
    ids = generated(spec, words(12, 2), 8, past, mask).sequences
    text = torch.cat([ids, words(12, 2, seed=1)], 1)
    whole = torch.cat([mask, torch.ones(2, 20, dtype=torch.long)], 1)
    equal(generated(spec, text, 9, past, whole), generated(model, text, 9, mask=whole))


def test_a_past_without_its_tokens_is_refused() -> None:
    model = llama()
    spec = selfspec.wrap(model)
    past = DynamicCache()
    ids = generated(spec, words(12), 8, past).sequences
    embeddings = model.get_input_embeddings()(torch.cat([ids[:, -1:], words(12, seed=1)], 1)).detach()
    mask = torch.ones(1, past.get_seq_length() + embeddings.shape[1], dtype=torch.long)
    with pytest.raises(UnsupportedOptionError, match="read again"):
        spec.generate(
            inputs_embeds=embeddings, attention_mask=mask, **{cache_argument(model): past}, max_new_tokens=4, **GREEDY
        )


@pytest.mark.parametrize("draft", [None, "exit:2"])
@pytest.mark.parametrize("prompt", [12, 24, 25])
def test_a_text_that_crosses_is_refused(prompt: int, draft: str | None) -> None:
    spec = selfspec.wrap(llama(), draft)
    past = DynamicCache()
    ids = generated(spec, words(8), 3, past).sequences
    for known in (None, past):
        with pytest.raises(UnsupportedOptionError, match=r"longrope.* 24 tokens"):
            generated(spec, torch.cat([ids, words(prompt - 11, seed=1)], 1), 14, known)
    # So are rows that lie on different sides.
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :36] = 0
    with pytest.raises(UnsupportedOptionError, match="longrope"):
        generated(spec, words(40, 2), 2, mask=mask)


@pytest.mark.parametrize("at_once", [1, 16, 24])
def test_prompts_that_are_read_in_pieces_of_other_tables_are_refused(at_once: int) -> None:
    spec = selfspec.wrap(llama())
    spec.limits = Limits(200, at_once)
    generated(spec, words(12), 8)
    with pytest.raises(UnsupportedOptionError, match="tokens at a time"):
        generated(spec, words(40), 8)
    spec.limits = None
    with pytest.raises(UnsupportedOptionError, match="tokens at a time"):
        spec.generate(words(40), torch.ones_like(words(40)), max_new_tokens=8, prefill_chunk_size=at_once, **GREEDY)


def test_pieces_beyond_the_change_are_exact() -> None:
    model = llama()
    spec = selfspec.wrap(model)
    spec.limits = Limits(200, 25)
    past = DynamicCache()
    found = generated(spec, words(60), 8, past)
    equal(found, generated(model, words(60), 8))
    spec.limits = Limits(200, 4)
    longer = torch.cat([found.sequences, words(15, seed=2)], 1)
    equal(generated(spec, longer, 9, past), generated(model, longer, 9))


@pytest.mark.contract
@pytest.mark.parametrize("name", MODELS)
def test_programs_recorded_below_hold_beyond_or_are_not_used(name: str) -> None:
    model = MODELS[name]()
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=2, runtime=StandIn(0, 8))
    spec.programs = GraphCache(spec.runtime, ticking())
    for length, new in ((8, 15), (8, 15), (40, 15), (8, 15)):
        equal(generated(spec, words(length), new), generated(model, words(length), new))
    # Where the code decides by values of tensors, and which does depends on the version, nothing is recorded.
    refusals = spec.programs.refusals.values()
    assert spec.programs.proved or all("depends on values" in reason for reason in refusals)


def test_texts_beyond_the_context_leave_dynamic_tables_right() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny.llama(rope_parameters=dynamic, max_position_embeddings=BOUNDARY)
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    wanted = generated(spec, words(8), 16)
    with torch.no_grad():
        model(words(60))
    equal(generated(spec, words(8), 16), wanted)


def test_rows_of_an_engine_end_at_the_change_with_drafts_of_others_beside_them() -> None:
    model = llama(vocab_size=24)
    engine = Stepped(selfspec.wrap(model, "exit:1", draft_length=6), 4, 16, None)
    asked = [(tuple(tiny.prompt(size, seed=size, vocabulary=24)[0].tolist()), new) for size, new in ((20, 4), (3, 21))]
    tickets = [engine.submit(RowRequest(prompt, new, {"do_sample": False})) for prompt, new in asked]
    engine.run()
    for (prompt, new), ticket in zip(asked, tickets, strict=True):
        wanted = generated(model, torch.tensor([prompt]), new).sequences[0, len(prompt) :]
        assert ticket.tokens == wanted.tolist()


def answered(conversation: Conversation, model: PreTrainedModel, text: str) -> ChatTurn:
    turn = conversation.ask(text)
    for _ in turn:
        pass
    turn.close()
    ids = torch.tensor([turn.prompt])
    assert turn.tokens == generated(model, ids, len(turn.tokens)).sequences[0, ids.shape[1] :].tolist()
    return turn


def test_a_conversation_that_grew_shorter_forgets_what_was_rotated_for_its_length(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tables = {**rope(), "original_max_position_embeddings": CHAT_BOUNDARY}
    model = tiny.llama(rope_parameters=tables, vocab_size=len(tokenizer), max_position_embeddings=400)
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    template = ChatTemplate(tokenizer, PLAIN)
    conversation = Conversation(spec, tokenizer, template, "Be kind.", 30, {"do_sample": False})
    long = "What did Tom say to Lily about the red ball and the blue one, and why did he say it, Mom?"
    answered(conversation, model, long)
    assert len(conversation._read.tokens) > CHAT_BOUNDARY
    conversation.messages = conversation.messages[:1]
    turn = answered(conversation, model, "Hi")
    assert len(turn.prompt) < CHAT_BOUNDARY
    assert turn.kept == 0


# Of states that begin anew with a pass, of states that go on, and of none.
TYPES = ("mamba", "falcon_mamba", "jamba", "bamba", "mamba2", "lfm2", "llama", "opt")
NEAR = 8


def longrope() -> PreTrainedModel:
    return tiny.llama(max_position_embeddings=64, rope_parameters={**rope(), "original_max_position_embeddings": NEAR})


def read(model: PreTrainedModel, ids: Tensor, widths: Sequence[int]) -> Tensor:
    return torch.cat(list(block_logits(model, ids.split(list(widths), 1))))


@torch.no_grad()
def whole(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("widths", [[6, 4, 4], [6, *[1] * 8], [14]])
@pytest.mark.parametrize("name", TYPES)
def test_blocks_say_what_the_whole_does(name: str, widths: list[int]) -> None:
    model, ids = shrunken(name, vocab_size=64), tiny.prompt(14, vocabulary=64)
    torch.testing.assert_close(read(model, ids, widths), whole(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("numbers", [64 * 5, 64 * 9, 1])
def test_a_long_text_is_read_as_often_as_its_logits_need(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_passes, "_NUMBERS_AT_ONCE", numbers)
    model, ids = shrunken("jamba", vocab_size=64), tiny.prompt(14, vocabulary=64)
    torch.testing.assert_close(read(model, ids, [4, 4, 4, 2]), whole(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [NEAR, NEAR + 1, 20])
def test_blocks_on_either_side_of_the_length_at_which_rotary_tables_change(length: int) -> None:
    model, ids = longrope(), tiny.prompt(length)
    widths = [4] * (length // 4) + [1] * (length % 4)
    torch.testing.assert_close(read(model, ids, widths), whole(model, ids))


def test_a_long_text_leaves_the_rotary_tables_of_short_ones() -> None:
    """Another thread may be in the middle of a pass."""
    model = longrope()
    whole(model, tiny.prompt(4))
    before = model.model.rotary_emb.inv_freq.clone()
    read(model, tiny.prompt(20), [4] * 5)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("name", ["falcon_mamba", "jamba", "bamba"])
def test_the_rounding_of_models_with_states_is_rounding(name: str) -> None:
    model, bound = shrunken(name, torch.float32, vocab_size=64), Bound((2, 4))
    reference = read_reference(model, tiny.prompt(9, vocabulary=64), 8)
    bound.measure(model, reference)
    assert bound.largest < 1e-2
    # The reference are the passes of `model.generate`.
    found = blockwise_logits(model, reference.prompt, reference.tokens, 4).argmax(-1)
    assert found.tolist() == reference.logits.argmax(-1).tolist() == reference.tokens

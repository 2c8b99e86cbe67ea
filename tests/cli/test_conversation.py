"""Conversations read what they have not read, and say what the whole conversation would."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

import selfspec
from helpers import tiny
from helpers.saved_folders import checkpoint_folder
from helpers.tiny import in_turns
from helpers.tokenizers import PLAIN
from selfspec.cli.conversation import ChatTurn, Conversation
from selfspec.errors import PromptError
from selfspec.serve.chat.template import ChatTemplate

TEXTS = ("Tell me of Lily.", "And then?", "What did Tom say?")
# The last message first: what was read before is no beginning of the next prompt.
BACKWARDS = "{% for m in messages | reverse %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}so{% endif %}"


@pytest.fixture(scope="module")
def spec() -> selfspec.SelfSpeculative:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float64)
    return selfspec.wrap(model, draft="lookup+exit:3")


def begun(
    spec: selfspec.SelfSpeculative,
    tokenizer: PreTrainedTokenizerBase,
    source: str = PLAIN,
    system: str | None = "Be kind.",
    new: int = 12,
) -> Conversation:
    return Conversation(spec, tokenizer, ChatTemplate(tokenizer, source), system, new, {"do_sample": False})


@pytest.fixture
def conversation(spec: selfspec.SelfSpeculative, tokenizer: PreTrainedTokenizerBase) -> Conversation:
    return begun(spec, tokenizer)


def answered(conversation: Conversation, text: str, new: int = 12) -> ChatTurn:
    """A turn to its end, which says what the model answers to a prompt that it reads from its beginning."""
    turn = conversation.ask(text)
    assert "".join(turn) + turn.close() == turn.text
    assert turn.finished
    out = conversation._spec.generate(torch.tensor([turn.prompt]), max_new_tokens=new, do_sample=False)
    assert turn.tokens == out.sequences[0].tolist()[len(turn.prompt) :]
    return turn


@pytest.mark.parametrize("source", [PLAIN, BACKWARDS])
def test_answers_are_those_of_the_whole_conversation(
    spec: selfspec.SelfSpeculative, tokenizer: PreTrainedTokenizerBase, source: str
) -> None:
    conversation, kept = begun(spec, tokenizer, source), []
    for text in TEXTS:
        turn = answered(conversation, text)
        assert turn.text == conversation.messages[-1]["content"]
        kept.append((turn.kept, len(turn.prompt)))
    if source == PLAIN:
        # What was read before; a text of this model is cut into other tokens than it was written in.
        assert all(now[0] >= before[1] for before, now in pairwise(kept))


def test_a_turn_without_any_text_is_not_remembered(conversation: Conversation) -> None:
    conversation.ask(TEXTS[0]).close()
    assert [message["role"] for message in conversation.messages] == ["system"]
    # A reset leaves the system message.
    answered(conversation, TEXTS[0])
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be kind."}]
    assert conversation.ask(TEXTS[0]).kept == 0


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gpt2"])
def test_other_caches(name: str) -> None:
    spec = selfspec.wrap(getattr(tiny, name)(vocab_size=256), draft="exit:2")
    conversation = begun(spec, tiny.tokenizer(), system=None, new=5)
    for text in ("ab", "c"):
        answered(conversation, text, 5)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "source"),
    in_turns(("qwen3_next", "mamba", "mamba2", "falcon_mamba"), {"plain": PLAIN, "backwards": BACKWARDS}),
)
def test_states_that_cannot_go_back_are_read_anew(name: str, source: str) -> None:
    from helpers.shrunken import shrunken

    spec = selfspec.wrap(shrunken(name, vocab_size=256), draft=None)
    conversation = begun(spec, tiny.tokenizer(), source, None, 5)
    cut_short = conversation.ask("no")
    next(cut_short)
    cut_short.close()
    for text in ("ab", "c"):
        answered(conversation, text, 5)


def test_a_turn_that_is_ended_is_kept_as_far_as_it_came(conversation: Conversation) -> None:
    turn = conversation.ask(TEXTS[0])
    for _ in range(3):
        next(turn)
    turn.close()
    assert len(turn.tokens) >= 3
    assert not turn.finished
    following = answered(conversation, TEXTS[1])
    # All that was read: of the answer what is cut into the same tokens again.
    alike = [a == b for a, b in zip(turn.prompt + turn.tokens[:-1], following.prompt[:-1], strict=False)]
    assert following.kept == [*alike, False].index(False) >= len(turn.prompt)


def test_a_full_context_is_refused(
    spec: selfspec.SelfSpeculative, conversation: Conversation, tokenizer: PreTrainedTokenizerBase
) -> None:
    before = list(conversation.messages)
    with pytest.raises(PromptError, match="/reset"):
        conversation.ask("Lily " * 600)
    assert conversation.messages == before
    # An answer takes what the context has room for.
    conversation = begun(spec, tokenizer, new=100_000)
    turn = conversation.ask(TEXTS[0])
    "".join(turn)
    turn.close()
    assert len(turn.prompt) + len(turn.tokens) <= 512


def test_an_interrupt_before_the_answer_leaves_the_next_turn_right(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes: some layers of the cache are cropped by then, and others are not."""
    answered(conversation, TEXTS[0])
    # Of the answer nothing is kept, and of what came before it all.
    conversation.messages[-1]["content"] = "No."
    before = list(conversation.messages)
    crop, crops = DynamicLayer.crop, itertools.count()

    def interrupted(layer: DynamicLayer, tokens: int) -> None:
        if next(crops) == 2:
            raise KeyboardInterrupt
        crop(layer, tokens)

    with monkeypatch.context() as patched:
        patched.setattr(DynamicLayer, "crop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conversation.ask(TEXTS[1])
    assert conversation.messages == before
    answered(conversation, TEXTS[2])

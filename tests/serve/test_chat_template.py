"""What is said is in what a template writes, as text or as parts, or it is refused by name."""

from __future__ import annotations

import pytest

from helpers import tiny
from helpers.published_templates import PUBLISHED, READS_PARTS
from helpers.tokenizers import PLAIN
from selfspec.errors import CheckpointError, PromptError
from selfspec.serve.chat.template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who was Tom?"},
    {"role": "assistant", "content": "A boy."},
    {"role": "user", "content": "And Lily?"},
]
SHAPES = {name: shape.source for name, shape in PUBLISHED.items()} | READS_PARTS | {"plain": PLAIN}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_said_is_written(name: str) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = SHAPES[name]
    template = ChatTemplate(tokenizer)
    written = tokenizer.decode(template.prompt(MESSAGES))
    places = [written.find(message["content"]) for message in MESSAGES]
    assert min(places) >= 0
    # Some put what the system says before the last question.
    assert places[1:] == sorted(places[1:])
    # An answer that goes on ends with what it has said.
    assert tokenizer.decode(template.prompt(MESSAGES[:3], goes_on=True)).endswith("A boy.")


@pytest.mark.parametrize(
    ("role", "remedy"), [("system", "or say it in a user's message"), ("assistant", "--template FILE")]
)
def test_what_a_template_leaves_out_is_refused(role: str, remedy: str) -> None:
    source = "{% for m in messages if m.role != ROLE %}{{ m.content }}{% endfor %}".replace("ROLE", repr(role))
    template = ChatTemplate(tiny.tokenizer(), source)
    assert template.prompt(MESSAGES[1:2])
    with pytest.raises(PromptError, match=rf"leaves out.*'{role}'.*{remedy}"):
        template.prompt(MESSAGES)


LEAVES_OUT = "[INST] {% for part in messages[0].content.parts or [] %}{{ part }}{% endfor %}[/INST]"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, r"--template FILE.*selfspec generate"),
        ("{% for", "does not write one message"),
        ("{{ raise_exception('no') }}", "does not write one message"),
        ("{{ messages[7].content }}", "does not write one message"),
        (LEAVES_OUT, r"leaves out.*'user'.*--template FILE"),
    ],
)
def test_a_template_that_cannot_serve_is_refused_before_work(source: str | None, words: str) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(CheckpointError, match=words):
        ChatTemplate(tokenizer, source)

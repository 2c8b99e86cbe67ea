"""Prompts to measure on: texts from files, whole as people have them, or cut or joined to one length in tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.errors import PromptError
from selfspec.files.json_text import parse_json
from selfspec.measure.embedded import PROMPTS

BUILT_IN = "demo"
"""The default workload: beginnings of four Python files."""

BEGINNINGS = (
    "Once upon a time, there was a little",
    "The capital of France is",
    "def add(a, b):\n    return",
    "Monday, Tuesday, Wednesday,",
)
"""Short beginnings of prose, a fact, code and a list, so that any language model has something to continue."""

# Characters of a document that make a prompt of text.
_BEGINNING = 400
_FIELDS = ("prompt", "turns", "text", "messages")

Message = dict[str, Any]
"""`role` and `content`, as chat templates read them."""


@dataclass(frozen=True)
class Text:
    """A text to go on from: a whole document, of which a prompt is the beginning, or another, whose end it keeps.

    Attributes:
        messages: the conversation that it ends, if there is one before it.
    """

    text: str
    whole: bool
    messages: tuple[Message, ...] = ()

    @property
    def prompt(self) -> str:
        """What a prompt of text says: all of it, or the beginning of a document."""
        return self.text[:_BEGINNING] if self.whole else self.text


@dataclass(frozen=True)
class Workload:
    """Texts of one sort, at least one, under the name that reports call it."""

    name: str
    texts: tuple[Text, ...]

    def whole_prompts(self, encode: Callable[[Text], Sequence[int]], number: int) -> list[Tensor]:
        """Return whole prompts, `[1, tokens]` each, spread evenly over the texts; `number`, or as many as there are.

        `encode` is one of `as_text` and `as_chat`.

        Raises:
            PromptError: a text has no token.
        """
        count = min(number, len(self.texts))
        chosen = [encode(self.texts[row * len(self.texts) // count]) for row in range(count)]
        if not all(chosen):
            raise PromptError(f"a text of workload {self.name!r} has no tokens; take it out")
        return [torch.tensor([[*ids]]) for ids in chosen]

    def prompts(self, tokenizer: PreTrainedTokenizerBase, number: int, batch: int, context: int) -> list[Tensor]:
        """Prompts of one length, spread evenly over the texts.

        A document gives its first tokens and any other text its last ones. What is too short has other texts of the
        workload put before it. Where the tokenizer begins a text with its bos token, every prompt begins so.

        Returns:
            One `[batch, context]` for each call; `number` rows in all, or `batch` where that is more.

        Raises:
            PromptError: no text has a token.
        """
        rows, texts = max(number // batch, 1) * batch, len(self.texts)
        first: list[int] = tokenizer("a").input_ids[:1]
        begin = first if first == [tokenizer.bos_token_id] else []
        ids = [_token_ids(tokenizer, text, context) for text in self.texts]
        if not any(ids):
            raise PromptError(f"the texts of workload {self.name!r} have no tokens; give others")
        made, wanted = [], context - len(begin)
        for row in range(rows):
            place = row % texts if rows > texts else row * texts // rows
            tokens: list[int] = []
            while len(tokens) < wanted:
                tokens = ids[place % texts] + tokens
                place -= 1
            made.append(begin + tokens[len(tokens) - wanted :])
        return list(torch.tensor(made).split(batch))


def as_text(tokenizer: PreTrainedTokenizerBase) -> Callable[[Text], list[int]]:
    """Return what encodes texts as they stand, with what the tokenizer begins a text with."""

    def encode(text: Text) -> list[int]:
        ids: list[int] = tokenizer(text.prompt).input_ids
        return ids

    return encode


def as_chat(tokenizer: PreTrainedTokenizerBase) -> Callable[[Text], list[int]]:
    """Return what encodes texts as a user's messages, by the checkpoint's chat template.

    Raises:
        PromptError: there is none.
    """
    from selfspec.serve.chat_template import ChatTemplate

    if not tokenizer.chat_template:
        raise PromptError("the checkpoint has no chat template to write prompts by; give them as they stand")
    template = ChatTemplate(tokenizer)

    def encode(text: Text) -> list[int]:
        return template.prompt([*text.messages, {"role": "user", "content": text.prompt}])

    return encode


def built_in() -> Workload:
    """The beginnings of four Python files that the embedded model was not trained on."""
    return Workload(BUILT_IN, tuple(Text(text, whole=True) for text in PROMPTS))


def read_workloads(given: Sequence[str]) -> dict[str, Workload]:
    """Workloads by name: `demo` is the built-in one, any other is read as `parse_workloads` does.

    Raises:
        PromptError: one cannot be read, or two have one name.
    """
    found = [each for text in given for each in ([built_in()] if text == BUILT_IN else parse_workloads(text))]
    named = {each.name: each for each in found}
    if len(named) < len(found):
        raise PromptError(f"two workloads have one name ({', '.join(each.name for each in found)}); give each another")
    return named


def parse_workloads(given: str) -> list[Workload]:
    """Read `NAME=FILE`, `NAME=FILE#FIELD=VALUE` (only lines that say so) or `NAME=FILE#FIELD` (one for each value).

    A file is JSONL, with `prompt`, `turns` (the first is taken), `text` (a document) or `messages` (a conversation that
    ends with a user's) in each line.

    Raises:
        PromptError: it is not written so, or the file cannot be used.
    """
    name, named, place = given.partition("=")
    file, _, selection = place.partition("#")
    if not named or not name or not file:
        raise PromptError(f"workload {given!r} is not understood; write NAME=FILE, e.g. code=humaneval.jsonl")
    field, selected, value = selection.partition("=")
    lines = _lines(Path(file))
    if not field or selected:
        chosen = {name: [line for line in lines if not field or str(line.get(field)) == value]}
    else:
        chosen = {}
        for line in lines:
            if field in line:
                chosen.setdefault(f"{name}/{line[field]}", []).append(line)
        if not chosen:
            raise PromptError(f"no line of {file} has a field {field!r}")
    found = []
    for each, said in chosen.items():
        texts = tuple(text for text in map(_text, said) if text is not None)
        if not texts:
            raise PromptError(
                f"workload {each!r}: no line of {file} that was asked for has any of {', '.join(_FIELDS)}"
            )
        found.append(Workload(each, texts))
    return found


def read_prompts(file: Path, most: int | None = None) -> tuple[str, ...]:
    """The prompts of a file, as text.

    They are one a line, or in JSONL as of a workload, if the file's name ends in `.jsonl`; of a document the
    beginning is taken. No more than `most` are read.

    Raises:
        PromptError: the file cannot be read, is not UTF-8, or holds no prompt.
    """
    if file.suffix != ".jsonl":
        prompts = tuple(line for line in _read(file).splitlines() if line.strip())[:most]
    else:
        texts = [_text(line) for line in _lines(file, most)]
        if None in texts:
            raise PromptError(f"line {texts.index(None) + 1} of {file} has no text in any of {', '.join(_FIELDS)}")
        prompts = tuple(each.prompt for each in texts if each is not None)
    if not prompts:
        raise PromptError(f"{file} holds no prompt; write one a line")
    return prompts


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"the prompts in {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{file} is not UTF-8 text ({error}); convert it first") from error


def _lines(file: Path, most: int | None = None) -> list[dict[str, Any]]:
    # Not `splitlines`: a JSON string may hold other line separators than this.
    lines = [(number, line) for number, line in enumerate(_read(file).split("\n"), 1) if line.strip()]
    found = []
    for number, line in lines[:most]:
        try:
            found.append(parse_json(line))
        except ValueError as error:
            raise PromptError(f"line {number} of {file} is no JSON ({error})") from error
        if not isinstance(found[-1], dict):
            raise PromptError(f"line {number} of {file} is no JSON object")
    return found


def _text(line: dict[str, Any]) -> Text | None:
    turns, messages = line.get("turns"), line.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
        *before, last = messages
        if isinstance(last.get("content"), str) and last["content"]:
            return Text(last["content"], False, tuple(before))
    first = turns[0] if isinstance(turns, list) and turns else None
    for field, text in {"prompt": line.get("prompt"), "turns": first, "text": line.get("text")}.items():
        if isinstance(text, str) and text:
            return Text(text, field == "text")
    return None


def _token_ids(tokenizer: PreTrainedTokenizerBase, text: Text, context: int) -> list[int]:
    # Long documents need not be read whole.
    part = text.text[: 16 * context] if text.whole else text.text
    ids: list[int] = tokenizer(part, add_special_tokens=False).input_ids
    return ids[:context] if text.whole else ids

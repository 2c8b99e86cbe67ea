"""Prompts to measure on: texts from files, cut or joined to one length in tokens."""

from __future__ import annotations

from collections.abc import Sequence
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
_FIELDS = ("prompt", "turns", "text")


@dataclass(frozen=True)
class Text:
    """A text to go on from: a whole document, of which a prompt is the beginning, or another, whose end it keeps.

    Attributes:
        reference: a good answer to it, if the workload has one.
        test: Python that raises after a wrong answer, if the workload has one.
    """

    text: str
    whole: bool
    reference: str | None = None
    test: str | None = None


@dataclass(frozen=True)
class Workload:
    """Texts of one sort, at least one, under the name that reports call it."""

    name: str
    texts: tuple[Text, ...]

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

    A file is JSONL, with `prompt`, `turns` (the first is taken) or `text` (a document) in each line. Beside it may
    stand a good answer, as `reference` or `canonical_solution`, and a test of answers, as HumanEval has it: `test`,
    which defines `check`, and `entry_point`, the name of the function to be checked.

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
        prompts = tuple(each.text[:_BEGINNING] if each.whole else each.text for each in texts if each is not None)
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
    turns = line.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    for field, text in {"prompt": line.get("prompt"), "turns": first, "text": line.get("text")}.items():
        if isinstance(text, str) and text:
            return Text(text, field == "text", _answer(line), _test(line))
    return None


def _answer(line: dict[str, Any]) -> str | None:
    answers = (line.get(field) for field in ("reference", "canonical_solution"))
    return next((answer for answer in answers if isinstance(answer, str) and answer), None)


def _test(line: dict[str, Any]) -> str | None:
    test, name = line.get("test"), line.get("entry_point")
    if not (isinstance(test, str) and isinstance(name, str) and name.isidentifier()):
        return None
    return f"{test}\ncheck({name})\n"


def _token_ids(tokenizer: PreTrainedTokenizerBase, text: Text, context: int) -> list[int]:
    # Long documents need not be read whole.
    part = text.text[: 16 * context] if text.whole else text.text
    ids: list[int] = tokenizer(part, add_special_tokens=False).input_ids
    return ids[:context] if text.whole else ids

"""Grammars of real libraries: with any draft the text is what `transformers` gives with a fresh processor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import selfspec
from selfspec.draft import Drafter

for library in ("xgrammar", "outlines", "outlines_core", "llguidance", "lmformatenforcer"):
    pytest.importorskip(library)

import outlines
import torch._dynamo
from outlines.types import Regex

from helpers.grammars import LIBRARIES, Fresh, Grammar, Subject, compiled_by_xgrammar, writing

pytestmark = [
    pytest.mark.clients,
    # An ended row is shown its padding, which llguidance says it does not expect.
    pytest.mark.filterwarnings("ignore:Error in LLMatcher"),
]

EXIT = selfspec.drafts.EarlyExit(2)
LOOK_UP = selfspec.drafts.PromptLookup(shortest=1)
DRAFTS: dict[str, Drafter] = {"exit": EXIT, "look-up": LOOK_UP, "cascade": selfspec.drafts.Cascade(LOOK_UP, EXIT)}
RULES = ("token", "block")

RECORD = Grammar(r'\{"name": "[a-z]{2,6}", "age": [1-9][0-9]{0,2}, "tags": \[("x"|"y")(, ("x"|"y")){0,2}\]\}')
# Libraries differ in the order of keys, in the white space that they allow and in what they take for an integer.
SCHEMA = Grammar(
    r' *\{ *"(name|age|big)".*',
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"enum": ["anna", "ben", "mia"]},
                "age": {"type": "integer", "minimum": 0, "maximum": 999},
                "big": {"type": "boolean"},
            },
            "required": ["name", "age", "big"],
            "additionalProperties": False,
        }
    ),
)
GRAMMARS = {"regex": RECORD, "schema": SCHEMA}
PROMPTS = ('{"name": "ab", "age": 10}', 'name, age: {"tags": ["x", "y"]} {"name": "', "10 tags")
NEW = 48


@pytest.fixture(autouse=True, scope="module")
def not_compiled() -> Iterator[None]:
    """The libraries' kernels uncompiled, which would take a minute. outlines changes a setting of the compiler, too."""
    with torch._dynamo.config.patch(suppress_errors=False), torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def writer() -> Subject:
    return writing()


@pytest.fixture(scope="module")
def fresh(writer: Subject) -> Callable[[str, str], Fresh]:
    return cache(lambda library, grammar: LIBRARIES[library](writer, GRAMMARS[grammar]))


def greedy(**options: Any) -> dict[str, Any]:
    return {"max_new_tokens": NEW, "do_sample": False, **options}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_greedy_text_is_that_of_transformers(
    writer: Subject, fresh: Callable[[str, str], Fresh], library: str, grammar: str, rows: int
) -> None:
    made, prompts = fresh(library, grammar), writer.prompts(PROMPTS[:rows])
    wanted = writer.model.generate(**prompts, **greedy(**made()))
    assert torch.equal(writer.model.generate(**prompts, **greedy(**made())), wanted)
    assert not torch.equal(writer.model.generate(**prompts, **greedy()), wanted)
    width = prompts["input_ids"].shape[1]
    assert all(re.fullmatch(GRAMMARS[grammar].regex, writer.text(row)) for row in wanted[:, width:])
    for number, (name, draft) in enumerate(DRAFTS.items()):
        spec = selfspec.wrap(writer.model, draft, draft_length=2 + number, accept=RULES[number % 2])
        out = spec.generate(**prompts, **greedy(**made()))
        assert torch.equal(out.sequences, wanted), name
        assert out.stats.drafted > 0
    assert torch.equal(writer.model.generate(**prompts, **greedy(**made()), custom_generate=spec), wanted)


@pytest.mark.parametrize("backend", ["outlines_core", "xgrammar", "llguidance"])
def test_generators_of_outlines_may_be_used_again(writer: Subject, backend: str) -> None:
    generator = outlines.Generator(
        outlines.from_transformers(writer.model, writer.tokenizer), Regex(RECORD.regex), backend=backend
    )
    for draft in DRAFTS.values():
        spec = selfspec.wrap(writer.model, draft, draft_length=3)
        for prompt in PROMPTS[:2]:
            wanted = generator(prompt, max_new_tokens=NEW, do_sample=False)
            assert re.fullmatch(RECORD.regex, wanted)
            assert generator(prompt, max_new_tokens=NEW, do_sample=False, custom_generate=spec) == wanted
    texts = generator.batch(list(PROMPTS), max_new_tokens=NEW, do_sample=False)
    assert generator.batch(list(PROMPTS), max_new_tokens=NEW, do_sample=False, custom_generate=spec) == texts


# The adapter that docs/grammars.md shows.


@pytest.fixture(scope="module")
def undoable() -> Any:
    """xgrammar's processor that can go back, from the page."""
    page = (Path(__file__).parents[2] / "docs" / "grammars.md").read_text()
    (code,) = re.findall(r"```python\n(import xgrammar.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["UndoableGrammar"]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_the_adapter_of_the_page_is_right(
    writer: Subject, fresh: Callable[[str, str], Fresh], undoable: Any, grammar: str, rows: int
) -> None:
    compiled = compiled_by_xgrammar(writer, GRAMMARS[grammar])
    prompts = writer.prompts(PROMPTS[:rows])
    width = prompts["input_ids"].shape[1]
    stock = fresh("xgrammar", grammar)
    wanted = writer.model.generate(**prompts, **greedy(**stock()))
    # By itself it is xgrammar's own.
    assert torch.equal(writer.model.generate(**prompts, **greedy(logits_processor=[undoable(compiled)])), wanted)
    coupled = greedy(do_sample=True, seed=2)
    plain = selfspec.wrap(writer.model, accept="coupled").generate(**prompts, **coupled, **stock()).sequences
    for length, (name, draft) in zip((2, 3, 5), DRAFTS.items(), strict=True):
        spec = selfspec.wrap(writer.model, draft, draft_length=length)
        out = spec.generate(**prompts, **greedy(logits_processor=[undoable(compiled)]))
        assert torch.equal(out.sequences, wanted), (name, length)
        out = spec.generate(**prompts, **coupled, accept="coupled", logits_processor=[undoable(compiled)])
        assert torch.equal(out.sequences, plain), (name, length)
        assert all(re.fullmatch(GRAMMARS[grammar].regex, writer.text(row)) for row in out.sequences[:, width:])


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_more_is_accepted_of_a_draft_that_it_filters(writer: Subject, undoable: Any, grammar: str) -> None:
    compiled = compiled_by_xgrammar(writer, GRAMMARS[grammar])
    spec = selfspec.wrap(writer.model, EXIT, draft_length=4)
    stock = LIBRARIES["xgrammar"](writer, GRAMMARS[grammar])
    for prompt in PROMPTS:
        prompts = writer.prompts([prompt])
        filtered = spec.generate(**prompts, **greedy(logits_processor=[undoable(compiled)]))
        unfiltered = spec.generate(**prompts, **greedy(**stock()))
        assert torch.equal(filtered.sequences, unfiltered.sequences)
        assert filtered.stats.accepted > 2 * unfiltered.stats.accepted

"""Grammars of real libraries: with any draft the text is what `transformers` gives with a fresh processor."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import selfspec
from helpers.joints import holm_rejects, p_value
from selfspec.draft import Drafter

for library in ("xgrammar", "outlines", "outlines_core", "llguidance", "lmformatenforcer"):
    pytest.importorskip(library)

import outlines
import torch._dynamo
from outlines.types import Regex

from helpers.grammars import END, LIBRARIES, PAD, Fresh, Grammar, Subject, compiled_by_xgrammar, large, small

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
    return large()


@pytest.fixture(scope="module")
def fresh(writer: Subject) -> Callable[[str, str], Fresh]:
    """What a library makes of a grammar, compiled once."""
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


@pytest.mark.parametrize("library", LIBRARIES)
def test_coupled_samples_are_those_of_plain_decoding(
    writer: Subject, fresh: Callable[[str, str], Fresh], library: str
) -> None:
    made, prompts = fresh(library, "regex"), writer.prompts(PROMPTS)
    options = greedy(do_sample=True, temperature=0.8, seed=5)
    plain = selfspec.wrap(writer.model, accept="coupled").generate(**prompts, **options, **made()).sequences
    width = prompts["input_ids"].shape[1]
    assert all(re.fullmatch(RECORD.regex, writer.text(row)) for row in plain[:, width:])
    for name, draft in DRAFTS.items():
        spec = selfspec.wrap(writer.model, draft, draft_length=3, accept="coupled")
        out = spec.generate(**prompts, **options, **made())
        assert torch.equal(out.sequences, plain), name
        assert out.stats.drafted > 0


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


# Sampled: the joint distribution of a grammar over six tokens.

SHORT = Grammar("[01]{2,3}2?|20[12]")
WORDS = [
    word
    for length in range(6)
    for word in map("".join, itertools.product("012", repeat=length))
    if re.fullmatch(SHORT.regex, word)
]
STARTS = ("0120", "21", "111")
LONGEST = 5


@torch.no_grad()
def joint(subject: Subject, prompt: str) -> dict[tuple[int, ...], float]:
    """Probability of every text of the grammar, its end and padding included, from plain passes."""
    start = tuple(subject.tokenizer.encode(prompt))
    ended: dict[tuple[int, ...], float] = {}
    going: dict[tuple[int, ...], float] = {(): 1.0}
    while going:
        longer: dict[tuple[int, ...], float] = {}
        for prefix, chance in going.items():
            scores = subject.model(torch.tensor([start + prefix])).logits[0, -1].float()
            written = subject.text(torch.tensor(prefix, dtype=torch.long))
            for token in range(len(scores)):
                whole = written + subject.tokenizer.decode([token]) if token > PAD else written
                stays = any(word.startswith(whole) for word in WORDS) if token > PAD else whole in WORDS
                if token == PAD or not stays:
                    scores[token] = -torch.inf
            for token, probability in enumerate(scores.softmax(-1).tolist()):
                if probability > 0:
                    (ended if token == END else longer)[*prefix, token] = chance * probability
        going = longer
    return {row + (PAD,) * (LONGEST - len(row)): chance for row, chance in ended.items()}


@pytest.fixture(scope="module")
def speaker() -> Subject:
    return small()


@pytest.fixture(scope="module")
def enumerated(speaker: Subject) -> dict[str, dict[tuple[int, ...], float]]:
    """Probability of each text, as ids, after each prompt."""
    return {start: joint(speaker, start) for start in STARTS}


def p_of(rows: list[Tensor], joints: dict[str, dict[tuple[int, ...], float]]) -> float:
    """Fit of rows of new ids, those of the prompts in turn, to the exact joint of prompt and text."""
    starts = list(joints)
    seen = [(index % len(starts), *padded(row)) for index, row in enumerate(rows)]
    together = {
        (index, *text): chance / len(starts)
        for index, start in enumerate(starts)
        for text, chance in joints[start].items()
    }
    return p_value(seen, together)


def padded(row: Tensor) -> list[int]:
    new: list[int] = row.tolist()
    return new + [PAD] * (LONGEST - len(new))


SAMPLED: dict[str, Any] = {"max_new_tokens": LONGEST, "do_sample": True, "top_k": 0}


def test_the_joint_is_that_of_transformers(
    speaker: Subject, enumerated: dict[str, dict[tuple[int, ...], float]]
) -> None:
    found = {}
    for library, make in LIBRARIES.items():
        prompts = speaker.prompts(STARTS * 200)
        width = prompts["input_ids"].shape[1]
        torch.manual_seed(1)
        new = speaker.model.generate(**prompts, **SAMPLED, **make(speaker, SHORT)())[:, width:]
        found[library] = p_of(list(new), enumerated)
    assert holm_rejects(found, 0.01) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_samples_follow_the_exact_joint(
    speaker: Subject, enumerated: dict[str, dict[tuple[int, ...], float]], library: str
) -> None:
    made = LIBRARIES[library](speaker, SHORT)
    first = list(LIBRARIES).index(library)
    found = {}
    for number, (rows, calls) in enumerate(((1, 120), (3, 80))):
        name = list(DRAFTS)[(first + number) % len(DRAFTS)]
        rule = RULES[(first // len(DRAFTS) + number) % 2]
        # Fresh processors are to be asked, not passes to be recorded.
        spec = selfspec.wrap(
            speaker.model, DRAFTS[name], draft_length=2 + number, accept=rule, runtime=selfspec.runtime.Eager()
        )
        prompts = speaker.prompts(STARTS[:rows])
        width = prompts["input_ids"].shape[1]
        outs = [spec.generate(**prompts, **SAMPLED, seed=seed, **made()) for seed in range(calls)]
        assert 0 < sum(out.stats.accepted for out in outs) < sum(out.stats.judged for out in outs)
        joints = {start: enumerated[start] for start in STARTS[:rows]}
        found[f"{name} {rule} rows {rows}"] = p_of([row for out in outs for row in out.sequences[:, width:]], joints)
    assert holm_rejects(found, 0.01) == []


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


def test_samples_with_the_adapter_follow_the_exact_joint(
    speaker: Subject, enumerated: dict[str, dict[tuple[int, ...], float]], undoable: Any
) -> None:
    compiled = compiled_by_xgrammar(speaker, SHORT)
    found = {}
    for rows, calls, name in ((1, 120, "exit"), (3, 80, "cascade")):
        spec = selfspec.wrap(speaker.model, DRAFTS[name], draft_length=3, runtime=selfspec.runtime.Eager())
        prompts = speaker.prompts(STARTS[:rows])
        width = prompts["input_ids"].shape[1]
        outs = [
            spec.generate(**prompts, **SAMPLED, seed=seed, logits_processor=[undoable(compiled)])
            for seed in range(calls)
        ]
        joints = {start: enumerated[start] for start in STARTS[:rows]}
        found[f"{name} rows {rows}"] = p_of([row for out in outs for row in out.sequences[:, width:]], joints)
    assert holm_rejects(found, 0.01) == []


def test_an_abandoned_stream_leaves_the_adapter_at_the_committed_text(writer: Subject, undoable: Any) -> None:
    processor = undoable(compiled_by_xgrammar(writer, RECORD))
    prompts = writer.prompts(PROMPTS[:1])
    stream = selfspec.wrap(writer.model, EXIT, draft_length=4).stream(**prompts, **greedy(logits_processor=[processor]))
    for _ in range(4):
        next(stream)
    stream.close()
    committed = stream.output()
    # Called again with the text so far, it goes on from there as one that was only ever shown that text.
    again = xgrammar_after(writer, committed.sequences, prompts["input_ids"].shape[1])
    scores = torch.zeros(1, writer.model.config.vocab_size)
    assert torch.equal(processor(committed.sequences, scores.clone()), again(committed.sequences, scores.clone()))


def xgrammar_after(writer: Subject, ids: Tensor, width: int) -> Any:
    """xgrammar's own processor after a call for each token of `ids` but the last."""
    (processor,) = LIBRARIES["xgrammar"](writer, RECORD)()["logits_processor"]
    for length in range(width, ids.shape[1]):
        processor(ids[:, :length], torch.zeros(1, writer.model.config.vocab_size))
    return processor

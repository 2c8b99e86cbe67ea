"""Names and values of drafts: what they mean, how they are written, and how what makes no draft is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.draft import (
    Budget,
    CacheWindow,
    Cascade,
    Draft,
    EarlyExit,
    LayerSkip,
    LowPrecision,
    PromptLookup,
    Recycling,
    ReducedVocabulary,
    RowsView,
    Stateless,
    Suffixes,
    drafter,
)
from selfspec.draft.registry import declarations, draft_name, kinds, parse_draft
from selfspec.errors import DraftConfigError
from selfspec.model.registry import find_adapter

ROOT = Path(__file__).parents[2]
PACKAGE = """
from dataclasses import dataclass

import torch
from selfspec import drafts


@drafts.drafter("bigram", argument="[:N]", help="what followed the last token where it was before")
@dataclass(frozen=True)
class Bigram(drafts.Stateless):
    longest: int = 9

    @classmethod
    def spelled(cls, name, argument):
        return cls() if argument is None else cls(int(argument))

    @property
    def spelling(self):
        return super().spelling or f"bigram:{self.longest}"

    def propose(self, rows, budget):
        found, depth = [], min(budget.depth, self.longest)
        for row in rows.running:
            text = rows.text(row)
            before = [place for place in range(len(text) - 1) if text[place] == text[-1]]
            following = text[before[-1] + 1 :][:depth] if before else []
            found.append((following + [text[-1]] * depth)[:depth])
        return drafts.Draft.chain(torch.tensor(found, device=rows.last_tokens.device))
"""


@drafter("undeclared", help="known by no entry point")
@dataclass(frozen=True)
class Undeclared(Stateless):
    """A drafter of another package."""

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return rows.no_draft()


def test_a_name_that_no_entry_point_makes_known_is_none() -> None:
    name = draft_name(Undeclared())
    assert name == f"{__name__}:Undeclared"
    assert parse_draft(name) == Undeclared()


WRITTEN = """
exit:4 int8 int4 int4+exit:20 lookup+int4+exit:2 int4+skip:layers=2 lookup+int8+skip:attn=3,5;mlp=4
skip:attn=3,5;mlp=4;layers=7,8,9 lookup suffix recycle lookup+recycle lookup+exit:4 exit:4+lookup
recycle+exit:2 lookup+recycle+int8 lookup+suffix+recycle+int8+exit:3
int8+window:512 exit:4+window:64 lookup+int8+window:128
none
"""


@pytest.mark.parametrize("name", WRITTEN.split())
def test_names_are_read_and_written(name: str) -> None:
    assert draft_name(parse_draft(name)) == name


def test_what_names_mean() -> None:
    assert parse_draft("lookup + int8") == Cascade(PromptLookup(), LowPrecision(8))
    assert parse_draft("int8+exit:3") == LowPrecision(8, fewer=EarlyExit(3))
    assert parse_draft("recycle") == Recycling()
    assert parse_draft("skip:layers=2-4") == selfspec.drafts.LayerSkip(layers=[2, 3, 4])
    assert parse_draft("suffix+recycle+exit:4") == Cascade(Suffixes(), Recycling(), EarlyExit(4))
    assert Cascade(PromptLookup(), Cascade(Recycling(), EarlyExit(2))) == parse_draft("lookup+recycle+exit:2")


def test_a_plus_belongs_to_a_file_where_no_draft_follows(tmp_path: Path) -> None:
    file = tmp_path / "a+b.json"
    file.write_text(json.dumps({"tokens": [1, 2]}))
    found = parse_draft(f"lookup+exit:2+vocab:{file}")
    assert isinstance(found, Cascade)
    assert isinstance(found.sources[1], ReducedVocabulary)
    assert found.sources[1].tokens == (1, 2)
    assert draft_name(found) == f"lookup+exit:2+vocab:{file}"


def test_every_file_of_the_room_declares_its_drafters() -> None:
    declared = [each for kind in kinds().values() for each in vars(kind)["declared"]]
    public = {getattr(selfspec.drafts, name) for name in selfspec.drafts.__all__}
    drafters = {kind for kind in public if isinstance(kind, type) and issubclass(kind, selfspec.drafts.Drafter)}
    assert {each.name for each in declarations()} == {each.name for each in declared}
    # A prediction belongs to a call: it has no name.
    unnamed = {selfspec.drafts.Drafter, selfspec.drafts.Stateless, Cascade, selfspec.drafts.Predicted}
    assert drafters - set(kinds().values()) == unnamed
    for each in declarations():
        assert each.help
        assert each.name in each.example


def test_the_docs_list_what_is_declared() -> None:
    rows = [f"| `{each.form}` | {each.help} | `{kinds()[each.name].__name__}` |" for each in declarations()]
    assert "\n".join(["|---|---|---|", *rows, ""]) in (ROOT / "docs/api/drafts.md").read_text()
    listed = (ROOT / "docs/drafts.md").read_text()
    unlisted = {each.name for each in declarations() if f"`{each.name}" not in listed}
    assert unlisted == {"vocab", "window"}


def test_classes_are_named_by_their_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bigrams_by_class.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = parse_draft("bigrams_by_class:Bigram:2+exit:1")
    assert isinstance(found, Cascade)
    assert found.sources[0] == type(found.sources[0])(2)  # type: ignore[call-arg]
    with pytest.raises(DraftConfigError, match="has no Trigram"):
        parse_draft("bigrams_by_class:Trigram")
    with pytest.raises(DraftConfigError, match="is no drafter"):
        parse_draft("bigrams_by_class:dataclass")
    model, ids = tiny.llama(), tiny.prompt(6, 2)
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False)
    for name in ("bigrams_by_class:Bigram", "bigrams_by_class:Bigram+exit:2", "exit:2+bigrams_by_class:Bigram"):
        out = selfspec.wrap(model, name, draft_length=3).generate(ids, max_new_tokens=24, do_sample=False)
        assert torch.equal(out.sequences, wanted)
        assert out.stats.drafted


@pytest.mark.tools
def test_a_package_of_ones_own_is_known_everywhere(tmp_path: Path) -> None:
    package, site = tmp_path / "package", tmp_path / "site"
    package.mkdir()
    (package / "bigrams.py").write_text(PACKAGE)
    (package / "pyproject.toml").write_text(
        '[project]\nname = "bigrams"\nversion = "1"\n[tool.setuptools]\npy-modules = ["bigrams"]\n'
        '[project.entry-points."selfspec.drafts"]\nbigram = "bigrams:Bigram"\n'
    )
    install = ["pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site), str(package)]
    subprocess.run([sys.executable, "-m", *install], check=True)

    def run(*words: str) -> Any:
        command = [sys.executable, "-m", "selfspec", *words, "--output", "json"]
        environment = {"PYTHONPATH": f"{site}:{ROOT}", "PATH": "", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
        return json.loads(done.stdout)

    assert "bigram[:N]" in {each["written"] for each in run("drafts")["drafts"]}
    text = run("generate", "demo", "--prompt", "def walk(", "--draft", "bigram:3+exit:4", "--max-new-tokens", "16")
    assert text["stats"]["drafted"]
    short = ("--prompts", "1", "--repeats", "1", "--warm-up", "1", "--max-new-tokens", "16", "--measure", "speed")
    run("bench", "demo", "--draft", "bigram", "--arm", "draft", "--temperature", "0", *short)


INT8 = LowPrecision()
SUBLAYERS = ("attention", "mlp", "layers")

NAMES = {
    # The nearest name is told.
    "exti:4": r"did you mean exit:4\?",
    "exit4": r"did you mean exit:4\?",
    "Exit-4": r"did you mean exit:4\?",
    "int-8": r"did you mean int8\?",
    "INT4": r"did you mean int4\?",
    "look-up": r"did you mean lookup\?",
    "lookups": r"did you mean lookup\?",
    "lokup+exit4": r"did you mean lookup\+exit:4\?",
    "recycling": r"did you mean recycle\?",
    "skipp:layers=3": r"did you mean skip:layers=3\?",
    "heads:FOLDER": r"did you mean head:FOLDER\?",
    # Else how to write it.
    "exit:": "write exit:E, such as exit:4",
    "exit:4+exit:": "write exit:E, such as exit:4",
    "skip:3": "write skip:PART=LAYERS, such as skip:attn=",
    "lookup+exit:x": "write lookup; exit:E",
    "lookup:x": "write lookup",
    "lookup+none": "is not understood",
    "vocab:FILE": r"write draft\+vocab:FILE",
    "lookup+vocab:FILE": r"draft\+vocab:FILE",
    "lookup++int8": "nothing comes before or behind a",
    "lookup+": "nothing comes before or behind a",
    "rm -rf": "write exit:E, head:FOLDER",
    "no_such_module:Class": "write exit:E, head:FOLDER",
    "int3": "int4",
    "": "write exit:E, head:FOLDER",
    **dict.fromkeys(("window:512", "int8+window", "int8+window:", "int8+window:-1"), r"such as int8\+window:512"),
    **dict.fromkeys(("lookup+window:9", "int8+window:٣", f"int8+window:{10**23}"), r"such as int8\+window:512"),
    **dict.fromkeys(("lookup+lookup", "recycle+recycle", "lookup+" * 30 + "exit:2"), "name each draft once"),
    # What is read by its class.
    "exit:1+exit:2": "at most one draft runs a model, and here several do: exit:1 and exit:2",
    "int8+exit:2+skip:layers=1": "at most one draft runs a model",
    "exit:1+recycle+int8": "at most one draft runs a model, and here several do: exit:1 and recycle and int8",
}


@pytest.mark.parametrize(("text", "words"), NAMES.items())
def test_names(text: str, words: str) -> None:
    with pytest.raises(DraftConfigError, match=words):
        parse_draft(text)


ODD = [
    None, 4, "x" * 10_000, "exit:" + "9" * 5000, "zzz", " ", "exit:-1", "exit:2.0", "exit:٣", "exit:2,3", "skip:",
    "skip:attn=", "skip:attn=3;attn=4", "skip:attn=5-3", "skip:attn=0-99999", "skip:layers=0-" + "9" * 5000,
    "skip:norm=3", "skip:" + "attn=1;" * 5000, "exit:2" + "+vocab:x" * 5000, "+vocab:x",
    "none+vocab:x", "skip-file:\0", "head:\0", "exit:2+vocab:\0", "auto+exit:2", "exit:2\0",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD, ids=lambda text: repr(text)[:20])
def test_a_message_is_no_essay(text: Any) -> None:
    with pytest.raises(DraftConfigError) as caught:
        parse_draft(text)
    assert len(str(caught.value).split()) < 45
    assert len(str(caught.value)) < 500


# A call without arguments, and the words of its refusal.
Refused = tuple[Any, str]


def _of_skips() -> list[Refused]:
    made: Any = LayerSkip
    found: list[Refused] = []
    for name in SUBLAYERS:
        found.append((lambda n=name: made(**{n: [2, 1.0]}), f"{name}=.*not an integer layer"))
        found.append((lambda n=name: made(**{n: "12"}), f"{name} must be a list of layer numbers"))
        found += [(lambda n=name: made(**{n: [1, 2, 1]}), rf"{name}=\[1, 2, 1\] lists a layer more than once")]
        for layer in (4, 100, -1, -4):
            words = rf"{name}=.*layer {layer} is out of range.*layers 0\.\.3"
            found.append((lambda n=name, x=layer: made(**{n: [1, x]}).path(4), words))
    for name in SUBLAYERS[:2]:
        words = "layer 1 is skipped more than once; name each sublayer once"
        found.append((lambda n=name: made(layers=[1], **{n: [1]}).path(4), words))
    empty: tuple[Any, ...] = ({}, {"attention": [], "mlp": [], "layers": []})
    found += [(lambda x=x: made(**x).path(4), "empty.*draft=None for plain decoding") for x in empty]
    all_of_it: tuple[Any, ...] = (
        {"layers": range(4)},
        {"attention": range(4), "mlp": range(4)},
        {"layers": [0, 1], "attention": [2, 3], "mlp": [3, 2]},
    )
    return found + [(lambda x=x: made(**x).path(4), "leaves nothing.*skip fewer") for x in all_of_it]


def _values() -> list[Refused]:
    exits: Any = EarlyExit
    of: Any = {kind.__name__: kind for kind in (CacheWindow, ReducedVocabulary)}
    window, _ = of.values()
    found: list[Refused] = _of_skips()
    found += [(lambda x=x: exits(x).path(4), r"must be an integer.*EarlyExit\(layer=4\)") for x in (True, 2.0)]
    found += [
        (lambda x=x: exits(x).path(4), rf"exit layer {x} .*4 layers, choose 1\.\.3") for x in (0, 4, 5, 100, -1, -4)
    ]
    found += [(lambda: exits(1).path(1), "too few")]
    joined: tuple[Any, ...] = ((), (EarlyExit(1),), (EarlyExit(1), "lookup"), (EarlyExit,))
    found += [(lambda k=k, x=x: k(*x), "two or more different drafters") for k in (Cascade,) for x in joined]
    return [
        *found,
        *((lambda x=x: window(INT8, x), "recent is an integer from 1") for x in (0, True, 10**23)),
        (lambda: window(INT8, 8, -1), "sinks is an integer from 0"),
        (lambda: window(window(INT8, 8), 8).path(4), "one window of the cache"),
        (lambda: LowPrecision(layers=[3], fewer=EarlyExit(2)).check(4), "leaves none"),
        (lambda: LowPrecision(fewer=EarlyExit(99)).check(4), "out of range"),
        *((lambda k=k: k(PromptLookup(), 8), "needs a drafter along a path") for k in of.values()),
    ]


@pytest.mark.parametrize(("make", "words"), _values())
def test_values(make: Callable[[], object], words: str) -> None:
    with pytest.raises(DraftConfigError, match=words):
        make()


MODELS: list[tuple[Callable[[], PreTrainedModel], Any, str]] = [
    (tiny.llama, EarlyExit(9), "out of range"),
    (tiny.llama, Cascade(PromptLookup(), EarlyExit(9)), "out of range"),
    (tiny.llama, ReducedVocabulary(EarlyExit(1), (3, 50)), "token 50"),
]


@pytest.mark.parametrize(("build", "draft", "words"), MODELS)
def test_models(build: Callable[[], PreTrainedModel], draft: Any, words: str) -> None:
    with pytest.raises(DraftConfigError, match=words):
        selfspec.wrap(build(), draft)


def test_models_that_make_their_masks_themselves(llama: PreTrainedModel) -> None:
    adapter = replace(find_adapter(llama), ragged="padding")
    with pytest.raises(DraftConfigError, match="draft with int8 alone"):
        selfspec.wrap(llama, CacheWindow(INT8), adapter=adapter)

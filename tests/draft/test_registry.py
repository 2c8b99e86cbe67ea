"""Drafters by name: each declares itself; names are read and written; those of other packages are like ours."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import selfspec
from helpers import tiny
from selfspec.draft import (
    Budget,
    Cascade,
    ChosenExit,
    ChosenSkips,
    Draft,
    EarlyExit,
    LowPrecision,
    PromptLookup,
    Recycling,
    ReducedVocabulary,
    RowsView,
    Stateless,
    Suffixes,
    Union,
    drafter,
)
from selfspec.draft.registry import declarations, draft_name, kinds, parse_draft
from selfspec.errors import DraftConfigError

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


NAMES = """
exit:4 int8 int4 int4+exit:20 lookup+int4+exit:2 int4+skip:layers=2 lookup+int8+skip:attn=3,5;mlp=4
skip:attn=3,5;mlp=4;layers=7,8,9 clasp:2 del:1-3 lookup suffix recycle lookup+recycle lookup+exit:4 exit:4+lookup
recycle+exit:2 lookup+recycle+int8 lookup+suffix+recycle+int8+exit:3 union:suffix+recycle union:lookup+recycle+exit:4
lookup+union:suffix+int8 union:exit:4+suffix experts:1 experts:1+int8 experts:2+exit:3 lookup+experts:1+int8
experts:1+int8+kv4 int8+kv4 exit:4+kv8 lookup+int8+kv4 int8+window:512+kv4 int8+window:512 exit:4+window:64
lookup+int8+window:128 int8+top:512 exit:4+top:256 lookup+int8+top:128 int8+kv4+top:512 none
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_names_are_read_and_written(name: str) -> None:
    assert draft_name(parse_draft(name)) == name


def test_what_names_mean() -> None:
    assert parse_draft("lookup + int8") == Cascade(PromptLookup(), LowPrecision(8))
    assert parse_draft("int8+exit:3") == LowPrecision(8, exit=3)
    assert parse_draft("recycle") == Recycling()
    assert parse_draft("clasp:2") == ChosenSkips(2)
    assert parse_draft("del:1-3") == ChosenExit(1, 3)
    assert parse_draft("skip:layers=2-4") == selfspec.drafts.LayerSkip(layers=[2, 3, 4])
    assert parse_draft("union:suffix+recycle+exit:4") == Union(Suffixes(), Recycling(), EarlyExit(4))
    assert parse_draft("lookup+union:suffix+exit:4") == Cascade(PromptLookup(), Union(Suffixes(), EarlyExit(4)))
    assert Cascade(PromptLookup(), Cascade(Recycling(), EarlyExit(2))) == parse_draft("lookup+recycle+exit:2")


def test_what_would_be_read_as_something_else_has_no_name() -> None:
    drafter = Cascade(Union(Suffixes(), Recycling()), EarlyExit(3))
    assert drafter.spelling is None
    assert draft_name(drafter) == repr(drafter)


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
    assert drafters - set(kinds().values()) == {selfspec.drafts.Drafter, selfspec.drafts.Stateless, Cascade}
    for each in declarations():
        assert each.help
        assert each.name in each.example


def test_the_docs_list_what_is_declared() -> None:
    rows = [f"| `{each.form}` | {each.help} | `{kinds()[each.name].__name__}` |" for each in declarations()]
    assert "\n".join(["|---|---|---|", *rows, ""]) in (ROOT / "docs/api/drafts.md").read_text()
    readme = (ROOT / "README.md").read_text()
    listed = readme[readme.index("## Drafts") : readme.index("`auto` | `selfspec calibrate")]
    unlisted = {each.name for each in declarations() if f"`{each.name}" not in listed}
    assert unlisted == {"vocab", "union", "window", "top", "kv4", "kv8"}


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

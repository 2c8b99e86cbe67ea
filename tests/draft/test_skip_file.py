"""Skip sets on disk: bound to the weights they were found for."""

from __future__ import annotations

from pathlib import Path

import pytest

import selfspec
from helpers import tiny
from selfspec.draft.layer_skip import SkipFile, write_skip_file
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.errors import DraftConfigError
from selfspec.model.fingerprint import fingerprint


@pytest.fixture
def file(tmp_path: Path) -> Path:
    skip = selfspec.drafts.LayerSkip(attention=[1, 2], mlp=[3])
    write_skip_file(skip, fingerprint(tiny.llama()), tmp_path / "found.json", {"alpha": 0.5})
    return tmp_path / "found.json"


def test_it_drafts_as_the_set_itself_does(file: Path) -> None:
    drafter = parse_draft(f"skip-file:{file}")
    assert isinstance(drafter, SkipFile)
    assert draft_name(drafter) == f"skip-file:{file}"
    model, prompt = tiny.llama(), tiny.prompt(5)
    found = selfspec.wrap(model, drafter, draft_length=3).generate(prompt, max_new_tokens=12, do_sample=False)
    itself = selfspec.wrap(model, drafter.skip, draft_length=3).generate(prompt, max_new_tokens=12, do_sample=False)
    assert found.sequences.tolist() == itself.sequences.tolist()
    assert found.stats.accepted_per_depth == itself.stats.accepted_per_depth


def test_another_model_is_refused(file: Path) -> None:
    with pytest.raises(DraftConfigError, match="is of another base"):
        selfspec.wrap(tiny.llama(seed=1), SkipFile.from_file(file))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "base": "x"}', '{"format": 2}'])
def test_what_is_no_skip_set_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DraftConfigError, match="selfspec search wrote"):
        SkipFile.from_file(tmp_path / "x.json")
    with pytest.raises(DraftConfigError, match="cannot be read"):
        SkipFile.from_file(tmp_path / "none.json")

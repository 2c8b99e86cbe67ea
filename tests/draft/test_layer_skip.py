"""Skip sets: what they leave out, and what refusing the impossible ones says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import selfspec
from helpers import tiny
from selfspec.draft.layer_skip import LayerSkip, SkipFile, write_skip_file
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.errors import DraftConfigError
from selfspec.model.identity import fingerprint
from selfspec.model.layer_path import Part, Sublayer, sublayers


def _skipped(draft: LayerSkip, depth: int = 4) -> list[tuple[int, Part]]:
    path = draft.path(depth)
    return [(s.layer, s.part) for s in sublayers(depth) if not path.runs(s)]


def test_it_leaves_out_what_it_names() -> None:
    attention, mlp = Part.ATTENTION, Part.MLP
    assert _skipped(LayerSkip(attention=[1])) == [(1, attention)]
    assert _skipped(LayerSkip(mlp=[0, 3])) == [(0, mlp), (3, mlp)]
    assert _skipped(LayerSkip(layers=[2])) == [(2, attention), (2, mlp)]
    assert _skipped(LayerSkip(attention=[3, 0], mlp=[1], layers=[2])) == [
        (0, attention),
        (1, mlp),
        (2, attention),
        (2, mlp),
        (3, attention),
    ]


@pytest.mark.parametrize("numbers", [(1, 2), range(1, 3), iter((1, 2))])
def test_a_set_is_a_value_of_any_layer_numbers(numbers: Any) -> None:
    one, other = LayerSkip(attention=[1, 2], mlp=[2]), LayerSkip(mlp=(2,), attention=numbers)
    assert one == other
    assert hash(one) == hash(other)
    assert one != LayerSkip(attention=[1, 2])
    assert LayerSkip(attention=[1], mlp=[1]).path(4) == LayerSkip(layers=[1]).path(4)
    with pytest.raises(AttributeError):
        one.layers = (1,)  # type: ignore[misc]


def test_the_first_sublayer_has_nothing_before_it() -> None:
    assert LayerSkip(attention=[0]).path(4).resume_point is None
    assert LayerSkip(mlp=[0]).path(4).resume_point == Sublayer(0, Part.MLP)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    skip = LayerSkip(attention=[1, 2], mlp=[3])
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

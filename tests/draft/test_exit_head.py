"""Exit heads: exact like any drafter, bound to their base, and refused where they are damaged or foreign."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import selfspec
from helpers import tiny
from selfspec.draft import EarlyExit, ExitHead
from selfspec.draft.early_exit import CONFIG, WEIGHTS
from selfspec.errors import ExitHeadError
from selfspec.model.identity import fingerprint
from selfspec.tools.train.exit_heads import ExitHeads


def _side_car(folder: Path, model: torch.nn.Module, tokens: torch.Tensor | None = None) -> Path:
    """Heads of random weights for a tiny model, exits 1 and 2."""
    torch.manual_seed(1)
    heads = ExitHeads(32, 16, (1, 2), tokens)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    folder.mkdir()
    heads.save(folder, torch.float32, fingerprint(model), 2, {"alpha_2": 0.5})
    return folder


def test_the_adapter_is_what_drafts(tmp_path: Path) -> None:
    """A head that changes nothing drafts as the plain exit does; a random one does not."""
    model = tiny.llama()
    ids = tiny.prompt(7)
    heads = ExitHeads(32, 16, (2,))
    (tmp_path / "new").mkdir()
    heads.save(tmp_path / "new", torch.float32, fingerprint(model), 2, {})
    drafters = (
        EarlyExit(2),
        ExitHead.from_pretrained(tmp_path / "new"),
        ExitHead.from_pretrained(_side_car(tmp_path / "random", model)),
    )
    drafts = [
        [
            row.rows[0].draft
            for row in selfspec.wrap(model, draft=drafter, draft_length=4).stream(
                ids, max_new_tokens=20, do_sample=False
            )
        ]
        for drafter in drafters
    ]
    assert drafts[0] == drafts[1] != drafts[2]


def test_the_default_exit_is_the_one_its_training_chose(tmp_path: Path) -> None:
    drafter = ExitHead.from_pretrained(_side_car(tmp_path / "heads", tiny.llama()))
    assert drafter.layer == 2
    assert repr(drafter) == f"head:{tmp_path / 'heads'}@2"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_is_known_in_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny.llama(dtype=torch.float32)
    drafter = ExitHead.from_pretrained(_side_car(tmp_path / "heads", model))
    spec = selfspec.wrap(model.to(dtype), draft=drafter, draft_length=4)
    assert spec.generate(tiny.prompt(4), max_new_tokens=6, do_sample=False).lengths == (6,)
    # The drafter may serve other models at the same time.
    adapter = drafter.draft_head.adapter
    assert adapter is not None
    assert {weight.dtype for weight in adapter.parameters()} == {torch.float32}


def test_another_base_is_refused(tmp_path: Path) -> None:
    drafter = ExitHead.from_pretrained(_side_car(tmp_path / "heads", tiny.llama()))
    with pytest.raises(ExitHeadError, match="another base"):
        selfspec.wrap(tiny.llama(seed=1), draft=drafter, draft_length=4)
    with pytest.raises(ExitHeadError, match="another base"):
        selfspec.wrap(tiny.mistral(), draft=drafter, draft_length=4)


@pytest.mark.parametrize("file", [WEIGHTS, CONFIG])
def test_what_is_missing_is_named(tmp_path: Path, file: str) -> None:
    folder = _side_car(tmp_path / "heads", tiny.llama())
    (folder / file).unlink()
    with pytest.raises(ExitHeadError, match=re.escape(file)):
        ExitHead.from_pretrained(folder)


@pytest.mark.parametrize(
    "change", [{"format": 1}, {"exits": None}, {"rank": 0}, {"rank": 17}, {"hidden": 8}, {"base": 3}, {"default": 3}]
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    folder = _side_car(tmp_path / "heads", tiny.llama())
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **change}))
    with pytest.raises(ExitHeadError):
        ExitHead.from_pretrained(folder)


def test_an_exit_it_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = _side_car(tmp_path / "heads", tiny.llama())
    with pytest.raises(ExitHeadError, match="it has 1, 2"):
        ExitHead.from_pretrained(folder, layer=3)

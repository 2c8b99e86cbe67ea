"""docs/your_own_adapter.md: its code runs as printed on the example's model, and fails for a wrong declaration."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch

import selfspec
from helpers.contract import CHECKS, Subject
from helpers.snippets import ROOT, snippets

_RIGHT = "mlp_returns=2)"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """What the example, which asserts that its drafts are right and accepted, leaves behind: its model."""
    return runpy.run_path(str(ROOT / "examples" / "your_own_adapter.py"))


def _run(example: dict[str, Any], declared: str, blocks: slice) -> None:
    names = {"selfspec": selfspec, "torch": torch, "model": example["model"], "Subject": Subject, "CHECKS": CHECKS}
    page = snippets("docs/your_own_adapter.md", "python")
    assert _RIGHT in page[0]
    exec(page[0].replace(_RIGHT, declared), names)
    for block in page[blocks]:
        exec(block, names)


@pytest.mark.contract
def test_the_page_runs_as_printed(example: dict[str, Any]) -> None:
    _run(example, _RIGHT, slice(1, None))


@pytest.mark.parametrize("wrong", ['without_mlp="input"', 'without_mlp="residual"', 'without_attention="input"'])
def test_a_wrong_declaration_fails_the_check_of_the_draft(example: dict[str, Any], wrong: str) -> None:
    with pytest.raises(AssertionError, match="is not the pruned model"):
        _run(example, f"mlp_returns=2, {wrong})", slice(1, 2))


def test_texts_alone_do_not_tell(example: dict[str, Any]) -> None:
    """Why the page looks at the draft: with this declaration every text is right."""
    _run(example, 'mlp_returns=2, without_mlp="input")', slice(2, 3))

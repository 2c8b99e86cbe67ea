"""The classes of the checkpoints that people download: greedy text is the model's own, or refused as the table says."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import transformers
from transformers import CONFIG_MAPPING

from helpers.checkpoints import MULTIMODAL, TEXT, line, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
# A plain one, a head inside, positions in sections, states, an adapter of sight into every layer, and refusals.
QUICK = ("llama4", "llava", "qwen2_vl", "qwen3_5", "qwen3_vl", "mllama", "paligemma")


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.contract) for name in (*TEXT, *MULTIMODAL)],
)
def test_the_line_of_the_table_holds(model_type: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = line(model_type)
    assert "DIFFERS" not in found
    if f"`transformers` {transformers.__version__}:" in page:
        assert found in page.splitlines()


def test_the_page_is_what_its_lines_make() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if f"`transformers` {transformers.__version__}:" not in page:
        pytest.skip("the table is of another transformers")
    lines = [each for each in page.splitlines() if each.startswith("| ") and not each.startswith("| type")]
    assert [each.split(" ")[1] for each in lines] == [*TEXT, *MULTIMODAL]
    assert page == table(lines)

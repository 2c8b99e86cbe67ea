"""Two checkpoints of one name and shape in one folder: each gets its own figures, and those that were there stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import selfspec
from helpers.running import Invoke
from helpers.stories import checkpoint_folder
from selfspec.control.profile import VARIABLE, Setting, find_profile
from selfspec.tools.lab.report import MARKDOWN
from selfspec.tools.lab.runs import FILE, Origin

pandas = pytest.importorskip("pandas")

# Leaves out what the two differ in.
_DRAFT = "skip:mlp=3"
_PROMPTS = torch.arange(3, 15).view(2, 6)
Way = Callable[[Invoke, str, Path], Any]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of one name. The second model is the first one fine-tuned a little, in one layer."""
    places = [tmp_path_factory.mktemp("of") / "model" for _ in range(2)]
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    for place in places:
        shutil.copytree(checkpoint_folder(), place)
        model.save_pretrained(place)
        with torch.no_grad():
            model.model.layers[3].mlp.down_proj.weight += 0.5 * torch.randn(
                model.model.layers[3].mlp.down_proj.weight.shape, generator=torch.Generator().manual_seed(0)
            )
    return [str(place) for place in places]


def _said(invoke: Invoke, *words: str) -> Any:
    ending = invoke(*words, "--threads", "1", "--device", "cpu", "--output", "json")
    assert ending.status == 0, ending.stderr
    return json.loads(ending.stdout)


def _bench(invoke: Invoke, model: str, folder: Path) -> Any:
    words = ("--measure", "acceptance", "--arm", "draft", "--draft", _DRAFT, "--draft-length", "2", "--prompts", "2")
    sizes = ("--temperature", "0", "--max-new-tokens", "16", "--context", "12")
    found = _said(invoke, "bench", model, *words, *sizes, "--to", str(folder))
    return [arm["mean_accepted_length"] for cell in found["cells"] for arm in cell["arms"]]


_STUDY = ("--texts", "2", "--max-new-tokens", "12", "--prompt-tokens", "12", "--pricing", "weights")


def _search(invoke: Invoke, model: str, folder: Path) -> Any:
    words = ("--temperature", "0", "--evaluations", "3", "--sublayers", "2", "--to", str(folder / "found.json"))
    found = _said(invoke, "search", model, *words, "--keep", str(folder), *_STUDY)
    # All that the report is made of.
    table = pandas.read_parquet(folder / "points.parquet")
    return [(row["draft"], row["alpha"]) for row in found["scores"]], sorted(table["alpha"].tolist())


def _calibrate(invoke: Invoke, model: str, folder: Path) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    if find_profile(Setting.of(loaded)) is None:
        prompts = folder / "prompts.txt"
        folder.mkdir(exist_ok=True)
        prompts.write_text("Once upon a time")
        sizes = ("--max-new-tokens", "12", "--repeats", "1", "--longest-draft", "1", "--nodes", "0")
        _said(invoke, "calibrate", model, "--draft", "exit:4", *sizes, "--prompt-file", str(prompts))
    profile = find_profile(Setting.of(loaded))
    assert profile is not None
    return profile.report["greedy"]["acceptance"]["exit:4"]


def _ablate_in_memory(_: Invoke, model: str, folder: Path) -> Any:
    quick: dict[str, Any] = {"temperatures": [0], "max_new_tokens": 16, "confirm": 0, "pricing": "weights"}
    found = selfspec.ablate(AutoModelForCausalLM.from_pretrained(model), _PROMPTS, drafts=_DRAFT, to=folder, **quick)
    return found["alpha"].tolist()


@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.tools) for way in (_bench, _search, _calibrate)), _ablate_in_memory]
)
def test_each_gets_its_own_figures(
    way: Way, two: list[str], invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures(model: str, folder: str) -> Any:
        monkeypatch.setenv(VARIABLE, str(tmp_path / folder))
        return way(invoke, model, tmp_path / folder)

    first, others_own = figures(two[0], "both"), figures(two[1], "alone")
    assert first != others_own
    assert figures(two[1], "both") == others_own
    kept = tmp_path / "both" / FILE
    known = kept.read_text() if kept.exists() else ""
    assert figures(two[0], "both") == first
    # Nothing is measured again.
    assert known == (kept.read_text() if kept.exists() else "")


@pytest.mark.tools
def test_a_report_says_them_apart(two: list[str], invoke: Invoke, tmp_path: Path) -> None:
    for model in two:
        _bench(invoke, model, tmp_path)
    bases = [Origin.of(AutoModelForCausalLM.from_pretrained(model)).short for model in two]
    page, texts = (tmp_path / MARKDOWN).read_text(), pandas.read_parquet(tmp_path / "texts.parquet")
    assert all(f"| model {base} |" in page for base in bases)
    assert set(texts["weights"]) == set(bases)
    study = _said(
        invoke, "ablate", "--model", two[0], "--model", two[1], "--draft", _DRAFT, "--to", str(tmp_path), *_STUDY
    )
    assert {(row["model"], row["weights"]) for row in study["best"]} == {("model", base) for base in bases}
    assert len(study["best"]) == 2 * 2
    assert all(f"model {base}, demo, greedy" in (tmp_path / MARKDOWN).read_text() for base in bases)

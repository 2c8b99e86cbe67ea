"""The kit for a device, from stage to stage on the stand-in for one: of each stage a case or two, in miniature."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from device import command
from device.stage import Bench, Case, Stage
from device.stages import STAGES

from helpers.accelerator.device import Accelerator

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("verbosity_as_before")]

STORIES = str(Path(__file__).resolve().parents[1] / "models" / "stories260K")
# All others take minutes here. The two stages of costs differ in the shape alone.
CHOSEN = {
    "first": ["graphs, exit"],
    "pieces": ["products, 8 bits", "products, 4 bits", "attention of blocks", "attention over new lengths"],
    "waits": ["graphs, exit:2, 3 tokens, greedy"],
    "costs-1B": ["graphs, exit:1, 16 tokens"],
}


def chosen(stage: Stage, bench: Bench) -> Iterator[Case]:
    return (case for case in stage.cases(bench) if case.name in CHOSEN[stage.name])


def test_the_kit_runs_from_stage_to_stage(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = tuple(replace(stage, cases=partial(chosen, stage)) for stage in STAGES)
    monkeypatch.setattr(command, "STAGES", stages)
    words = [*CHOSEN, "--device", str(accelerator.device), "--miniature", "--model", STORIES, "--to", str(tmp_path)]
    assert command.main(words) == 0
    for stage, names in CHOSEN.items():
        cases = json.loads((tmp_path / f"{stage}.json").read_text())["cases"]
        assert list(cases) == names
        # It lacks what is CUDA's alone, and no case as a whole.
        assert [case["reason"] for case in cases.values() if case["reason"] is not None] == []
        assert {case["environment"]["device"] for case in cases.values()} == {"stand-in"}
    assert "**failed**" not in (tmp_path / "summary.md").read_text()

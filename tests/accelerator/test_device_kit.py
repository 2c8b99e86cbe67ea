"""What is to run on a device, whole and in miniature, on the stand-in for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from device.command import main
from device.stages import STAGES

from helpers.accelerator.device import Accelerator

pytestmark = pytest.mark.accelerator

STORIES = str(Path(__file__).resolve().parents[1] / "models" / "stories260K")


def test_the_kit_runs_whole(accelerator: Accelerator, tmp_path: Path) -> None:
    words = ["--device", str(accelerator.device), "--miniature", "--model", STORIES, "--to", str(tmp_path)]
    assert main(words) == 0
    for stage in STAGES:
        cases = json.loads((tmp_path / f"{stage.name}.json").read_text())["cases"]
        assert cases
        # A stand-in lacks what is CUDA's alone, and no case as a whole.
        assert [case["reason"] for case in cases.values() if case["reason"] is not None] == []
        assert {case["environment"]["device"] for case in cases.values()} == {"stand-in"}
    assert "**failed**" not in (tmp_path / "summary.md").read_text()

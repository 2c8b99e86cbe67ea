"""Several processes train as one and write one result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.stories import checkpoint_folder


@pytest.mark.tools
def test_two_processes_write_one_result(tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a dog who liked to play with a big red ball in the park. " * 60)
    to = tmp_path / "heads"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "selfspec", "train", "exit", str(checkpoint_folder()), "--text", str(text), "--to", str(to)]
    sizes = ["--steps", "4", "--batch", "2", "--length", "16", "--exits", "2", "--rank", "8", "--own-texts", "40"]
    ended = subprocess.run(
        [*launch, *words, *sizes, "--beginning", "4", "--device", "cpu", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    # The first process alone says what came of it.
    assert ended.stdout.count("Before and after") == 1
    assert ended.stderr.count("step 0/4") == 1
    assert sorted(file.name for file in to.iterdir()) == [
        "curves.png",
        "curves.svg",
        "exit_head.json",
        "exit_head.safetensors",
        "training.json",
    ]
    assert json.loads((to / "training.json").read_text())["log"][-1]["step"] == 4

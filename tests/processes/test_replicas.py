"""Two replicas by Ray Serve, one killed under load: every request is answered, each as the model answers alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import selfspec
from helpers.snippets import ROOT
from helpers.stories import checkpoint_folder
from selfspec.model.checkpoint import load_checkpoint
from selfspec.serve.app import Replicas

_WORKER = ROOT / "tests" / "helpers" / "replica_worker.py"


@pytest.mark.processes
def test_a_killed_replica_loses_no_request_that_is_repeated(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra ray")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(_WORKER), str(checkpoint_folder()), str(tmp_path / "answer.json")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    found: dict[str, Any] = json.loads((tmp_path / "answer.json").read_text())
    (killed,) = found["killed"]
    assert found["pids"].count(killed) >= 1
    assert len(set(found["pids"])) >= 2
    assert killed not in found["later"]
    assert len(found["later"]) == 2
    spec = selfspec.wrap(load_checkpoint(str(checkpoint_folder()), "float32", "cpu").model)
    for number in range(120):
        prompt = [1, 3 + number % 40, 50 + number % 7]
        out = spec.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert found["answers"][str(number)] == out.sequences[0].tolist()


@pytest.mark.parametrize("wrong", [{"least": 0}, {"least": 3}, {"requests": 0}, {"most_requests": 4}, {"most": 2.5}])
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="least <= most"):
        Replicas(dict, **wrong)


def test_what_is_missing_is_named() -> None:
    if importlib.util.find_spec("ray") is not None:
        pytest.skip("Ray is installed")
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match=r"selfspec\[ray\]"):
        Replicas(dict).bound()

"""Several processes: a model that is split over two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from helpers import shrunken, split_worker, tiny
from helpers.snippets import ROOT

# A program's own folder is not on its path: helpers/tokenizers.py would be taken for the library of that name.
_ALONE = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}


KINDS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "mixtral"]


def _model(kind: str) -> Any:
    return tiny.BUILDERS[kind]() if kind in tiny.BUILDERS else shrunken.shrunken(kind)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each kind of model gave, on rank 0 and on rank 1."""
    folder = tmp_path_factory.mktemp("split")
    for kind in KINDS:
        _model(kind).save_pretrained(folder / kind)
    job = {"folders": {kind: str(folder / kind) for kind in KINDS}, "refused": "llama"}
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += [split_worker.__file__, str(folder / "job.json"), str(folder / "answer.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **_ALONE}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return found


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_process(kind: str, split: dict[str, Any]) -> None:
    first, second = split[kind]
    assert first["split"] < 0.8
    # What is refused names what this rank was given.
    ranks = [{name: value for name, value in answer.items() if name != "refusals"} for answer in (first, second)]
    assert ranks[0] == ranks[1]
    assert first["verified"] is True
    expected = split_worker.answers(_model(kind))
    assert {name: first[name] for name in expected} == expected


@pytest.mark.processes
def test_what_ranks_could_do_differently_is_refused(split: dict[str, Any]) -> None:
    for answer in split["llama"]:
        said = answer["refusals"]
        assert "max_time" in said["by_clock"]
        assert "differ in how they draft" in said["differently"]
        assert "reduced vocabulary" in said["few_rows"]
        assert "one process" in said["engine"]
        assert "one process" in said["export"]

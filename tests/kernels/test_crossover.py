"""Up to how many rows the kernels multiply: by a table, or by a trial that is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from selfspec.kernels import crossover as module
from selfspec.kernels import native
from selfspec.kernels.crossover import Crossover, crossover

pytestmark = pytest.mark.kernels


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the trial of an unknown processor is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(module, "device_name", lambda _: "unheard of")
    monkeypatch.setattr(native.library(), "variant", "v4")
    crossover.cache_clear()
    yield tmp_path
    crossover.cache_clear()


def test_a_processor_of_the_table_needs_no_trial(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_name", lambda _: "AMD EPYC 9B45")
    monkeypatch.setattr(module, "tried", lambda: pytest.fail("tried"))
    found = crossover()
    assert found.rows(torch.bfloat16, 64) < found.rows(torch.float32, 4096) <= found.rows(torch.float32, 64)
    assert found.rows(torch.float16, 4096) == native.MOST_ROWS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_avx512_kernels_multiply_all_rows_in_16_bits(
    kept: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.library(), "variant", "v3")
    assert crossover().rows(torch.float32, 64) < crossover().rows(dtype, 64) == native.MOST_ROWS


def test_a_trial_is_kept_and_decides_in_later_processes(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert crossover().rows(torch.float32, 64) >= 10
    (file,) = kept.iterdir()
    others = Crossover(32, 64, 16, 128)
    file.write_text(json.dumps({"unheard of": [32, 64, 16, 128]}))
    monkeypatch.setattr(module, "tried", lambda: pytest.fail("tried again"))
    crossover.cache_clear()
    assert crossover() == others


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"unheard of": [1]}', '{"unheard of": [0, 1, 1, true]}', "[]"])
def test_what_a_damaged_file_says_is_tried_again(kept: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (kept / "crossover-v4.json").write_text(text)
    monkeypatch.setattr(module, "tried", lambda: Crossover(512, 256, 32, 1024))
    assert crossover() == Crossover(512, 256, 32, 1024)
    assert json.loads((kept / "crossover-v4.json").read_text()) == {"unheard of": [512, 256, 32, 1024]}

"""Which kernels run: the library for a processor, for as many rows as a trial says, where they agree with torch."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.snapshot import kernels
from selfspec.errors import UnsupportedOptionError
from selfspec.kernels import crossover as module
from selfspec.kernels import native
from selfspec.kernels.crossover import Crossover, crossover
from selfspec.kernels.trial import Trial
from selfspec.runtime.few_rows import for_few_rows
from selfspec.runtime.model_state import run_watched

_BUILT = native._FOLDER


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    native.variants.cache_clear()
    with kernels(None):
        yield tmp_path
    native.variants.cache_clear()


def test_without_them_torch_multiplies(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "few_rows", lambda *_: pytest.fail("not chosen"))
    for_few_rows(llama)(tiny.prompt(5))


@pytest.mark.kernels
def test_states_elsewhere_reach_no_kernel() -> None:
    elsewhere, weight = torch.ones(2, 4, device="meta"), torch.ones(3, 4)
    assert native.few_rows(elsewhere, weight, None).shape == (2, 3)
    assert native.rms_norm(elsewhere, torch.ones(4), 1e-6).device.type == "meta"


def test_why_none_run_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    without = "selfspec was installed without a C++ compiler; install one (g++ or clang++), then selfspec again"
    assert native.absence() == without
    with kernels("none"):
        assert native.absence() == "SELFSPEC_KERNELS=none; unset it to run them"
    with pytest.raises(UnsupportedOptionError, match="no CPU kernels here: selfspec was installed without"):
        native.run_one(native.Kind.END, (), 1)
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    assert "on AMD64; on Windows, install selfspec in WSL" in str(native.absence())


@pytest.mark.parametrize(("chosen", "warnings"), [(None, 1), ("none", 0)])
def test_the_first_wrapper_warns_once_where_nobody_chose_to_do_without(
    folder: Path, llama: PreTrainedModel, chosen: str | None, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    native.warn_of_absence.cache_clear()
    with kernels(chosen):
        for _ in range(2):
            selfspec.wrap(llama).generate(tiny.prompt(3), max_new_tokens=1)
    assert caplog.text.count("without its CPU kernels") == warnings
    native.warn_of_absence.cache_clear()


def test_a_name_that_none_has_is_refused(folder: Path) -> None:
    with kernels("v9"), pytest.raises(UnsupportedOptionError, match="v9: no such kernels run here; choose one of none"):
        native.available()


def test_a_broken_file_is_refused(folder: Path) -> None:
    (folder / "v3.so").write_bytes(b"no library")
    with pytest.raises(UnsupportedOptionError, match=r"cannot be loaded .*v3.so.*install selfspec again"):
        native.available()


@pytest.mark.kernels
def test_a_library_of_other_sources_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An install has the kernels of its own processor alone.
    built = max(_BUILT.glob("*.so"))
    shutil.copy(built, folder / "v3.so")
    monkeypatch.setattr(native, "_sources", lambda: "others")
    with pytest.raises(UnsupportedOptionError, match=r"v3.* are older than their sources: install selfspec again"):
        native.available()


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


@pytest.mark.kernels
def test_a_processor_of_the_table_needs_no_trial(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_name", lambda _: "AMD EPYC 9B45")
    monkeypatch.setattr(module, "tried", lambda: pytest.fail("tried"))
    found = crossover()
    assert found.rows(torch.bfloat16, 64) < found.rows(torch.float32, 4096) <= found.rows(torch.float32, 64)
    assert found.rows(torch.float16, 4096) == native.MOST_ROWS


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_avx512_kernels_multiply_all_rows_in_16_bits(
    kept: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.library(), "variant", "v3")
    assert crossover().rows(torch.float32, 64) < crossover().rows(dtype, 64) == native.MOST_ROWS


@pytest.mark.kernels
def test_a_trial_is_kept_and_decides_in_later_processes(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert crossover().rows(torch.float32, 64) >= 10
    (file,) = kept.iterdir()
    others = Crossover(32, 64, 16, 128)
    file.write_text(json.dumps({"unheard of": [32, 64, 16, 128]}))
    monkeypatch.setattr(module, "tried", lambda: pytest.fail("tried again"))
    crossover.cache_clear()
    assert crossover() == others


@pytest.mark.kernels
@pytest.mark.parametrize("text", ["no JSON", "{}", '{"unheard of": [1]}', '{"unheard of": [0, 1, 1, true]}', "[]"])
def test_what_a_damaged_file_says_is_tried_again(kept: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (kept / "crossover-v4.json").write_text(text)
    monkeypatch.setattr(module, "tried", lambda: Crossover(512, 256, 32, 1024))
    assert crossover() == Crossover(512, 256, 32, 1024)
    assert json.loads((kept / "crossover-v4.json").read_text()) == {"unheard of": [512, 256, 32, 1024]}


RIGHT = torch.tensor([1.0, -4.0])


class Calls:
    def __init__(self, kernel: Tensor, stock: Tensor = RIGHT) -> None:
        self.given = {"kernel": kernel, "stock": stock}
        self.counts = dict.fromkeys(self.given, 0)

    def run(self, trial: Trial, kind: str = "any") -> Tensor:
        return trial.run(kind, lambda: self._path("kernel"), lambda: self._path("stock"), most=1e-3)

    def _path(self, name: str) -> Tensor:
        self.counts[name] += 1
        if not len(self.given[name]):
            raise RuntimeError("no such instruction")
        return self.given[name]


def test_a_kernel_that_gives_what_torch_gives_runs_alone_after_its_trial(caplog: pytest.LogCaptureFixture) -> None:
    rounded, trial = Calls(RIGHT + 1e-4), Trial("something")
    for _ in range(3):
        assert rounded.run(trial) is rounded.given["kernel"]
    assert rounded.counts == {"kernel": 4, "stock": 1}
    rounded.run(trial, "another kind")
    assert rounded.counts == {"kernel": 6, "stock": 2}
    assert not caplog.records


@pytest.mark.parametrize("wrong", [RIGHT + 0.1, RIGHT * torch.nan, torch.zeros(0)], ids=["off", "nan", "raises"])
def test_a_kernel_that_does_not_is_not_run_again(wrong: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    calls, trial = Calls(wrong), Trial("something")
    for _ in range(3):
        assert calls.run(trial) is RIGHT
    assert calls.counts == {"kernel": 1, "stock": 3}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "something in Triton" in caplog.text


def test_numbers_that_are_not_finite_decide_nothing(caplog: pytest.LogCaptureFixture) -> None:
    trial, broken = Trial("something"), Calls(RIGHT * torch.nan, RIGHT * torch.nan)
    assert broken.run(trial) is broken.given["stock"]
    calls = Calls(RIGHT.clone())
    assert calls.run(trial) is calls.given["kernel"]
    assert not caplog.records


def test_a_pass_that_may_read_no_values_may_try_a_kernel() -> None:
    calls = Calls(RIGHT.clone())
    assert run_watched(lambda: calls.run(Trial("something"))) is calls.given["kernel"]

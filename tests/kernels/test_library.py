"""Which library of the CPU kernels runs, and what is said where none does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from helpers.own_kernels import kernels
from selfspec.errors import UnsupportedOptionError
from selfspec.kernels import native
from selfspec.runtime.few_rows import for_few_rows

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


def test_why_none_run_is_said(folder: Path) -> None:
    assert native.absence() == (
        "selfspec was installed without a C++ compiler; install one (g++ or clang++), then selfspec again"
    )
    with kernels("none"):
        assert native.absence() == "SELFSPEC_KERNELS=none"
    with pytest.raises(UnsupportedOptionError, match="no CPU kernels here: selfspec was installed without"):
        native.run_one(native.Kind.END, (), 1)


def test_a_name_that_none_has_is_refused(folder: Path) -> None:
    with kernels("v9"), pytest.raises(UnsupportedOptionError, match="v9: no such kernels run here; choose one of none"):
        native.available()


def test_a_broken_file_is_refused(folder: Path) -> None:
    (folder / "v3.so").write_bytes(b"no library")
    with pytest.raises(UnsupportedOptionError, match=r"cannot be loaded .*v3.so.*install selfspec again"):
        native.available()


@pytest.mark.kernels
def test_a_library_of_other_sources_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(_BUILT / "v3.so", folder / "v3.so")
    monkeypatch.setattr(native, "_sources", lambda: "others")
    with pytest.raises(UnsupportedOptionError, match=r"v3.* are older than their sources: install selfspec again"):
        native.available()

"""Weights are found in safetensors files and read directly, at any offset, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from selfspec.errors import CheckpointError
from selfspec.placement.weight_source import ReadBuffer, WeightFiles, stored_weights


@settings(max_examples=20, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    odd=st.booleans(),
)
def test_weights_are_read_as_they_were_saved(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype, odd: bool
) -> None:
    file = tmp_path_factory.mktemp("files") / "model.safetensors"
    saved = {f"w{number}": torch.randn(shape, dtype=torch.float64).to(dtype) for number, shape in enumerate(shapes)}
    # Header lengths move the weights to other offsets.
    save_file(saved, file, {"note": "x" * (3 if odd else 8)})
    found = stored_weights([file])
    assert set(found) == set(saved)
    files, buffer = WeightFiles(), ReadBuffer(max(weight.nbytes for weight in found.values()))
    for name, weight in found.items():
        assert torch.equal(buffer.read(files, weight), saved[name])


def test_a_weight_of_more_than_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.placement.weight_source._MOST_AT_ONCE", 4096)
    weight = torch.randn(5000)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    found = stored_weights([tmp_path / "model.safetensors"])["w"]
    assert torch.equal(ReadBuffer(found.nbytes).read(WeightFiles(), found), weight)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(10_000, dtype=torch.int8)}, file)
    return file


def test_truncated_files_are_refused_before_anything_is_read(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"truncated.*copy or download it again"):
        stored_weights([file])


def test_numbers_that_torch_has_not_are_refused(file: Path) -> None:
    assert stored_weights([file])["w"].dtype == torch.int8
    file.write_bytes(file.read_bytes().replace(b'"I8"', b'"I9"'))
    with pytest.raises(CheckpointError, match=r"w in .* is I9"):
        stored_weights([file])

"""On the stand-in for an accelerator: weights in planes, and weights streamed to it, by the kernels of a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.accelerator.device import NAME, Accelerator, present
from helpers.captures import ticking
from helpers.copies import plan
from selfspec.device import backend
from selfspec.formats import planes
from selfspec.formats.packed import Packed, PackedWeight
from selfspec.formats.planes import Planes, PlanesLinear, UpperLinear
from selfspec.formats.rounding import Kernels, kernels_of
from selfspec.placement.drafts import placement_of
from selfspec.placement.place import place
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromHost
from selfspec.placement.weight_stream import DeviceCopies
from selfspec.runtime import CudaGraphs
from selfspec.runtime.graph_cache import GraphCache

triton_planes: Any = pytest.importorskip("selfspec.kernels.triton_planes")

pytestmark = pytest.mark.accelerator

NEW = 8
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
SIZES = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, "vocab_size": 64}


def _layer(upper: Tensor, rows: Tensor, lower: Tensor | None, escapes: Tensor | None, inputs: int, dtype: Any) -> Any:
    parts = {"upper": upper, "rows": rows, "lower": lower, "escapes": escapes}
    there = {name: part for name, part in parts.items() if part is not None}
    return (UpperLinear if lower is None else PlanesLinear)(
        Packed(torch.Size((len(upper), inputs)), there), None, dtype
    )


@torch.library.custom_op("selfspec_tests::product_in_planes", mutates_args=())
def product_in_planes(
    states: Tensor, upper: Tensor, rows: Tensor, lower: Tensor | None = None, escapes: Tensor | None = None
) -> Tensor:
    return functional.linear(states, _layer(upper, rows, lower, escapes, states.shape[1], states.dtype).join())


@torch.library.custom_op("selfspec_tests::rows_in_planes", mutates_args=())
def rows_in_planes(
    inputs: int,
    dtype: torch.dtype,
    ids: Tensor,
    upper: Tensor,
    rows: Tensor,
    lower: Tensor | None = None,
    escapes: Tensor | None = None,
) -> Tensor:
    found: Tensor = _layer(upper, rows, lower, escapes, inputs, dtype).rows_of(ids)
    return found


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """A device that has, in place of the kernels in Triton, what torch computes on the CPU."""
    with present() as found:
        for name, kernel in (("product_in_planes", product_in_planes), ("rows_in_planes", rows_in_planes)):

            def launched(*args: Any, op: Any = kernel._opoverload) -> Tensor:
                given: Tensor = found.launch(op, *args)
                return given

            monkeypatch.setattr(triton_planes, name, launched)
        monkeypatch.setattr(
            planes, "kernels_of", lambda device: Kernels.TRITON if device.type == NAME else kernels_of(device)
        )
        yield found


class Copies(DeviceCopies):
    """Copies to the stand-in, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._backend = backend(device)
        super().__init__(device)

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def release(self, memory: Tensor) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.llama(dtype=torch.bfloat16, **SIZES).save_pretrained(tmp_path)
    return tmp_path


def stock(folder: Path) -> PreTrainedModel:
    # In 16 bits the number of rows decides near ties.
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def prompts(rows: int) -> Tensor:
    return tiny.prompt(4, rows, vocabulary=20).repeat(1, 3)


def assert_captured(spec: selfspec.SelfSpeculative, folder: Path, rows: int, device: torch.device) -> GraphCache:
    """Check greedy text of passes that are captured."""
    spec.programs = GraphCache(CudaGraphs(after=0, bucket=32), ticking())
    ids = prompts(rows)
    expected = stock(folder).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **GREEDY)
    for _ in range(2):
        given = ids.to(device)
        found = spec.generate(given, torch.ones_like(given), max_new_tokens=NEW, draft_length=3, **GREEDY)
        assert torch.equal(found.sequences.cpu(), expected)
    assert not spec.programs.refusals
    assert spec.programs.proved
    return spec.programs


@pytest.mark.parametrize(("draft", "rows"), [(False, 1), ("upper", 1), ("upper", 2), ("lookup+int8", 1)])
def test_a_model_in_planes_runs_on_a_device_by_captured_passes(
    accelerator: Accelerator, folder: Path, draft: Any, rows: int
) -> None:
    device = torch.device(NAME)
    spec = selfspec.load(folder, weights="planes", device=NAME, dtype="float32", draft=draft)
    assert isinstance(spec.runtime, CudaGraphs)
    assert any(isinstance(weight, PackedWeight) for weight in spec.model.parameters())
    assert {each.device.type for each in (*spec.model.parameters(), *spec.model.buffers())} == {NAME}
    kinds = assert_captured(spec, folder, rows, device).proved
    assert any(kind.path.format is not None for kind in kinds) == bool(draft)


@pytest.mark.parametrize(
    ("resident", "format", "partly"),
    [(1, "upper", 2), (0, "upper", 3), (0, "int8", 1), (0, "int8", 0), (3, None, 0)],
)
def test_of_planes_some_are_fetched_from_the_host_and_draft_steps_are_captured(
    accelerator: Accelerator, folder: Path, resident: int, format: str | None, partly: int
) -> None:
    device = torch.device(NAME)
    source = FromHost(Copies(device))
    model = place(survey(str(folder), torch.float32, 128, source, Planes()), plan(resident, format, partly))
    spec = selfspec.wrap(model, format)
    kinds = assert_captured(spec, folder, 1, device).proved
    # Passes that stream run as they are.
    assert all(kind.path.format is not None for kind in kinds) == (format is not None)
    stream = placement_of(model).stream  # type: ignore[union-attr]
    assert (stream is None) == (resident == 3)

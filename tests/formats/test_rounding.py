"""Weights in fewer bits: near the weights themselves, and the same by pieces."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import selfspec
from helpers import tiny
from helpers.reference import restored
from selfspec.errors import DraftConfigError
from selfspec.formats import format as declared
from selfspec.formats import int4, rounding
from selfspec.formats.format import Format
from selfspec.formats.int4 import Int4
from selfspec.formats.int8 import Int8
from selfspec.formats.packed import Packed, PackedLinear, fixed
from selfspec.formats.rounding import Kernels, Rounded

EIGHT, FOUR = Int8(), Int4()


@pytest.mark.parametrize(("format", "most"), [(EIGHT, 0.01), (FOUR, 0.1), (Int4(64), 0.12)])
def test_it_is_near_the_weight(format: Rounded, most: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 256)
    error = (restored(format.pack(weight)) - weight).norm() / weight.norm()
    assert 0 < error < most


def test_fitted_scales_leave_less_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    fitted = (restored(FOUR.pack(weight)) - weight).square().sum()
    monkeypatch.setattr(int4, "_FITS", 0)
    plain = (restored(FOUR.pack(weight)) - weight).square().sum()
    assert fitted < 0.9 * plain


def test_groups_of_one_value_keep_it() -> None:
    weight = torch.tensor([[-3.0] * 32 + [0.5] * 32])
    torch.testing.assert_close(restored(FOUR.pack(weight)), weight)


def _same(one: Packed, other: Packed) -> bool:
    return all(torch.equal(values, other.parts[name]) for name, values in one.parts.items())


@pytest.mark.parametrize("format", [EIGHT, FOUR])
def test_pieces_and_experts_are_rounded_as_the_whole(format: Rounded, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 40, 64)
    whole = format.pack(weight)
    monkeypatch.setattr(rounding, "_AT_ONCE", 7 * 64)
    for expert in range(3):
        assert _same(format.pack(weight[expert]), whole.of_expert(expert))


@pytest.mark.parametrize("format", [EIGHT, FOUR])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_of_zeros_are_zeros(format: Rounded, dtype: torch.dtype) -> None:
    assert not restored(format.pack(torch.zeros(4, 64, dtype=dtype))).any()


@pytest.mark.parametrize("format", [EIGHT, FOUR])
def test_inputs_that_nothing_reads_change_nothing(format: Rounded) -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 7] = 0
    found = format.pack(weight)
    assert found["factors"][7] == 0
    assert not restored(found)[:, 7].any()
    assert restored(found).isfinite().all()


def test_the_columns_of_a_head_stay_as_they_are() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    assert (EIGHT.pack_head(weight)["factors"] == 1).all()
    assert (EIGHT.pack(weight)["factors"] != 1).any()


def test_4_bits_fit_no_device_that_lacks_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # AMD's cards for consumers have the capability of NVIDIA's, and not their product, which the CPU lacks as well.
    lacking, device = int4._aten_runs(torch.device("cpu")), torch.device("cuda")
    assert not lacking
    monkeypatch.setattr(int4, "kernels_of", lambda _: Kernels.ATEN)
    for runs in (lacking, True):
        monkeypatch.setattr(int4, "_aten_runs", lambda _, runs=runs: runs)
        assert FOUR.fits((128, 1024), device) is runs
    assert FOUR.fits((128, 1024), torch.device("cpu"))


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RuntimeError, match="groups of 64"):
        Int4(64).pack(torch.zeros(4, 96))


@pytest.mark.parametrize("format", [EIGHT, FOUR])
def test_the_weight_stays_as_it_is_however_it_lies(format: Rounded) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 128)
    before, wanted = weight.clone(), format.pack(weight.clone())
    for each in (weight, weight.t().contiguous().t()):
        assert _same(format.pack(each), wanted)
        assert torch.equal(each, before)


# A format of a package of one's own.

# The source of such a package.
PACKAGE = """
from dataclasses import dataclass

import torch
from torch import nn

from selfspec.formats.format import Format
from selfspec.formats.packed import Packed, PackedLinear, fixed


class HalvesLinear(PackedLinear):
    def __init__(self, packed, bias, dtype):
        super().__init__(packed, bias, dtype)
        self.halves = fixed(packed["halves"])

    def product(self, states):
        return nn.functional.linear(states, self.join())

    def join(self):
        return self.halves.to(self.dtype)


@dataclass(frozen=True)
class Halves(Format):
    name, help, bits, acceptance, parts, layer = "halves", "half", 16, 0.99, ("halves",), HalvesLinear

    least: int = 1

    def empty(self, shape, device):
        return Packed(torch.Size(shape), {"halves": torch.empty(shape, dtype=torch.float16, device=device)})

    def pack(self, weight):
        return Packed(weight.shape, {"halves": weight.detach().half()})

    def fits(self, shape, device=None):
        return shape[-1] >= self.least
"""

DRAFTS = """
import sys, torch, selfspec
from helpers import tiny
from selfspec.measure.summary import describe
model, ids = tiny.llama(hidden_size=64, intermediate_size=128, dtype=torch.float32), tiny.prompt(9, 2)
wanted = model.generate(ids, max_new_tokens=24, do_sample=False)
spec = selfspec.wrap(model, "lookup+halves+exit:3", draft_length=3)
output = spec.generate(ids, max_new_tokens=24, do_sample=False)
assert torch.equal(output.sequences, wanted) and output.stats.drafted and output.stats.substitute_bytes
assert [each.format for each in describe(model).substitutes] == ["halves", "int8", "int4"]
tiny.llama(hidden_size=64, intermediate_size=128, dtype=torch.float32).save_pretrained(sys.argv[1])
loaded = selfspec.load(sys.argv[1], "64GiB", draft="halves", context=64)
assert loaded.model.placement.plan.format == "halves"
"""


@pytest.mark.tools
def test_a_format_of_a_package_is_known_everywhere(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(PACKAGE)
    metadata = tmp_path / "halves-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[selfspec.formats]\nhalves = halves:Halves\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1]), *sys.path])
    run = [sys.executable, "-c", DRAFTS, str(tmp_path / "model")]
    found = subprocess.run(run, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


class DoubledLinear(PackedLinear):
    """By the product alone: `join` makes the dense weight of it."""

    def __init__(self, packed: Packed, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed, bias, dtype)
        self.halved = fixed(packed["halved"])

    def product(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, 2 * self.halved)


@dataclass(frozen=True)
class Doubled(Format):
    """A format that nobody declares."""

    name, help, bits, acceptance, parts = "doubled", "", 32, 1.0, ("halved",)
    layer: ClassVar[type[PackedLinear]] = DoubledLinear
    exact = True

    def empty(self, shape: object, device: torch.device) -> Packed:
        raise NotImplementedError

    def pack(self, weight: Tensor) -> Packed:
        return Packed(weight.shape, {"halved": weight.detach() / 2})


def test_a_format_without_a_declaration_drafts_as_an_object() -> None:
    model, ids = tiny.llama(dtype=torch.float64), tiny.prompt(9, 2)
    draft = selfspec.drafts.LowPrecision(format=Doubled())
    output = selfspec.wrap(model, draft, draft_length=3).generate(ids, max_new_tokens=24, do_sample=True, seed=0)
    # Its products are the model's own, so that nothing is rejected.
    assert output.stats.acceptance_rate == 1.0
    assert draft.spelling is None
    assert draft.runs_exact_layers(2)
    weight = torch.randn(6, 5, dtype=torch.float64)
    assert torch.equal(DoubledLinear(Doubled().pack(weight), None, weight.dtype).weight.clone(), weight)


@pytest.mark.parametrize(
    ("declares", "match"),
    [(type("Int8", (Doubled,), {"name": "int8"}), "'int8', and there is one already"), (Tensor, "is no format")],
)
def test_what_cannot_be_declared_is_refused(declares: type, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = SimpleNamespace(value="own:Own", load=lambda: declares)
    monkeypatch.setattr(declared, "entry_points", lambda group: [point])
    with pytest.raises(DraftConfigError, match=match):
        declared.formats.__wrapped__()

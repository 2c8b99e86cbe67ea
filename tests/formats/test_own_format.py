"""A format of a package of one's own is a draft by its name, in files, in summaries and in budgets."""

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
from selfspec.errors import DraftConfigError
from selfspec.formats import format as declared
from selfspec.formats.format import Format
from selfspec.formats.packed import Packed, PackedLinear, fixed

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
selfspec.wrap(model, "halves").draft.save(sys.argv[1], model)
for each in (spec, selfspec.wrap(model, f"halves:{sys.argv[1]}", draft_length=3)):
    output = each.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(output.sequences, wanted) and output.stats.drafted and output.stats.substitute_bytes
assert [each.format for each in describe(model).substitutes] == ["halves", "int8", "int4"]
tiny.llama(hidden_size=64, intermediate_size=128, dtype=torch.float32).save_pretrained(sys.argv[2])
loaded = selfspec.load(sys.argv[2], "64GiB", draft="halves", context=64)
assert loaded.model.placement.plan.format == "halves"
"""


def test_a_format_of_a_package_is_known_everywhere(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(PACKAGE)
    metadata = tmp_path / "halves-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[selfspec.formats]\nhalves = halves:Halves\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1]), *sys.path])
    run = [sys.executable, "-c", DRAFTS, str(tmp_path / "saved"), str(tmp_path / "model")]
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

"""Pack checkpoints in bfloat16 in planes, and count bits, escapes, bytes, and weights that differ; decode nothing.

    python benchmarks/planes_bits.py MODEL...

How often a target accepts drafts over planes: `benchmarks/acceptance.py MODEL --weights planes --draft upper`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from harness import keep

import selfspec
from selfspec.formats.packed import PackedWeight
from selfspec.formats.planes import PlanesLinear, bits_of
from selfspec.measure.environment import environment
from selfspec.model.checkpoint import load_to_device
from selfspec.tools.lab.report import markdown_table

_COLUMNS = (
    "checkpoint",
    "weights in planes",
    "bits of a weight",
    "escapes",
    "differ",
    "MB in bfloat16",
    "MB in planes",
)


def main() -> None:
    """Count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--name", default="planes_bits", help="of the results")
    options = parser.parse_args()
    models = {folder.name: _bits(folder) for folder in options.models}
    rows = []
    for name, of in models.items():
        cells = [f"{of['weights'] / 1e6:.1f}M", f"{of['bits']:.2f}", f"{of['escapes']:.3%}", str(of["differ"])]
        rows.append([name, *cells, *(f"{of[key] / 1e6:.0f}" for key in ("bytes in bfloat16", "bytes in planes"))])
    report = markdown_table(_COLUMNS, rows) + "\n"
    keep(options.name, {"environment": environment(torch.device("cpu")), "models": models}, report)
    print(report)


def _bits(folder: Path) -> dict[str, Any]:
    dense = load_to_device(str(folder), "bfloat16", "cpu")
    packed = selfspec.load(folder, weights="planes", dtype="bfloat16", draft=False).model
    numbers = escapes = nbytes = differ = 0
    others = sum(each.nbytes for each in packed.parameters() if not isinstance(each, PackedWeight))
    for weight, stock in zip(packed.parameters(), dense.parameters(), strict=True):
        if isinstance(weight, PackedWeight) and isinstance(layer := weight.layer, PlanesLinear):
            numbers += stock.numel()
            escapes += layer.escapes.numel()
            nbytes += layer.nbytes
            differ += int((bits_of(layer.join()) != bits_of(stock)).sum())
    whole = sum(each.nbytes for each in dense.parameters())
    found = {"weights": numbers, "bits": 8 * nbytes / numbers, "escapes": escapes / numbers, "differ": differ}
    return {**found, "bytes in bfloat16": whole, "bytes in planes": nbytes + others}


if __name__ == "__main__":
    main()

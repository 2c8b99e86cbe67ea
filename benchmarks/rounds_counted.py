"""Count the waits, launches and copies of a round on a device, without one.

    python benchmarks/rounds_counted.py after --to benchmarks/results/rounds_counted.json

A tiny llama decodes on the stand-in for an accelerator that the tests have (`tests/helpers/accelerator`), by the stock
modules. Counts of rounds after the second are kept, and of these the median. A wait is what torch calls a synchronising
operation on CUDA: a value that is read, and a copy of memory that is not locked. A launch is an operation; a device's
own library runs some of them as one kernel, attention for one. The first word names the column that is written, so that
two commits can stand side by side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import HERE

import selfspec
from selfspec.draft.registry import parse_draft
from selfspec.tools.lab.report import markdown_table

sys.path.append(str(HERE.parent / "tests"))

from helpers import published_heads, tiny
from helpers.accelerator.device import Accelerator, Counts, present

DRAFTS = {
    "plain": "none",
    "exit": "exit:2",
    "int4": "int4",
    "lookup": "lookup",
    "recycle": "recycle",
    "suffix": "suffix",
    "lookup, else an exit": "lookup+exit:2",
    "tree along an exit": "exit:2",
    "tree of candidates": "recycle",
    "union with an exit": "union:suffix+recycle+exit:2",
    "assistant": "assistant",
    "head": "eagle3",
}
_NODES, _LENGTH, _TOKENS, _SKIPPED, _ROUNDS = 9, 3, 90, 2, 8
# Sizes that torch's own product in 4 bits takes.
_SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 64}


def counts(accelerator: Accelerator, name: str, rows: int, sampled: bool) -> list[Counts]:
    """Count what some rounds ask of the device."""
    options: dict[str, Any] = {"do_sample": sampled, "seed": 1, "eos_token_id": None}
    with TemporaryDirectory() as folder:
        if name == "head":
            model, named = published_heads.with_head(DRAFTS[name], Path(folder))
        else:
            model, named = tiny.llama(**_SIZES), DRAFTS[name]
        model.to(accelerator.device)
        draft = selfspec.drafts.Assistant(_assistant(accelerator)) if name == "assistant" else parse_draft(named)
        length: Any = selfspec.FixedLength(_LENGTH, nodes=_NODES) if name.startswith(("tree", "union")) else _LENGTH
        spec = selfspec.wrap(model, draft, draft_length=length, runtime=selfspec.runtime.Eager())
        # A text that repeats itself, so that there is something to look up.
        ids = tiny.prompt(6, rows, vocabulary=20).repeat(1, 3).to(accelerator.device)
        generation = spec.stream(ids, torch.ones_like(ids), max_new_tokens=_TOKENS, **options)
        found = []
        for _ in range(_SKIPPED + _ROUNDS):
            with accelerator.counted() as counted:
                next(generation)
            found.append(counted)
        generation.close()
    return found[_SKIPPED:]


def _assistant(accelerator: Accelerator) -> Any:
    return tiny.llama(**_SIZES, num_hidden_layers=1, seed=1).to(accelerator.device)


def rows_of(accelerator: Accelerator) -> Iterator[dict[str, Any]]:
    """Yield the medians of every draft, greedily and sampled, one row and three."""
    for name in DRAFTS:
        for rows in (1, 3):
            for sampled in (False, True):
                found = counts(accelerator, name, rows, sampled)
                yield {
                    "draft": name,
                    "rows": rows,
                    "sampled": sampled,
                    **{
                        what: statistics.median(getattr(each, what) for each in found)
                        for what in ("waits", "launches", "to_device", "to_host")
                    },
                    "most waits": max(each.waits for each in found),
                    "waited": sorted({waited for each in found for waited in each.waited}),
                }


def table(columns: dict[str, list[dict[str, Any]]]) -> str:
    """Write what was counted beside each other, for people."""
    wanted = {"waits": "waits", "launches": "launches", "to_device": "bytes to the device", "to_host": "to the host"}
    heads = ["draft", "rows", "sampled", *(f"{title}, {each}" for title in wanted.values() for each in columns)]
    rows = []
    for each in zip(*columns.values(), strict=True):
        named = [each[0]["draft"], str(each[0]["rows"]), "yes" if each[0]["sampled"] else "no"]
        rows.append([*named, *(f"{row[what]:g}" for what in wanted for row in each)])
    return markdown_table(heads, rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("column", help="what this commit's counts are called, such as `after`")
    parser.add_argument("--to", type=Path, default=HERE / "results" / "rounds_counted.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = json.loads(options.to.read_text()) if options.to.exists() else {}
    with present() as accelerator:
        columns[options.column] = list(rows_of(accelerator))
    options.to.write_text(json.dumps(columns, indent=1) + "\n")
    options.to.with_suffix(".md").write_text(table(columns))


if __name__ == "__main__":
    main()

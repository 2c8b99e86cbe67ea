"""Reading a prompt: selfspec's first token against `model.generate`'s, by the prompt's length and dtype.

    python benchmarks/prompt_lengths.py MODEL --name prompt_lengths_smollm2

Each length is read by turns, so that both meet the same load; ratios are medians over pairs, with their quartiles.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from harness import HERE, keep, seconds_of
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec
from selfspec.measure.environment import environment

_LENGTHS = (1, 16, 64, 100, 400, 1600)
_DTYPES = ("float32", "bfloat16")


@torch.no_grad()
def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--name", default="prompt_lengths")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = "\n".join(page.read_text() for page in sorted((HERE.parent / "docs").glob("*.md")))
    ids = AutoTokenizer.from_pretrained(options.model)(text, return_tensors="pt").input_ids
    rows = []
    for dtype in _DTYPES:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        spec = selfspec.wrap(model)
        for length in track(_LENGTHS, description=dtype, transient=True):
            given = {"input_ids": ids[:, :length], "attention_mask": torch.ones(1, length, dtype=torch.long)}
            asked = {**given, "max_new_tokens": 1, "do_sample": False}
            ways = partial(model.generate, **asked), partial(spec.generate, **asked)
            pairs = [tuple(map(seconds_of, ways)) for _ in range(2 + options.pairs)][2:]
            low, middle, high = statistics.quantiles([own / stock for stock, own in pairs], n=4)
            stock, own = (statistics.median(each) for each in zip(*pairs, strict=True))
            rows.append([dtype, length, stock, own, middle, low, high])
    record = {"rows": rows, "environment": environment(torch.device("cpu"))}
    lines = [
        "| dtype | tokens of the prompt | `model.generate`, ms | selfspec, ms | ratio |",
        "|---|---|---|---|---|",
        *(f"| {d} | {n} | {s * 1e3:.0f} | {o * 1e3:.0f} | {r:.2f} ({q:.2f}-{p:.2f}) |" for d, n, s, o, r, q, p in rows),
    ]
    report = f"# Reading a prompt of {options.model.name}\n\n{options.threads} threads.\n\n" + "\n".join(lines) + "\n"
    keep(options.name, record, report)
    print(report)


if __name__ == "__main__":
    main()

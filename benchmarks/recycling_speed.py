"""Time drafts without a model against plain decoding, on all text and outside of loops, each prompt once.

    python benchmarks/recycling_speed.py MODEL --workload spec=spec_bench.jsonl --threads 2

Arms take turns prompt by prompt, greedily. A wrapper that has seen a text drafts it whole the next time, so no prompt
comes twice. A round counts as outside of loops where its first token is; its time is set against that of as many
tokens of plain decoding of the same text.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoTokenizer

import selfspec
from selfspec.environment import environment
from selfspec.files.writing import write_json
from selfspec.measure.cycles import in_cycles
from selfspec.measure.estimate import Estimate
from selfspec.measure.prompts import read_workloads
from selfspec.model.checkpoint import load_checkpoint

_CONTEXT = 64
_PLAIN = "plain"
_DRAFTS = ("recycle", "lookup", "lookup+recycle", "lookup+int8", "int4")


@dataclass(frozen=True)
class Timed:
    """One text.

    Attributes:
        call: seconds of the whole call.
        tokens: generated.
        outside: seconds of the rounds that begin outside of loops.
        tokens_outside: what these committed.
        passes: rounds.
    """

    call: float
    tokens: int
    outside: float
    tokens_outside: int
    passes: int


def timed(spec: selfspec.SelfSpeculative, prompt: Tensor, new: int) -> Timed:
    """Generate after a prompt, timing every round."""
    begun = last = time.perf_counter()
    rounds: list[tuple[int, float]] = []
    tokens: list[int] = []
    for each in spec.stream(prompt, torch.ones_like(prompt), max_new_tokens=new, do_sample=False, eos_token_id=None):
        now = time.perf_counter()
        # The first round is timed with the prompt.
        rounds.append((len(each.tokens), now - last if rounds else 0.0))
        tokens += each.tokens
        last = now
    loops, place, outside, count = in_cycles(tokens), 0, 0.0, 0
    for committed, seconds in rounds:
        if place and not loops[place]:
            outside, count = outside + seconds, count + committed
        place += committed
    return Timed(last - begun, len(tokens), outside, count, len(rounds))


def line(name: str, plain: list[Timed], found: list[Timed]) -> str:
    """A row of the table: how fast an arm is by the plain decoding of the same texts."""
    calls = Estimate.of_ratio([each.call for each in plain], [each.call for each in found])
    pairs = [(one, other) for one, other in zip(plain, found, strict=True) if one.tokens_outside and other.outside]
    outside = Estimate.of_ratio(
        [one.outside / one.tokens_outside * other.tokens_outside for one, other in pairs],
        [other.outside for _, other in pairs],
    )
    rate = sum(each.tokens for each in found) / sum(each.call for each in found)
    passes = sum(each.tokens for each in found) / sum(each.passes for each in found)
    ratios = " | ".join(f"{each.value:.2f} ({each.low:.2f}-{each.high:.2f})" for each in (calls, outside))
    return f"| {name} | {rate:.0f} | {ratios} | {passes:.2f} |"


def main() -> None:
    """Measure, and write table and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workload", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--to", type=Path, default=Path("benchmarks/results"), metavar="FOLDER")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model, tokenizer = load_checkpoint(asked.model, "float32", "cpu").model, AutoTokenizer.from_pretrained(asked.model)
    machine = environment(torch.device("cpu"))
    kernels = "built" if machine["cpu_kernels"] else "not built"
    lines = [
        f"{Path(asked.model).name}, {machine['processor']}, {asked.threads} threads, float32, greedy,",
        f"CPU kernels {kernels}.",
        f"{asked.prompts} prompts of {_CONTEXT} tokens, each once, {asked.max_new_tokens} new ones; against plain",
        "decoding, intervals of 95 % over prompts.",
    ]
    record: dict[str, object] = {"environment": machine}
    for workload in read_workloads(asked.workload).values():
        arms = {name: selfspec.wrap(model, None if name == _PLAIN else name) for name in (_PLAIN, *_DRAFTS)}
        # One more, which makes programs and substitutes.
        first, *prompts = workload.prompts(tokenizer, asked.prompts + 1, 1, _CONTEXT)
        for spec in arms.values():
            timed(spec, first, asked.max_new_tokens)
        found: dict[str, list[Timed]] = {name: [] for name in arms}
        for prompt in track(prompts, workload.name):
            for name, spec in arms.items():
                found[name].append(timed(spec, prompt, asked.max_new_tokens))
        record[workload.name] = {name: [asdict(each) for each in texts] for name, texts in found.items()}
        lines += ["", f"## {workload.name}", "", "| draft | tokens/s | faster | outside of loops | tokens a pass |"]
        lines += ["|---|---|---|---|---|", *(line(name, found[_PLAIN], texts) for name, texts in found.items())]
    write_json(asked.to / "recycling_speed.json", record)
    (asked.to / "recycling_speed.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

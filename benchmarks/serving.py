"""Time requests that come together, in this process: drafts on and off in turns, at several loads.

    python benchmarks/serving.py MODEL --workload code=heldout.jsonl --draft lookup+int8 --threads 2

Each load is a number of requests that come at once, each with a prompt of its own; they run to their end, round after
round of the same engines. `call` is `spec.generate` on one prompt after another, for one request at a time.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from transformers import AutoTokenizer
from transformers.utils import logging

import selfspec
from selfspec.environment import environment
from selfspec.files.writing import write_json
from selfspec.measure.estimate import Estimate
from selfspec.measure.prompts import read_workloads
from selfspec.model.checkpoint import load_checkpoint
from selfspec.serve.engine import Engine
from selfspec.serve.events import Committed
from selfspec.serve.row_request import RowRequest, RowSampling

_CONTEXT = 64
_SHORTER = 16
_PLAIN, _CALL = "plain", "call"


@dataclass(frozen=True)
class Timed:
    """One run of some requests.

    Attributes:
        seconds: until the last of them ended.
        first: seconds until the first token of each.
        tokens: generated, of all.
        accepted: draft tokens among them.
    """

    seconds: float
    first: list[float]
    tokens: int
    accepted: int


def served(engine: Engine, prompts: list[tuple[int, ...]], new: int, sampling: RowSampling) -> Timed:
    """Run requests that come at once."""
    begun, first = time.perf_counter(), list[list[float]]()
    tickets = []
    for prompt in prompts:
        seen: list[float] = []
        first.append(seen)

        def note(event: object, seen: list[float] = seen) -> None:
            if isinstance(event, Committed) and not seen:
                seen.append(time.perf_counter() - begun)

        tickets.append(engine.submit(RowRequest(prompt, new, sampling, frozenset()), note))
    for ticket in tickets:
        ticket.wait()
    seconds = time.perf_counter() - begun
    ends = [ticket.finished for ticket in tickets]
    tokens = sum(end.completion_tokens for end in ends if end is not None)
    return Timed(seconds, [each[0] for each in first], tokens, sum(end.accepted for end in ends if end is not None))


def called(spec: selfspec.SelfSpeculative, prompts: list[tuple[int, ...]], new: int, temperature: float) -> Timed:
    """Generate after one prompt and then the next."""
    options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    begun, tokens, accepted = time.perf_counter(), 0, 0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = spec.generate(
            ids, torch.ones_like(ids), max_new_tokens=new, eos_token_id=None, seed=0, accept="coupled", **options
        )
        tokens, accepted = tokens + out.lengths[0], accepted + out.stats.accepted
    return Timed(time.perf_counter() - begun, [], tokens, accepted)


def line(load: str, name: str, plain: list[Timed], found: list[Timed]) -> str:
    """A row of the table."""
    ratio = Estimate.of_ratio([each.seconds for each in plain], [each.seconds for each in found])
    rate = sum(each.tokens for each in found) / sum(each.seconds for each in found)
    waits = sorted(wait for each in found for wait in each.first)
    wait = f"{1000 * waits[len(waits) // 2]:.0f}" if waits else ""
    share = sum(each.accepted for each in found) / sum(each.tokens for each in found)
    faster = f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
    return f"| {load} | {name} | {rate:.0f} | {faster} | {wait} | {share:.2f} |"


def together(parts: list[Timed]) -> Timed:
    """Runs one after the other as one."""
    return Timed(
        sum(each.seconds for each in parts),
        [wait for each in parts for wait in each.first],
        sum(each.tokens for each in parts),
        sum(each.accepted for each in parts),
    )


def main() -> None:
    """Measure, and write table and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workload", required=True, metavar="NAME=FILE")
    parser.add_argument("--draft", default="lookup+int8")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--loads", default="1,4,16,64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--to", type=Path, default=Path("benchmarks/results"), metavar="FOLDER")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    logging.set_verbosity_error()
    model, tokenizer = load_checkpoint(asked.model, "float32", "cpu").model, AutoTokenizer.from_pretrained(asked.model)
    machine = environment(torch.device("cpu"))
    (workload,) = read_workloads([asked.workload]).values()
    loads, new, temperature = [int(load) for load in asked.loads.split(",")], asked.max_new_tokens, asked.temperature
    given = workload.prompts(tokenizer, max(*loads, 4), 1, _CONTEXT)
    # Of different lengths, as requests are: rows at one length would run faster together than they ever do.
    prompts = [tuple(prompt[0].tolist()[number % _SHORTER :]) for number, prompt in enumerate(given)]
    arms = {_PLAIN: selfspec.wrap(model), asked.draft: selfspec.wrap(model, asked.draft)}
    engines = {name: Engine(spec, max_rows=max(loads), prefill_tokens=512) for name, spec in arms.items()}
    for engine in engines.values():
        engine.start()
    kernels = "built" if machine["cpu_kernels"] else "not built"
    lines = [
        f"{Path(asked.model).name}, {machine['processor']}, {asked.threads} threads, float32, CPU kernels {kernels}.",
        f"Requests that come at once, of {_CONTEXT - _SHORTER + 1} to {_CONTEXT} tokens, and {new} new ones,",
        f"temperature {temperature:g}. Faster:",
        f"against plain decoding by the engine at the same load, {asked.repeats} runs in turns, intervals of 95 %.",
        "First: the median wait for the first token, in ms. Drafted: the share of all tokens that were drafted.",
        "",
        "| requests | draft | tokens/s | faster | first | drafted |",
        "|---|---|---|---|---|---|",
    ]
    record: dict[str, object] = {"environment": machine}
    for load in loads:
        # One request at a time: several prompts, one after another.
        groups = [[prompt] for prompt in prompts[:4]] if load == 1 else [prompts[:load]]
        found: dict[str, list[Timed]] = {name: [] for name in [*arms, *([_CALL] if load == 1 else [])]}
        for run in track(range(asked.warm_up + asked.repeats), str(load)):
            for name in found:
                if name == _CALL:
                    timed = called(arms[asked.draft], prompts[:4], new, temperature)
                else:
                    sampling = RowSampling(temperature=temperature, top_k=0, seed=0)
                    timed = together([served(engines[name], group, new, sampling) for group in groups])
                if run >= asked.warm_up:
                    found[name].append(timed)
        record[str(load)] = {name: [asdict(each) for each in runs] for name, runs in found.items()}
        lines += [line(str(load), name, found[_PLAIN], runs) for name, runs in found.items()]
    for engine in engines.values():
        engine.stop()
    write_json(asked.to / f"serving_{temperature:g}.json", record)
    (asked.to / f"serving_{temperature:g}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

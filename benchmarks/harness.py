"""Shared by benchmarks: the place of results, the lab over arms of any kind, and workers in processes of their own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.cli.terminal import progress_bar
from selfspec.measure.prompts import parse_workloads
from selfspec.tools.lab.arms import Arm, ArmSpec, Call, Cell, Prompts
from selfspec.tools.lab.generations import Generations, Part, latest
from selfspec.tools.lab.report import write_report
from selfspec.tools.lab.runs import Runs

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def keep(name: str, record: Mapping[str, Any], report: str) -> None:
    """Write a record as JSON and its report as Markdown into the folder of results."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(report)


def seconds_of(run: Callable[[], object]) -> float:
    """Time a piece of work on a CPU."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def equal_tokens(text: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two texts begin with alike."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))))


def prompts_of(workload: str, tokenizer: PreTrainedTokenizerBase, number: int, tokens: int) -> list[Tensor]:
    """Return prompts of one length, `[1, tokens]` each, of a file as `selfspec bench --workload` takes it."""
    return parse_workloads(f"texts={workload}")[0].prompts(tokenizer, number, 1, tokens)


def sampling(temperature: float) -> dict[str, Any]:
    """Return the options of `generate` for plain sampling at a temperature; 0 decodes greedily."""
    return {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}


def compare(
    name: str,
    called: str,
    model: PreTrainedModel,
    arms: Sequence[Arm],
    cells: Mapping[Cell, Sequence[Prompts]],
    repeats: int,
    warm_up: int,
    parts: frozenset[Part] = frozenset({"speed"}),
) -> None:
    """Measure arms of a model in turns by the lab, keep runs and report with the results, and print the page."""
    runs = Runs(RESULTS / name)
    measured = Generations(name=called, model=model, arms=arms, repeats=repeats, warm_up=warm_up, parts=parts)
    with progress_bar("measuring") as bar:
        measured.measure(cells, runs, bar)
    report, *_ = write_report("Ways to decode", latest(runs.measured("generation")), {}, RESULTS / name)
    print(report.read_text())


class JsonWorker:
    """A process that answers each line of JSON with another."""

    def __init__(self, command: Sequence[object]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([*map(str, command)], stdin=pipe, stdout=pipe, text=True)

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Send a job, and read the answer."""
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self.read()

    def read(self) -> dict[str, Any]:
        """Read the next line; a SystemExit: the process has ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("a worker ended; what it wrote on standard error says why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate()


@dataclass
class WorkerArm:
    """An arm that decodes in a worker's process."""

    spec: ArmSpec
    worker: JsonWorker

    @classmethod
    def llama_cpp(cls, name: str, file: Path, python: str, threads: int, context: int) -> WorkerArm:
        """Start llama.cpp over a GGUF file, with room for `context` tokens; it has read the file when this returns."""
        worker = JsonWorker([python, "-P", HERE / "llama_cpp_worker.py", file, threads, context])
        print(f"{name}: {worker.read()['system']}")
        return cls(ArmSpec("other", name, lossless=False), worker)

    def decode(self, prompts: Prompts, cell: Cell, seed: int) -> Call:
        (ids,) = prompts.rows
        job = {"ids": ids, "tokens": cell.max_new_tokens, "temperature": cell.temperature, "seed": seed}
        told = self.worker.ask(job)
        text, whole, first = told["text"], told["whole"], told.get("first", 1)
        return Call([text], whole, whole - told["seconds"], first, told.get("passes", len(text)), seed=seed)

"""Shared by benchmarks: the place of results, timing, decoding in turns, and workers in processes of their own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

import selfspec
from selfspec.measure.prompts import parse_workloads

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
    """Return prompts of one length, `[1, tokens]` each.

    Args:
        workload: `FILE`, `FILE#FIELD` or `FILE#FIELD=VALUE`, as `selfspec bench --workload` takes it.
        tokenizer: of the model.
        number: of prompts.
        tokens: of each.
    """
    return parse_workloads(f"texts={workload}")[0].prompts(tokenizer, number, 1, tokens)


def sampling(temperature: float) -> dict[str, Any]:
    """Return the options of `generate` for plain sampling at a temperature; 0 decodes greedily."""
    return {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}


@dataclass(frozen=True)
class Decoded:
    """Result of one call.

    Attributes:
        text: new token ids.
        seconds: that those after the first took.
        whole: seconds of the call, with its prompt.
    """

    text: list[int]
    seconds: float
    whole: float


Decode = Callable[[list[int], float, int], Decoded]
"""Decodes a prompt, at a temperature (0: greedy) and with a seed."""


@dataclass
class Arm:
    """A way to decode.

    Attributes:
        decode: does it.
        rates: tokens a second behind the first, one for each repeat.
        whole: tokens a second of whole calls.
        texts: what the last repeat gave, for each prompt.
    """

    decode: Decode
    rates: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)


def in_turns(
    decoders: Mapping[str, Decode], prompts: Sequence[list[int]], temperature: float, repeats: int, warm_up: int
) -> dict[str, Arm]:
    """Decode all prompts by every decoder, in turns: each repeat begins with another one."""
    arms = {name: Arm(decode) for name, decode in decoders.items()}
    names = list(arms)
    for repeat in track(range(-warm_up, repeats), f"T {temperature:g}", transient=True):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            arm = arms[name]
            calls = [arm.decode(prompt, temperature, seed) for seed, prompt in enumerate(prompts)]
            arm.texts = [call.text for call in calls]
            if repeat >= 0:
                tokens = sum(len(call.text) for call in calls)
                arm.rates.append((tokens - len(calls)) / sum(call.seconds for call in calls))
                arm.whole.append(tokens / sum(call.whole for call in calls))
    return arms


@dataclass(frozen=True)
class Own:
    """Decodes `tokens` with selfspec."""

    spec: selfspec.SelfSpeculative
    tokens: int

    def __call__(self, ids: list[int], temperature: float, seed: int) -> Decoded:
        prompt = torch.tensor([ids])
        options: dict[str, Any] = {"max_new_tokens": self.tokens, "eos_token_id": None, "seed": seed}
        text: list[int] = []
        times: list[tuple[float, int]] = []
        started = time.perf_counter()
        for chunk in self.spec.stream(prompt, torch.ones_like(prompt), **options, **sampling(temperature)):
            text += chunk.rows[0].tokens
            times.append((time.perf_counter(), len(text)))
        whole = time.perf_counter() - started
        (first, already), (last, all_) = times[0], times[-1]
        # Of a round with several tokens: what the first one would have taken alone.
        return Decoded(text, (last - first) * (all_ - 1) / (all_ - already), whole)


@dataclass(frozen=True)
class Stock:
    """Decodes `tokens` with `model.generate`."""

    model: PreTrainedModel
    tokens: int

    def __call__(self, ids: list[int], temperature: float, seed: int) -> Decoded:
        torch.manual_seed(seed)
        watch, prompt = _Watch(), torch.tensor([ids])
        started = time.perf_counter()
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[watch],
            **sampling(temperature),
        )
        whole = time.perf_counter() - started
        return Decoded(out[0, len(ids) :].tolist(), watch.times[-1] - watch.times[0], whole)


class _Watch(StoppingCriteria):
    """Notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class JsonWorker:
    """A process that answers each line of JSON with another.

    Args:
        command: starts it.
        **settings: of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[object], **settings: Any) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([*map(str, command)], stdin=pipe, stdout=pipe, text=True, **settings)

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Send a job, and read the answer."""
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self.read()

    def read(self) -> dict[str, Any]:
        """Read the next line.

        Raises:
            SystemExit: the process has ended.
        """
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("a worker ended; what it wrote on standard error says why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate()


@dataclass(frozen=True)
class LlamaCpp:
    """Decodes `tokens` with a worker of `llama_cpp_worker.py`."""

    worker: JsonWorker
    tokens: int
    system: str

    @classmethod
    def over(cls, file: Path, python: str, threads: int, context: int, tokens: int) -> LlamaCpp:
        """Start a worker over a GGUF file; it has read the file when this returns."""
        worker = JsonWorker([python, "-P", HERE / "llama_cpp_worker.py", file, threads, context + tokens])
        return cls(worker, tokens, worker.read()["system"])

    def __call__(self, ids: list[int], temperature: float, seed: int) -> Decoded:
        job = {"ids": ids, "tokens": self.tokens, "temperature": temperature, "seed": seed}
        return Decoded(**self.worker.ask(job))

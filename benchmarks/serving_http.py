"""Time answers over HTTP on the loopback: drafts on, drafts off and `transformers serve`, in turns, by clients at once.

    python benchmarks/serving_http.py MODEL --prompts humaneval.jsonl --draft lookup+int8 --threads 2 --to serving_http

Each client asks one thing after another, streamed, for a bounded time; the clients run on the same machine and take
some of it. `call` is `spec.generate` on the same prompts in a process of its own. transformers is given a copy of the
checkpoint with a chat template that writes the message alone, and runs as it is by default; `--continuous` adds its
continuous batching. First text: until the first piece of it; between tokens: the time from the first piece to the last
by the tokens of an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from loopback_client import Answer, ask
from server_process import free_port, serving
from transformers import AutoTokenizer
from transformers.utils import logging

from selfspec.environment import environment
from selfspec.files.writing import write_json
from selfspec.measure.prompts import read_prompts

_PATH = "/v1/chat/completions"
_TEMPLATE = "{{ messages[-1].content }}"
_LETTERS = 200

_CALL = """
import json, sys, time, torch
import selfspec
from selfspec.measure.stock import bare
from selfspec.model.checkpoint import load_checkpoint
place, draft, threads, new, temperature, seconds, prompts = json.loads(sys.argv[1])
chosen = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
torch.set_num_threads(threads)
checkpoint = load_checkpoint(place, "float32", "cpu")
spec = selfspec.wrap(bare(checkpoint.model), draft)
tokens, begun = 0, None
for turn in range(10**6):
    ids = checkpoint.encode(prompts[turn % len(prompts)])
    out = spec.generate(ids, torch.ones_like(ids), max_new_tokens=new, **chosen)
    if turn == 1:
        begun = time.perf_counter()
    elif turn > 1:
        tokens += out.lengths[0]
        if time.perf_counter() - begun > seconds:
            break
print(json.dumps(tokens / (time.perf_counter() - begun)))
"""


@dataclass
class Cell:
    """What one arm did for some clients.

    Attributes:
        rates: tokens a second of each turn, all clients together.
        first: seconds until the first text.
        between: seconds a token, after the first text, of each answer.
        failed: answers that did not come whole.
    """

    rates: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    failed: int = 0

    def summary(self) -> dict[str, Any]:
        """Medians, spread and tails."""
        return {
            "tokens_per_second": round(statistics.median(self.rates), 1),
            "turns": [round(rate, 1) for rate in self.rates],
            "answers_with_text": len(self.first),
            "failed": self.failed,
            "first_token_ms": _tails(self.first),
            "between_tokens_ms": _tails(self.between),
        }


def _tails(seconds: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": None, "p99": None}
    return {
        name: round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


@dataclass(frozen=True)
class Asked:
    """What every client asks for.

    Attributes:
        model: the name that it is served by.
        prompts: one after another.
        new: tokens of an answer.
        temperature: 0: greedy decoding.
    """

    model: str
    prompts: Sequence[str]
    new: int
    temperature: float

    def body(self, number: int) -> dict[str, Any]:
        """The request with this number."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompts[number % len(self.prompts)]}],
            "max_tokens": self.new,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def drive(port: int, asked: Asked, clients: int, seconds: float, cell: Cell) -> None:
    """Let clients ask for some time; count what came within it."""
    until = time.perf_counter() + seconds
    done: list[Answer] = []

    async def client(number: int) -> None:
        turn = number
        while time.perf_counter() < until:
            done.append(await ask(port, _PATH, asked.body(turn)))
            turn += clients

    begun = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    spent = time.perf_counter() - begun
    tokens = 0
    for answer in done:
        if answer.status != 200 or not answer.finish_reason or not answer.usage:
            cell.failed += 1
            continue
        made = answer.usage["completion_tokens"]
        tokens += made
        if not answer.times:  # sampling may end a text at once
            continue
        cell.first.append(answer.times[0] - answer.begun)
        if made > 1 and len(answer.times) > 1:
            cell.between.append((answer.times[-1] - answer.times[0]) / (made - 1))
    cell.rates.append(tokens / spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--draft", default="lookup+int8")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each cell and turn")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before, of each cell of selfspec and turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--transformers", help="a Python whose environment can run `transformers serve`")
    parser.add_argument("--continuous", action="store_true", help="measure its continuous batching, too")
    parser.add_argument("--to", type=Path, help="FILE.json and FILE.md are written")
    given = parser.parse_args()
    logging.set_verbosity_error()
    prompts = [text[:_LETTERS] for text in read_prompts(given.prompts, 48)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model"
        shutil.copytree(given.model, copy)
        tokenizer = AutoTokenizer.from_pretrained(copy)
        tokenizer.chat_template = _TEMPLATE
        tokenizer.save_pretrained(copy)
        arms = commands(str(copy), given)
        cells = {(arm, clients): Cell() for arm in arms for clients in given.clients}
        asked = Asked(str(copy), prompts, given.new, given.temperature)
        calls: dict[str, list[float]] = {given.draft: [], "none": []}
        for turn in range(given.turns):
            for arm, command in arms.items():
                port = free_port()
                words = [word.replace("PORT", str(port)) for word in command]
                with serving(words, port, given.threads, Path(folder) / "log", seconds=60):
                    # Models are loaded and passes recorded at the first requests, and each load has its trial.
                    for clients in (1, *([] if "transformers" in arm else given.clients)):
                        asyncio.run(drive(port, asked, clients, given.warm_up, Cell()))
                    for clients in given.clients:
                        cell = cells[arm, clients]
                        asyncio.run(drive(port, asked, clients, given.seconds, cell))
                        print(turn, arm, clients, cell.rates[-1], cell.failed, flush=True)
            for draft, rates in calls.items():
                work = json.dumps(
                    [str(copy), draft, given.threads, given.new, given.temperature, given.seconds, prompts]
                )
                ended = subprocess.run([sys.executable, "-c", _CALL, work], capture_output=True, text=True, check=True)
                rates.append(json.loads(ended.stdout))
                print(turn, "call", draft, rates[-1], flush=True)
            # A turn that is cut short does not take the others with it.
            _write(given, cells, calls, list(arms))


def _write(
    given: argparse.Namespace, cells: dict[tuple[str, int], Cell], calls: dict[str, list[float]], arms: Sequence[str]
) -> None:
    settings = {**vars(given), "prompts": given.prompts.name, "model": Path(given.model).name, "to": None}
    result = {
        "settings": {**settings, "transformers": bool(given.transformers)},
        "cells": {f"{arm}, {clients}": cell.summary() for (arm, clients), cell in cells.items()},
        "call": {draft: [round(rate, 1) for rate in rates] for draft, rates in calls.items()},
        "environment": environment(torch.device("cpu")),
    }
    if given.to is not None:
        write_json(given.to.with_suffix(".json"), result)
        given.to.with_suffix(".md").write_text(report(result, given.clients, arms), encoding="utf-8")


def commands(model: str, given: argparse.Namespace) -> dict[str, list[str]]:
    """How each arm is started; PORT stands for its port."""
    own = [sys.executable, "-m", "selfspec", "serve", model, "--port", "PORT", "--dtype", "float32"]
    own += ["--threads", str(given.threads), "--max-rows", "64"]
    arms = {f"selfspec, {given.draft}": [*own, "--draft", given.draft], "selfspec, plain": [*own, "--draft", "none"]}
    if given.transformers:
        stock = [given.transformers, "-m", "transformers.cli.transformers", "serve", model, "--port", "PORT"]
        stock += ["--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"]
        arms["transformers serve"] = stock
        if given.continuous:
            arms["transformers serve, continuous"] = [*stock, "--continuous-batching"]
    return arms


def report(result: dict[str, Any], clients: Sequence[int], arms: Sequence[str]) -> str:
    """The tables."""
    cells = result["cells"]
    lines = [
        "# Answers over HTTP",
        "",
        "Tokens a second of all clients together, median of the turns, and each turn:",
        "",
    ]
    lines += ["| clients | " + " | ".join(arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for count in clients:
        found = [cells[f"{arm}, {count}"] for arm in arms]
        lines.append(
            f"| {count} | " + " | ".join(f"{each['tokens_per_second']} {each['turns']}" for each in found) + " |"
        )
    for name, title in (("first_token_ms", "Until the first text, ms"), ("between_tokens_ms", "Between tokens, ms")):
        lines += ["", f"{title}: median / 99th of a hundred:", "", "| clients | " + " | ".join(arms) + " |"]
        lines.append("|---" * (len(arms) + 1) + "|")
        for count in clients:
            found = [cells[f"{arm}, {count}"][name] for arm in arms]
            lines.append(f"| {count} | " + " | ".join(f"{each['p50']} / {each['p99']}" for each in found) + " |")
    lines += ["", f"`spec.generate` alone, tokens a second by draft: {result['call']}", ""]
    lines += [f"Settings: {result['settings']}. Machine: {result['environment']}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

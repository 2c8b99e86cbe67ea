"""Put a server under load on the loopback: many clients, some that leave, some that ask badly; a kill; a SIGTERM.

    python benchmarks/serving_load.py MODEL --prompts humaneval.jsonl --threads 2 --to load.json

Every whole answer is compared with `spec.generate` of the same row, greedy and seeded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loopback import Answer, ServerProcess, ask, free_port, serving
from transformers.utils import logging

import selfspec
from selfspec.decode.text_stream import continuation
from selfspec.environment import environment
from selfspec.files.writing import write_json
from selfspec.measure.prompts import read_prompts
from selfspec.measure.stock import bare
from selfspec.model.checkpoint import load_checkpoint

_PATH = "/v1/completions"
# Letters of a prompt.
_CONTEXT = 200
_LENGTHS = (8, 16, 24, 48)
_BAD: tuple[dict[str, Any] | bytes, ...] = (
    b"{",
    b"[" * 5000,
    {"model": "none", "prompt": "a"},
    {"model": "m", "prompt": "a", "temperature": "hot"},
    {"model": "m", "prompt": "a", "surprise": 1},
    {"model": "m", "prompt": "a " * 5000, "max_tokens": 8},
)


@dataclass(frozen=True)
class Job:
    """A request and what its answer has to be."""

    body: dict[str, Any] | bytes
    expected: str | None = None
    leave_after: int | None = None

    @property
    def kind(self) -> str:
        """What kind of client sends it."""
        return "bad" if self.expected is None else "whole" if self.leave_after is None else "leaves"


def jobs(prompts: Sequence[str], texts: dict[tuple[int, int, int | None], str], count: int) -> list[Job]:
    """Requests of every kind, in an order that is the same each time."""
    chance = random.Random(0)
    made = []
    for _ in range(count):
        draw = chance.random()
        if draw < 0.02:
            made.append(Job(chance.choice(_BAD)))
            continue
        prompt, length, seed = chance.choice(list(texts))
        body: dict[str, Any] = {"model": "m", "prompt": prompts[prompt], "max_tokens": length}
        body |= {"temperature": 0} if seed is None else {"temperature": 0.8, "seed": seed}
        body["stream"] = chance.random() < 0.5
        leaves = draw < 0.07
        made.append(
            Job({**body, "stream": True} if leaves else body, texts[prompt, length, seed], 1 if leaves else None)
        )
    return made


def expected_texts(
    place: str, draft: str, prompts: Sequence[str], threads: int
) -> dict[tuple[int, int, int | None], str]:
    """What `spec.generate` writes, by prompt, length and seed."""
    torch.set_num_threads(threads)
    checkpoint = load_checkpoint(place, "float32", "cpu")
    spec = selfspec.wrap(bare(checkpoint.model), draft)
    texts = {}
    for index, prompt in enumerate(prompts):
        ids = checkpoint.encode(prompt)
        known: list[int] = ids[0].tolist()
        for length in _LENGTHS:
            for seed in (None, index):
                drawn: dict[str, Any] = (
                    {} if seed is None else {"temperature": 0.8, "top_k": 0, "seed": seed, "accept": "coupled"}
                )
                mask = torch.ones_like(ids)
                out = spec.generate(ids, mask, max_new_tokens=length, do_sample=seed is not None, **drawn)
                new = out.sequences[0, ids.shape[1] :].tolist()
                texts[index, length, seed] = continuation(checkpoint.tokenizer, known, new)
    return texts


@dataclass
class Tally:
    """What became of the requests."""

    right: int = 0
    wrong: int = 0
    lost: int = 0
    refused_rightly: int = 0
    refused_wrongly: int = 0
    left: int = 0
    again: int = 0
    turned_away: int = 0

    def count(self, job: Job, answer: Answer, stopping: bool = False) -> None:
        """Count one answer; a server that is stopping may turn requests away."""
        if job.kind == "bad":
            good = 400 <= answer.status < 500 and bool(answer.error)
            self.refused_rightly += good
            self.refused_wrongly += not good
        elif answer.left:
            self.left += 1
        elif stopping and answer.status in (0, 503):
            self.turned_away += 1
        elif answer.status != 200 or answer.finish_reason is None:
            self.lost += 1
        elif answer.text == job.expected:
            self.right += 1
        else:
            self.wrong += 1


async def run_all(
    port: int, work: Sequence[Job], clients: int, tally: Tally, retry: bool, stopping: asyncio.Event | None = None
) -> None:
    """Send every request, so many at a time; where the server may be gone, again until it is answered.

    Once `stopping` is set no more are sent.
    """
    waiting = iter(work)
    stopping = stopping or asyncio.Event()

    async def client() -> None:
        for job in waiting:
            if stopping.is_set():
                return
            answer = await ask(port, _PATH, job.body, job.leave_after)
            while (retry and answer.status in (0, 429, 503)) or (
                retry and answer.status == 200 and answer.finish_reason is None and not answer.left
            ):
                tally.again += 1
                await asyncio.sleep(0.2)
                answer = await ask(port, _PATH, job.body, job.leave_after)
            tally.count(job, answer, stopping.is_set())

    await asyncio.gather(*(client() for _ in range(clients)))


async def watched(server: ServerProcess, work: Sequence[Job], clients: int, tally: Tally) -> list[int]:
    """Run the load, and read the server's memory meanwhile."""
    sizes: list[int] = []

    async def watch() -> None:
        while True:
            sizes.append(server.resident())
            await asyncio.sleep(0.25)

    watching = asyncio.create_task(watch())
    await run_all(server.port, work, clients, tally, retry=False)
    watching.cancel()
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--draft", default="lookup+int8")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prompts = [text.prompt[:_CONTEXT] for text in read_prompts(given.prompts).texts[:20]]
    texts = expected_texts(given.model, given.draft, prompts, given.threads)
    port = free_port()
    command = [sys.executable, "-m", "selfspec", "serve", given.model, "--name", "m", "--port", str(port)]
    command += ["--draft", given.draft, "--dtype", "float32", "--threads", str(given.threads), "--max-rows", "32"]
    work = jobs(prompts, texts, given.requests)
    settings = {**vars(given), "model": Path(given.model).name, "prompts": given.prompts.name, "to": None}
    found: dict[str, Any] = {"settings": settings, "environment": environment(torch.device("cpu"))}

    def tell(part: str) -> None:
        print(part, found[part], flush=True)
        if given.to is not None:
            write_json(given.to, found)

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"

        tally, begun = Tally(), time.perf_counter()
        with serving(command, port, given.threads, log) as server:
            sizes = asyncio.run(watched(server, work, given.clients, tally))
            time.sleep(0.5)
            metrics = server.metrics()
        half = sizes[len(sizes) // 2 :]
        third, last = half[: len(half) // 2], half[len(half) // 2 :]
        found["load"] = {
            **vars(tally),
            "kinds": dict(Counter(job.kind for job in work)),
            "seconds": round(time.perf_counter() - begun, 1),
            "rows_left": metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"],
            "cache_bytes_left": metrics["selfspec:cache_bytes"],
            "preemptions": metrics["vllm:num_preemptions_total"],
            "memory_mib": {
                "third quarter": round(sum(third) / len(third) / 2**20, 1),
                "last quarter": round(sum(last) / len(last) / 2**20, 1),
                "most": round(max(sizes) / 2**20, 1),
            },
        }
        tell("load")

        tally = Tally()
        found["kill"] = asyncio.run(killed(command, port, given.threads, log, work[: len(work) // 6], tally))
        tell("kill")

        tally = Tally()
        found["term"] = asyncio.run(terminated(command, port, given.threads, log, work[-len(work) // 6 :], tally))
        tell("term")


async def killed(
    command: Sequence[str], port: int, threads: int, log: Path, work: Sequence[Job], tally: Tally
) -> dict[str, Any]:
    """Kill the server in the middle, start it again; clients ask again until they are answered."""
    with serving(command, port, threads, log) as server:
        running = asyncio.create_task(run_all(port, work, 16, tally, retry=True))
        while tally.right < len(work) // 3:
            await asyncio.sleep(0.05)
        server.kill()

        async with _beside(serving(command, port, threads, log)):
            await running
    return vars(tally)


@asynccontextmanager
async def _beside(started: AbstractContextManager[ServerProcess]) -> AsyncIterator[None]:
    """Enter and leave a context beside the loop, which clients run on."""
    await asyncio.to_thread(started.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(started.__exit__, None, None, None)


async def terminated(
    command: Sequence[str], port: int, threads: int, log: Path, work: Sequence[Job], tally: Tally
) -> dict[str, Any]:
    """Tell the server to stop in the middle: what it has begun it finishes, and it ends well.

    Whoever asks at that moment is turned away. That nobody else is shows in the log of the server, which has as many
    answers as the clients.
    """
    whole = [job for job in work if job.kind == "whole"]
    logged, stopping = log.stat().st_size, asyncio.Event()
    with serving(command, port, threads, log) as server:
        running = asyncio.create_task(run_all(port, whole, 16, tally, retry=False, stopping=stopping))
        while tally.right < len(whole) // 3:
            await asyncio.sleep(0.05)
        in_the_middle = await asyncio.to_thread(server.metrics)
        server.terminate()
        stopping.set()
        await running
        status = await asyncio.to_thread(server.process.wait, 60)
    begun = int(in_the_middle["vllm:num_requests_running"] + in_the_middle["vllm:num_requests_waiting"])
    lines = [json.loads(line) for line in log.read_bytes()[logged:].splitlines() if line.startswith(b"{")]
    answered = sum(line.get("path") == _PATH and line["status"] == 200 for line in lines)
    return {**vars(tally), "running_at_the_signal": begun, "answers_in_its_log": answered, "exit_status": status}


if __name__ == "__main__":
    main()

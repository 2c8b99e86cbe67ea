"""Put a server under load: many clients, a fifth of which leave, a tenth of which are hostile; a kill; a SIGTERM.

    python benchmarks/serving_load.py MODEL --prompts humaneval.jsonl --threads 1 --to load.json

Every whole answer is compared with `spec.generate` of the same row, greedy and seeded. First tokens are timed under
load with and without the hostile ones.
Meanwhile a process of its own asks for /health, twenty times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from loopback import Answer, ServerProcess, ask, free_port, serving
from transformers.utils import logging

import selfspec
from selfspec.decode.text_stream import continuation
from selfspec.files.writing import write_json
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.environment import environment
from selfspec.measure.prompts import read_prompts
from selfspec.measure.stock import bare

_PATH = "/v1/completions"
# Letters of a prompt.
_CONTEXT = 200
_LENGTHS = (8, 16, 24, 48)
_IDLE_CONNECTIONS, _TURNS = 450, 8
_PROBE_SECONDS = 0.05
# After which a client gives up on a grammar.
_PATIENCE = 0.05


_LONG = "([a-z]{1,60}[0-9]{1,60}){1,40}"


def _fitting(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"prompt": "a", "max_tokens": 8, "response_format": form}


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@dataclass(frozen=True)
class Job:
    """A request: its expected answer, whether it is to be refused, and when its client leaves.

    It leaves after so many pieces of the answer, or gives up before any.
    """

    body: bytes
    expected: str | None = None
    leave_after: int | None = None
    refused: bool = False
    gives_up: bool = False
    path: str = _PATH

    @property
    def kind(self) -> str:
        """Kind of the client that sends it."""
        if self.expected is None:
            return "gives up" if self.gives_up else "bad" if self.refused else "heavy"
        return "whole" if self.leave_after is None else "leaves"


def _sent(body: Any, path: str = _PATH) -> Job:
    return Job(json.dumps({"model": "m", **body}).encode(), path=path, refused=True)


def _message(**fields: Any) -> Job:
    said = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    return _sent({**said, **fields}, "/v1/messages")


_BAD: dict[str, Job] = {
    "no JSON": Job(b"{", refused=True),
    "brackets": Job(b"[" * 100_000, refused=True),
    "another model": _sent({"model": "none", "prompt": "a"}),
    "no number": _sent({"prompt": "a", "temperature": "hot"}),
    "an unknown field": _sent({"prompt": "a", "surprise": 1}),
    "3.8 MB of text": _sent({"prompt": "word and " * 430_000}),
    "20,000 values": _sent(_fitting({"enum": [f"value{index}" for index in range(20_000)]})),
    "400 levels": _sent(_fitting(_deep(400))),
    "a schema of itself": _sent(_fitting({"$ref": "#"})),
    "a keyword that no grammar holds": _sent(_fitting({"type": "array", "uniqueItems": True})),
    "500 properties of which some may be missing": _sent(
        _fitting({"type": "object", "properties": {f"p{index}": {} for index in range(500)}, "minProperties": 250})
    ),
    "ids outside the vocabulary": _sent({"prompt": [10**9]}),
    "300,000 objects": _message(system=[{}] * 300_000),
    "450,000 numbers for texts": _message(stop_sequences=[*range(450_000)]),
    "200,000 unknown fields": _sent({"prompt": "a", **{f"x{index}": 1 for index in range(200_000)}}),
    "30,000 messages": _message(messages=[{"role": "user", "content": "a"}] * 30_000),
    "1.3 million ids": _sent({"prompt": [1] * 1_300_000}),
}
"""Requests that are to be refused."""
_SLOW: dict[str, dict[str, Any]] = {
    "a long expression": {"type": "string", "pattern": _LONG},
    "a long expression for names": {"type": "object", "patternProperties": {f"^{_LONG}$": {"type": "integer"}}},
    "450 integers with bounds of 18 digits": {
        "type": "object",
        "properties": {
            f"p{index}": {"type": "integer", "minimum": -(10**17) - index, "maximum": 10**17 + index}
            for index in range(450)
        },
    },
}
_HEAVY = {name: Job(json.dumps({"model": "m", **_fitting(schema)}).encode()) for name, schema in _SLOW.items()}
"""Grammars that are long to compile; each is answered."""


def jobs(prompts: Sequence[str], texts: dict[tuple[int, int, int | None], str], count: int) -> list[Job]:
    """Requests of every kind, in an order that is the same each time."""
    chance = random.Random(0)
    made = []
    for _ in range(count):
        draw = chance.random()
        if draw < 0.1:
            hostile = chance.choice([*_BAD.values(), *_HEAVY.values()])
            gives_up = not hostile.refused and chance.random() < 0.5
            made.append(replace(hostile, gives_up=gives_up))
            continue
        prompt, length, seed = chance.choice(list(texts))
        body: dict[str, Any] = {"model": "m", "prompt": prompts[prompt], "max_tokens": length}
        body |= {"temperature": 0} if seed is None else {"temperature": 0.8, "seed": seed}
        body["stream"] = chance.random() < 0.5
        leaves = draw < 0.3
        body |= {"stream": True} if leaves else {}
        expected = texts[prompt, length, seed]
        made.append(Job(json.dumps(body).encode(), expected, chance.randint(1, 4) if leaves else None))
    return made


def expected_texts(
    place: str, draft: str, prompts: Sequence[str], threads: int
) -> dict[tuple[int, int, int | None], str]:
    """Return the texts of `spec.generate`, by prompt, length and seed."""
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
    """Counts the outcomes of requests."""

    right: int = 0
    wrong: int = 0
    lost: int = 0
    refused_rightly: int = 0
    refused_wrongly: int = 0
    left: int = 0
    gave_up: int = 0
    heavy: int = 0
    again: int = 0
    turned_away: int = 0
    seconds: float = 0.0
    first_tokens: list[float] = field(default_factory=list)

    @property
    def told(self) -> dict[str, Any]:
        """Return the counts, and when first tokens came."""
        found = {name: value for name, value in vars(self).items() if name not in ("first_tokens", "seconds")}
        if len(self.first_tokens) > 1:
            cuts = statistics.quantiles(self.first_tokens, n=20)
            found["first_token_ms"] = {"median": _ms(cuts[9]), "95th of 100": _ms(cuts[18])}
        return found

    def count(self, job: Job, answer: Answer, stopping: bool = False) -> None:
        """Count one answer; a server that is stopping may turn requests away."""
        if answer.times and job.expected is not None:
            self.first_tokens.append(answer.times[0] - answer.begun)
        if job.kind == "bad":
            # The body of a refusal may be cut off by the connection's end while the request is still sent.
            good = 400 <= answer.status < 500 and bool(answer.error)
            self.refused_rightly += good
            self.refused_wrongly += not good
        elif job.gives_up:
            self.gave_up += 1
        elif answer.left:
            self.left += 1
        elif job.kind == "heavy":
            self.heavy += answer.status == 200
            self.lost += answer.status != 200
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

    async def answered(job: Job) -> Answer:
        asked = ask(port, job.path, job.body, job.leave_after)
        if not job.gives_up:
            return await asked
        with suppress(TimeoutError):
            return await asyncio.wait_for(asked, _PATIENCE)
        return Answer(left=True)

    async def client() -> None:
        for job in waiting:
            if stopping.is_set():
                return
            answer = await answered(job)
            while (
                retry
                and not answer.left
                and (answer.status in (0, 429, 503) or (answer.status == 200 and answer.finish_reason is None))
            ):
                tally.again += 1
                await asyncio.sleep(0.2)
                answer = await answered(job)
            tally.count(job, answer, stopping.is_set())

    await asyncio.gather(*(client() for _ in range(clients)))


async def watched(server: ServerProcess, work: Sequence[Job], clients: int, tally: Tally) -> list[int]:
    """Run the load beside connections that say nothing, and read the server's memory meanwhile."""
    sizes: list[int] = []

    async def watch() -> None:
        while True:
            sizes.append(server.resident())
            await asyncio.sleep(0.25)

    idle = [(await asyncio.open_connection("127.0.0.1", server.port))[1] for _ in range(_IDLE_CONNECTIONS)]
    watching, begun = asyncio.create_task(watch()), time.perf_counter()
    await run_all(server.port, work, clients, tally, retry=False)
    tally.seconds += time.perf_counter() - begun
    watching.cancel()
    for connection in idle:
        connection.close()
    return sizes


@contextmanager
def probed(port: int) -> Iterator[list[float]]:
    """Ask for /health from a process of its own; the seconds of each answer are there afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_probe, args=(port, theirs), daemon=True)
    process.start()
    seconds: list[float] = []
    try:
        ours.recv()
        yield seconds
    finally:
        ours.send(None)
        seconds += ours.recv()
        process.join()


def _probe(port: int, told: Connection) -> None:
    told.send(None)
    seconds = []
    while not told.poll(_PROBE_SECONDS):
        begun = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        if connection.getresponse().status != 200:
            raise RuntimeError("/health is not answered with 200")
        connection.close()
        seconds.append(time.perf_counter() - begun)
    told.send(seconds)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--draft", default="lookup+int8")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--keep", default="4MiB", help="bound of the kept caches")
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
    command += ["--keep", given.keep]
    work = jobs(prompts, texts, given.requests)
    settings = {**vars(given), "model": Path(given.model).name, "prompts": given.prompts.name, "to": None}
    found: dict[str, Any] = {"settings": settings, "environment": environment(torch.device("cpu"))}

    def tell(part: str) -> None:
        print(part, found[part], flush=True)
        if given.to is not None:
            write_json(given.to, found)

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"

        with serving(command, port, given.threads, log) as server:
            tally, calm, sizes = Tally(), Tally(), list[int]()
            health: list[float] = []
            # By turns, since the machine may have other work.
            for start in range(0, len(work), len(work) // _TURNS):
                part = work[start : start + len(work) // _TURNS]
                without = [job for job in part if job.expected is not None]
                asyncio.run(watched(server, without, given.clients, calm))
                with probed(port) as seconds:
                    sizes += asyncio.run(watched(server, part, given.clients, tally))
                health += seconds
            time.sleep(0.5)
            metrics = server.metrics()
        half = sizes[len(sizes) // 2 :]
        third, last = half[: len(half) // 2], half[len(half) // 2 :]
        found["without_hostile"] = {**calm.told, "seconds": round(calm.seconds, 1)}
        tell("without_hostile")
        found["load"] = {
            **tally.told,
            "kinds": dict(Counter(job.kind for job in work)),
            "seconds": round(tally.seconds, 1),
            "health_ms": {
                "median": _ms(statistics.median(health)),
                "99th of 100": _ms(statistics.quantiles(health, n=100)[98]),
                "most": _ms(max(health)),
                "asked": len(health),
            },
            "rows_left": metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"],
            "cache_bytes_left": metrics["selfspec:cache_bytes"],
            "kept_bytes": metrics["selfspec:kept_cache_bytes"],
            "prefix_hits": metrics["vllm:prefix_cache_hits_total"],
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
    return tally.told


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
    """Tell the server to stop in the middle: what it has begun it finishes, and it ends well, hostile ones or not.

    Whoever asks at that moment is turned away. That nobody else is shows in the log of the server, which has as many
    answers as the clients.
    """
    whole = [job for job in work if job.kind == "whole"]
    hostile = [*_HEAVY.values(), *(replace(job, gives_up=True) for job in _HEAVY.values()), *_BAD.values()]
    logged, stopping, beside = log.stat().st_size, asyncio.Event(), Tally()
    with serving(command, port, threads, log) as server:
        running = asyncio.create_task(run_all(port, whole, 16, tally, retry=False, stopping=stopping))
        while tally.right < len(whole) // 3:
            await asyncio.sleep(0.05)
        in_the_middle = await asyncio.to_thread(server.metrics)
        attack = asyncio.create_task(run_all(port, hostile, 16, beside, retry=False))
        await asyncio.sleep(_PATIENCE)
        told = time.perf_counter()
        server.process.terminate()
        stopping.set()
        await asyncio.gather(running, attack)
        status = await asyncio.to_thread(server.process.wait, 60)
        seconds = round(time.perf_counter() - told, 2)
    begun = int(in_the_middle["vllm:num_requests_running"] + in_the_middle["vllm:num_requests_waiting"])
    lines = [json.loads(line) for line in log.read_bytes()[logged:].splitlines() if line.startswith(b"{")]
    answered = sum(line.get("path") == _PATH and line["status"] == 200 for line in lines)
    return {
        **tally.told,
        "running_at_the_signal": begun,
        "answers_in_its_log": answered,
        "of_them_grammars": beside.heavy,
        "seconds_to_stop": seconds,
        "exit_status": status,
    }


if __name__ == "__main__":
    main()

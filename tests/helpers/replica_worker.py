"""Two replicas under load by Ray Serve, one of which is killed: run as a program, from tests/processes.

    python replica_worker.py FOLDER ANSWER.json

It asks for texts from several threads, and asks again for those that fail, as clients do. After a third of the answers
it kills the process that gave the last one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

# Ray keeps to this machine, and tells nobody.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}

import ray
import torch
from ray import serve
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route

from selfspec.serve.app import Replicas

REQUESTS, CLIENTS, TRIES = 120, 6, 20
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


def build(folder: str) -> Starlette:
    import selfspec
    from selfspec.measure.checkpoint import load_checkpoint

    torch.set_num_threads(1)
    spec, lock = selfspec.wrap(load_checkpoint(folder, "float32", "cpu").model, "exit:2"), threading.Lock()

    def text(ids: list[int]) -> list[int]:
        with lock:
            found: list[int] = spec.generate(torch.tensor([ids]), **OPTIONS).sequences[0].tolist()
        return found

    async def answer(request: Any) -> JSONResponse:
        asked = await request.json()
        return JSONResponse({"pid": os.getpid(), "ids": await run_in_threadpool(text, asked["ids"])})

    return Starlette(routes=[Route("/answer", answer, methods=["POST"])])


def main() -> None:
    folder, to = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    replicas = Replicas(lambda: build(folder), least=2, most=2, resources={"num_cpus": 1})
    serve.run(replicas.bound(), route_prefix="/")

    answers: dict[int, list[int]] = {}
    pids: list[int] = []
    repeated: list[int] = []
    killed: list[int] = []
    lock = threading.Lock()

    def ask(number: int) -> None:
        body = json.dumps({"ids": [1, 3 + number % 40, 50 + number % 7]}).encode()
        for _ in range(TRIES):
            request = Request(
                f"http://127.0.0.1:{port}/answer", data=body, headers={"Content-Type": "application/json"}
            )
            try:
                with urlopen(request, timeout=30) as response:
                    found = json.loads(response.read())
                break
            except (URLError, ConnectionError, TimeoutError):
                repeated.append(number)
                time.sleep(0.2)
        else:
            return
        with lock:
            answers[number] = found["ids"]
            pids.append(found["pid"])
            if len(answers) >= REQUESTS // 3 and not killed:
                killed.append(found["pid"])
                os.kill(found["pid"], signal.SIGKILL)

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(ask, range(REQUESTS)))
    # A new replica takes the place of the one that died.
    ends = time.monotonic() + 60
    later: set[int] = set()
    while len(later) < 2 and time.monotonic() < ends:
        before = len(pids)
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(ask, range(REQUESTS, REQUESTS + CLIENTS)))
        later |= set(pids[before:])
    found = {"answers": answers, "pids": pids, "repeated": repeated, "killed": killed, "later": sorted(later)}
    Path(to).write_text(json.dumps(found))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

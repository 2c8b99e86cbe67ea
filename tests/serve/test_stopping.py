"""A server in a process of its own that is told to stop, while something in it does not end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from helpers.saved_folders import checkpoint_folder

# A prompt of text is never read to its end, and no pass over one of token ids ends.
PROGRAM = """
import sys, threading
from selfspec.cli.app import main
from selfspec.serve.scheduler import Scheduler
from selfspec.serve.served import Served
wait = threading.Event().wait
Served.check_text = lambda *_: wait()
Scheduler.step = lambda _: wait()
sys.exit(main())
"""
PROMPTS = ("Once", [1, 3])


@contextmanager
def stuck(seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A server with requests that never come to their end."""
    words = ["serve", str(checkpoint_folder()), "--port", "0", "--name", "stories", "--output", "json"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words, "--stop-seconds", str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
        with ExitStack() as connections:
            for prompt in PROMPTS:
                connection = connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                body = json.dumps({"model": "stories", "prompt": prompt, "stream": True}).encode()
                head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
                connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(0.5)
            yield process
    finally:
        process.kill()
        process.communicate()


def test_sigterm_ends_the_process_in_time_whatever_runs() -> None:
    with stuck(2) as process:
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        _, log = process.communicate(timeout=20)
    assert time.monotonic() - begun < 3
    assert process.returncode == 0
    assert [json.loads(line) for line in log.splitlines()][-1]["message"].startswith("something still ran")


def test_a_second_interrupt_ends_it_at_once_and_writes_no_traceback() -> None:
    with stuck(60) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=5)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in log

"""`selfspec serve`: a process that serves, stops well, and says before it loads anything what it cannot do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from helpers.http_server import asked
from helpers.running import Invoke
from helpers.tokenizers import written
from selfspec.cli.json_schema import OUTPUTS


def test_serves_and_finishes_what_runs_when_it_is_told_to_stop(folder: str, tmp_path: Path) -> None:
    words = ["serve", folder, "--port", "0", "--name", "stories", "--template", written(tmp_path), "--output", "json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "selfspec", *words, "--draft", "exit:3", "--draft-length", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        told = json.loads(process.stdout.readline())
        OUTPUTS["serve"].model_validate(told, strict=True)
        assert told["model"] == "stories"
        assert told["url"].startswith("http://127.0.0.1:")
        port = int(told["url"].rpartition(":")[2])
        body = {"model": "stories", "messages": [{"role": "user", "content": "Tell me of Lily."}], "max_tokens": 4}
        assert asked(port, "/v1/chat/completions", body).status == 200
        replies = []
        long = {"model": "stories", "prompt": "Once", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        thread = threading.Thread(target=lambda: replies.append(asked(port, "/v1/completions", long)))
        thread.start()
        while b'num_requests_running{model_name="stories"} 1.0' not in asked(port, "/metrics").raw:
            assert thread.is_alive()
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert replies[0].status == 200
        assert replies[0].body["usage"]["completion_tokens"] == 300
        rest, log = process.communicate(timeout=60)
        assert (process.returncode, rest) == (0, "")
        lines = [each for each in map(json.loads, log.splitlines()) if each.get("path") == "/v1/completions"]
        assert {"request_id", "status", "completion_tokens"} <= lines[0].keys()
        assert "Lily" not in log
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken(invoke: Invoke, folder: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ending = invoke("serve", folder, "--port", str(taken.getsockname()[1]))
    assert ending.status == 2
    assert "choose another port" in ending.stderr


def test_without_the_libraries_it_names_the_remedy(
    invoke: Invoke, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    ending = invoke("serve", folder)
    assert ending.status == 2
    assert "pip install 'selfspec[serve]'" in ending.stderr

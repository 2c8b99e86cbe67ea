"""`selfspec chat` and `selfspec serve`: conversations in a terminal and over HTTP, how they end, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from helpers.http_server import asked
from helpers.json_schema import OUTPUTS
from helpers.snippets import Invoke, Said
from helpers.tokenizers import PLAIN, written

ASKED = b"Tell me of Lily.\nAnd then?\n"


@pytest.fixture
def template(tmp_path: Path) -> str:
    return written(tmp_path)


def words(folder: str, template: str, *more: str) -> list[str]:
    few = [] if "--max-new-tokens" in more else ["--max-new-tokens", "16"]
    return ["chat", folder, "--template", template, *few, *more]


def test_answers_lines(invoke: Invoke, folder: str, template: str) -> None:
    ending = invoke(*words(folder, template), stdin=ASKED)
    assert ending.status == 0
    assert len(ending.stdout) > 20
    assert ending.stderr.count("16 tokens") == 2
    assert "of 16 prompt tokens kept" not in ending.stdout
    # A speed is said of what is long enough.
    assert "a second" not in ending.stderr
    longer = invoke("chat", folder, "--template", template, "--max-new-tokens", "40", stdin=ASKED)
    assert "a second" in longer.stderr


def test_json_says_all(invoke: Invoke, folder: str, template: str) -> None:
    ending = invoke(*words(folder, template, "--output", "json", "--system", "Be kind."), stdin=ASKED)
    found = json.loads(ending.stdout)
    assert (ending.status, ending.stderr) == (0, "")
    assert [each["role"] for each in found["messages"]] == ["system", *["user", "assistant"] * 2]
    first, second = found["turns"]
    assert first["kept_tokens"] == 0 < second["kept_tokens"] < second["prompt_tokens"]


def test_an_answer_is_predicted(invoke: Invoke, folder: str, template: str, tmp_path: Path) -> None:
    options, edited = ("--draft", "none", "--temperature", "0", "--output", "json"), tmp_path / "edited.txt"
    plain = json.loads(invoke(*words(folder, template, *options), stdin=ASKED).stdout)
    edited.write_text(plain["messages"][1]["content"].strip(), encoding="utf-8")
    found = json.loads(invoke(*words(folder, template, *options), stdin=f"/predict {edited}\n".encode() + ASKED).stdout)
    assert found["messages"] == plain["messages"]
    assert found["turns"][0]["accepted"] > 8 > found["turns"][1]["accepted"]


def test_what_was_read_and_said_is_kept(said: Said, tmp_path: Path) -> None:
    """Where a text is cut into the tokens that the model wrote, as behind a line break."""
    template = written(tmp_path, PLAIN.replace("assistant:", "assistant:\n").replace("}}: {{", "}}:\n{{"))
    first, second = said(*words("demo", template), stdin=b"def walk(path):\nnow in reverse\n")["turns"]
    assert second["kept_tokens"] == first["prompt_tokens"] + first["new_tokens"] - 1


def test_a_seed_repeats_a_conversation(invoke: Invoke, folder: str, template: str) -> None:
    sampled = words(folder, template, "--temperature", "1", "--seed", "3", "--draft", "exit:3")
    first, second = (invoke(*sampled, stdin=ASKED).stdout for _ in range(2))
    assert first == second


def test_saves_and_forgets(invoke: Invoke, folder: str, template: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = f"Hello.\n/save {file}\n/reset\n/save {file}\n//slash\n/help\n/quit\nnever read\n".encode()
    ending = invoke(*words(folder, template, "--output", "json"), stdin=lines)
    assert ending.status == 0
    assert json.loads(file.read_text())["messages"] == []
    assert [each["content"] for each in json.loads(ending.stdout)["messages"]][:1] == ["/slash"]
    # What another chat saved is not written over.
    ending = invoke(*words(folder, template), stdin=f"Hello.\n/save {file}\n".encode())
    assert ending.status == 1
    assert "is there already" in ending.stderr
    assert json.loads(file.read_text())["messages"] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [(b"/save\n", "/save FILE"), (b"/nothing\n", "/help"), (b"\xff\n", "not UTF-8"), (b"Lily " * 600, "/reset")],
)
def test_refuses_by_name(invoke: Invoke, folder: str, template: str, line: bytes, said: str) -> None:
    ending = invoke(*words(folder, template), stdin=line)
    assert ending.status == 2
    assert said in ending.stderr


def test_a_line_that_is_no_text_costs_no_answer(invoke: Invoke, folder: str, template: str) -> None:
    lines = b"Tell me of Lily.\n\xff\xfe\nAnd then?\n"
    ending = invoke(*words(folder, template, "--output", "json"), stdin=lines)
    found = json.loads(ending.stdout)
    assert ending.status == 2
    assert "UTF-8" in found["error"]["message"]
    assert len(found["turns"]) == 2
    # So does one that ends it.
    ending = invoke(*words(folder, template, "--output", "json"), stdin=b"Tell me of Lily.\n/nothing\nAnd then?\n")
    assert len(json.loads(ending.stdout)["turns"]) == 1


@pytest.fixture
def endless(folder: str, tmp_path: Path) -> str:
    """A checkpoint whose answers end at nothing but their length, which is beyond what a test waits for."""
    copied = tmp_path / "endless"
    shutil.copytree(folder, copied, copy_function=shutil.copyfile)
    for name in ("config.json", "generation_config.json"):
        described = json.loads((copied / name).read_text())
        described = {**described, "eos_token_id": None, "max_position_embeddings": 10**6}
        (copied / name).write_text(json.dumps(described if name == "config.json" else {"eos_token_id": None}))
    return str(copied)


@pytest.fixture
def terminal(endless: str, template: str, request: pytest.FixtureRequest) -> Iterator[pexpect.spawn]:
    command = words(endless, template, "--max-new-tokens", "900000", "--device", "cpu")
    environment = {**os.environ, "TERM": getattr(request, "param", "dumb")}
    opened = pexpect.spawn(sys.executable, ["-m", "selfspec", *command], env=environment, timeout=60)
    # What is typed is typed at once.
    opened.delaybeforesend = None
    yield opened
    opened.close(force=True)


def interrupted(terminal: pexpect.spawn, words: bytes) -> None:
    """Send what Ctrl-C sends until words are there, many times at most."""
    for _ in range(50):
        terminal.kill(signal.SIGINT)
        if sees(terminal, words):
            break


def sees(terminal: pexpect.spawn, words: bytes, seconds: float = 0.3) -> bool:
    """Whether words are there within some time; what comes before them is forgotten then."""
    found: int = terminal.expect_exact([words, pexpect.TIMEOUT], timeout=seconds)
    return found == 0


def assert_ends_well(terminal: pexpect.spawn) -> None:
    terminal.expect(pexpect.EOF)
    assert terminal.wait() == 0


@pytest.mark.tools
def test_an_interrupt_ends_the_answer_and_not_the_program(terminal: pexpect.spawn) -> None:
    for message, ending in ((b"Tell me of Lily.", b"ended here"), (b"And?", b"; ")):
        terminal.expect_exact(b"> ")
        terminal.send(message + b"\n")
        terminal.expect_exact(message + b"\r\n")
        # Some of the answer is there.
        terminal.expect_exact(b" ")
        terminal.kill(signal.SIGINT)
        terminal.expect_exact(ending)
    # What was asked, and as much of the answer as is cut into the tokens that the model wrote.
    assert int(terminal.readline().partition(b" of ")[0]) > 10
    terminal.expect_exact(b"> ")
    # One that comes just before the line is read waits for the next key, so it is sent until it is seen.
    interrupted(terminal, b"/quit leaves")
    terminal.send(b"/reset\n")
    terminal.expect_exact(b"forgotten")
    terminal.expect_exact(b"> ")
    terminal.send(b"\x04")
    assert_ends_well(terminal)


@pytest.mark.tools
@pytest.mark.parametrize("terminal", ["xterm"], indirect=True)
def test_what_is_pasted_is_one_message(terminal: pexpect.spawn, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    terminal.expect_exact(b"> ")
    terminal.send(b"\x1b[200~One day\nLily\nslept.\x1b[201~\r")
    terminal.expect_exact(b"slept.")
    # Some of the answer is there: interrupted before it is read, the message would be dropped.
    terminal.expect_exact(b"\x1b[?2004l")
    terminal.expect_exact(b" ")
    interrupted(terminal, b"ended")
    terminal.expect_exact(b"> ")
    terminal.send(b"/save " + os.fsencode(file) + b"\r")
    terminal.expect_exact(b"saved 2 messages")
    assert json.loads(file.read_text())["messages"][0]["content"] == "One day\nLily\nslept."


@pytest.mark.tools
def test_many_interrupts_end_one_answer_and_nothing_else(terminal: pexpect.spawn) -> None:
    terminal.expect_exact(b"> ")
    for _ in range(4):
        terminal.send(b"Tell me of Lily.\n")
        terminal.expect_exact(b"Lily.\r\n")
        terminal.expect_exact(b" ")
        for _ in range(40):
            terminal.kill(signal.SIGINT)
            time.sleep(0.001)
        terminal.expect_exact(b"ended here")
        terminal.expect_exact(b"> ")
        # The last of them may come only now, and cuts the line that is being typed.
        while sees(terminal, b"/quit leaves", 2):
            pass
    terminal.send(b"\n/quit\n")
    assert_ends_well(terminal)


@pytest.mark.tools
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

"""`selfspec chat`: what is piped in is answered over one cache; commands, files, and what is refused."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.chat_templates import PLAIN, written
from helpers.running import Invoke

ASKED = b"Tell me of Lily.\nAnd then?\n"


@pytest.fixture
def template(tmp_path: Path) -> str:
    return written(tmp_path)


def words(folder: str, template: str, *more: str) -> list[str]:
    return ["chat", folder, "--template", template, "--max-new-tokens", "16", *more]


def test_answers_lines(invoke: Invoke, folder: str, template: str) -> None:
    ending = invoke(*words(folder, template), stdin=ASKED)
    assert ending.status == 0
    assert len(ending.stdout) > 20
    assert ending.stderr.count("16 tokens") == 2
    assert "of 16 prompt tokens kept" not in ending.stdout


def test_json_says_all(invoke: Invoke, folder: str, template: str) -> None:
    ending = invoke(*words(folder, template, "--output", "json", "--system", "Be kind."), stdin=ASKED)
    found = json.loads(ending.stdout)
    assert (ending.status, ending.stderr) == (0, "")
    assert [each["role"] for each in found["messages"]] == ["system", *["user", "assistant"] * 2]
    first, second = found["turns"]
    assert first["kept_tokens"] == 0 < second["kept_tokens"] < second["prompt_tokens"]


def test_what_was_read_and_said_is_kept(invoke: Invoke, tmp_path: Path) -> None:
    """Where a text is cut into the tokens that the model wrote, as behind a line break."""
    template = written(tmp_path, PLAIN.replace("assistant:", "assistant:\n").replace("}}: {{", "}}:\n{{"))
    ending = invoke(*words("demo", template, "--output", "json"), stdin=b"def walk(path):\nnow in reverse\n")
    first, second = json.loads(ending.stdout)["turns"]
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


@pytest.mark.parametrize(
    ("line", "said"),
    [(b"/save\n", "/save FILE"), (b"/nothing\n", "/help"), (b"\xff\n", "not UTF-8"), (b"Lily " * 600, "/reset")],
)
def test_refuses_by_name(invoke: Invoke, folder: str, template: str, line: bytes, said: str) -> None:
    ending = invoke(*words(folder, template), stdin=line)
    assert ending.status == 2
    assert said in ending.stderr


def test_a_file_that_is_there_is_not_written_over(invoke: Invoke, folder: str, template: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    ending = invoke(*words(folder, template), stdin=f"/save {file}\n".encode())
    assert ending.status == 1
    assert "is there already" in ending.stderr
    assert file.read_text() == "mine"


def test_without_a_template_there_is_a_clear_word(invoke: Invoke, folder: str) -> None:
    ending = invoke("chat", folder, stdin=ASKED)
    assert ending.status == 2
    assert "has no chat template" in ending.stderr
    assert "--template FILE" in ending.stderr
    assert "selfspec generate" in ending.stderr


def test_a_template_that_is_not_there(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    ending = invoke("chat", folder, "--template", str(tmp_path / "none.jinja"), stdin=ASKED)
    assert ending.status == 2
    assert "cannot be read" in ending.stderr


def test_an_interrupt_ends_the_answer_and_not_the_program(folder: str, template: str) -> None:
    """In a real terminal: the next message is answered, and the end of the input leaves with status 0."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "selfspec", *words(folder, template, "--device", "cpu", "--max-new-tokens", "450")]
    environment = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(
        command, stdin=there, stdout=there, stderr=there, env=environment, start_new_session=True
    )
    os.close(there)
    seen = b""

    def read_until(words: bytes, seconds: float = 20) -> None:
        nonlocal seen
        until = time.monotonic() + seconds
        while words not in seen:
            assert time.monotonic() < until, seen
            if select.select([here], [], [], 0.2)[0]:
                seen += os.read(here, 4096)
        seen = seen.partition(words)[2]

    try:
        read_until(b"> ")
        os.write(here, b"Tell me of Lily.\n")
        read_until(b"Lily.\r\n")
        # Some of the answer is there.
        read_until(b" ")
        process.send_signal(signal.SIGINT)
        read_until(b"ended here")
        read_until(b"> ")
        # Once the line is being read: an interrupt just before that waits for the next key.
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        read_until(b"/quit leaves")
        os.write(here, b"/reset\n")
        read_until(b"forgotten")
        read_until(b"> ")
        os.write(here, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(here)

"""`selfspec chat`: what is piped in is answered over one cache; commands, files, and what is refused."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.running import Invoke
from helpers.tokenizers import PLAIN, written

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


def test_a_speed_is_said_of_what_is_long_enough(invoke: Invoke, folder: str, template: str) -> None:
    few = invoke(*words(folder, template), stdin=ASKED).stderr
    assert "a second" not in few
    more = invoke("chat", folder, "--template", template, "--max-new-tokens", "40", stdin=ASKED).stderr
    assert "a second" in more


def test_a_file_that_is_there_is_not_written_over(invoke: Invoke, folder: str, template: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    ending = invoke(*words(folder, template), stdin=f"/save {file}\n".encode())
    assert ending.status == 1
    assert "is there already" in ending.stderr
    assert file.read_text() == "mine"


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


class Terminal:
    """A chat in a real terminal."""

    def __init__(self, command: list[str], file: Path, kind: str = "dumb") -> None:
        self.file = file
        self._here, there = pty.openpty()
        environment = {**os.environ, "TERM": kind}
        self.process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=there, env=environment, start_new_session=True
        )
        os.close(there)
        self._seen = b""

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._here, keys)

    def sees(self, words: bytes, seconds: float = 0.3) -> bool:
        """Whether words are there within some time; what comes before them is forgotten."""
        until = time.monotonic() + seconds
        while words not in self._seen:
            if time.monotonic() > until:
                return False
            if select.select([self._here], [], [], 0.05)[0]:
                self._seen += os.read(self._here, 4096)
        self._seen = self._seen.partition(words)[2]
        return True

    def wait_for(self, words: bytes) -> None:
        """Wait for words."""
        assert self.sees(words, 60), self._seen

    def line(self) -> bytes:
        """What follows up to the end of the line."""
        for _ in range(600):
            if b"\n" in self._seen:
                break
            if select.select([self._here], [], [], 0.1)[0]:
                self._seen += os.read(self._here, 4096)
        return self._seen.partition(b"\n")[0]

    def interrupt(self) -> None:
        """Send what Ctrl-C sends."""
        self.process.send_signal(signal.SIGINT)

    def repeat(self, act: Callable[[], None], words: bytes) -> None:
        """Do something until words are there, many times at most."""
        for _ in range(50):
            act()
            if self.sees(words):
                break

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self._here)


@pytest.fixture
def terminal(endless: str, template: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    command = words(endless, template, "--max-new-tokens", "900000", "--device", "cpu")
    kind = getattr(request, "param", "dumb")
    opened = Terminal([sys.executable, "-m", "selfspec", *command], tmp_path / "talk.json", kind)
    yield opened
    opened.close()


@pytest.mark.tools
def test_an_interrupt_ends_the_answer_and_not_the_program(terminal: Terminal) -> None:
    """In a real terminal: the next message is answered, and the end of the input leaves with status 0."""
    for message, ending in ((b"Tell me of Lily.", b"ended here"), (b"And?", b"; ")):
        terminal.wait_for(b"> ")
        terminal.type(message + b"\n")
        terminal.wait_for(message + b"\r\n")
        # Some of the answer is there.
        terminal.wait_for(b" ")
        terminal.interrupt()
        terminal.wait_for(ending)
    # What was asked, and as much of the answer as is cut into the tokens that the model wrote.
    assert int(terminal.line().partition(b" of ")[0]) > 10
    terminal.wait_for(b"> ")
    # One that comes just before the line is read waits for the next key, so it is sent until it is seen.
    terminal.repeat(terminal.interrupt, b"/quit leaves")
    terminal.type(b"/reset\n")
    terminal.wait_for(b"forgotten")
    terminal.wait_for(b"> ")
    terminal.type(b"\x04")
    assert terminal.process.wait(60) == 0


@pytest.mark.parametrize("terminal", ["xterm"], indirect=True)
def test_what_is_pasted_is_one_message(terminal: Terminal) -> None:
    terminal.wait_for(b"> ")
    terminal.type(b"\x1b[200~One day\nLily\nslept.\x1b[201~\r")
    terminal.wait_for(b"slept.")
    # Some of the answer is there: interrupted before it is read, the message would be dropped.
    terminal.wait_for(b"\x1b[?2004l")
    terminal.wait_for(b" ")
    terminal.repeat(terminal.interrupt, b"ended")
    terminal.wait_for(b"> ")
    terminal.type(b"/save " + os.fsencode(terminal.file) + b"\r")
    terminal.wait_for(b"saved 2 messages")
    assert json.loads(terminal.file.read_text())["messages"][0]["content"] == "One day\nLily\nslept."


@pytest.mark.tools
def test_many_interrupts_end_one_answer_and_nothing_else(terminal: Terminal) -> None:
    """Also those that come while the answer is being ended."""
    terminal.wait_for(b"> ")
    for _ in range(4):
        terminal.type(b"Tell me of Lily.\n")
        terminal.wait_for(b"Lily.\r\n")
        terminal.wait_for(b" ")
        for _ in range(40):
            terminal.interrupt()
            time.sleep(0.001)
        terminal.wait_for(b"ended here")
        terminal.wait_for(b"> ")
        # The last of them may come only now, and cuts the line that is being typed.
        while terminal.sees(b"/quit leaves", 2):
            pass
    terminal.type(b"\n/quit\n")
    assert terminal.process.wait(60) == 0

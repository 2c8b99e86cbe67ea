"""`selfspec chat`: what is piped in is answered over one cache; commands, files, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
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


@pytest.fixture
def terminal(endless: str, template: str, request: pytest.FixtureRequest) -> Iterator[pexpect.spawn]:
    """A chat in a real terminal, dumb or of another kind."""
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
    """That it leaves by itself, with status 0."""
    terminal.expect(pexpect.EOF)
    assert terminal.wait() == 0


@pytest.mark.tools
def test_an_interrupt_ends_the_answer_and_not_the_program(terminal: pexpect.spawn) -> None:
    """In a real terminal: the next message is answered, and the end of the input leaves with status 0."""
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
    """Also those that come while the answer is being ended."""
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

"""Every code block of README and of docs/: Python runs, commands run or are parsed, and what can do neither says why.

A block that cannot run follows `<!--- skip: next "REASON" -->`, which readers do not see; `pytest -m docs -rs` lists
them. What a page takes for granted stands in `<!--- invisible-code-block: python ... -->`; so does what a block has to
have printed, which `printed()` returns there.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers.utils import logging
from typer.core import TyperGroup

from helpers.snippets import ROOT, Invoke
from selfspec.cli.app import app
from selfspec.measure.embedded import PROMPTS, checkpoint_folder
from selfspec.tools.lab.study import read_study

pytestmark = pytest.mark.docs
pytest.importorskip("sybil", reason="needs the extra docs")

from sybil import Example, Sybil  # noqa: E402
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser  # noqa: E402
from sybil.typing import Parser  # noqa: E402

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
    "benchmarks/device/README.md",
    "benchmarks/results/ablate/README.md",
]
# Run on a model and examples of its own by tests/adapters/test_adapters.py.
ELSEWHERE = {"docs/your_own_adapter.md"}
# Commands that end within seconds on the embedded model: these run. Of the others every option and value is parsed.
RUN = {"export", "generate", "inspect"}
# What commands that take minutes write, and others read.
_WRITTEN = re.compile(r"auto|FASTER|HEADS?|skip\.json|profile\.json")
# Languages of blocks that nobody runs: what was printed, and declarations.
SHOWN = {"json", "jsonl", "text"}

_SKIPPED = re.compile(r'^<!--- skip: next (?:if\(.*reason=)?"(.+?)"\)? -->$', re.MULTILINE)
_FENCE = re.compile(r"^```(\w*)", re.MULTILINE)
_PYTHON = re.compile(r"^```python\n(.*?)^```\n+(<!---.*?-->)?", re.DOTALL | re.MULTILINE)
_AS_IT_COMES = re.compile(r"\.stream\(|streamer=")
_INDENTED = re.compile(r"(?:^|\n)\n    (?:selfspec|python|pip) ")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "MODEL").symlink_to(checkpoint_folder())
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "to").mkdir()
    (tmp_path / "path" / "to" / "checkpoint").symlink_to(checkpoint_folder())
    (tmp_path / "prompt.txt").write_text(PROMPTS[0])
    for name in ("prompts.jsonl", "text.jsonl", "heldout.jsonl"):
        lines = [{"text": text, "prompt": text, "kind": "code"} for text in PROMPTS]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("SELFSPEC_PROFILES", str(tmp_path / "profiles"))
    bars, precision = logging.is_progress_bar_enabled(), torch.get_default_dtype()
    logging.disable_progress_bar()
    yield tmp_path
    torch.set_default_dtype(precision)
    if bars:
        logging.enable_progress_bar()


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_the_blocks_of_a_page_run(
    page: str, place: Path, invoke: Invoke, subtests: pytest.Subtests, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_commands(block: Example) -> None:
        for line in commands_of(block.parsed):
            check_command(line, invoke)

    def check_study(block: Example) -> None:
        (place / "study.toml").write_text(block.parsed)
        read_study(place / "study.toml")

    parsers: list[Parser] = [
        SkipParser(),
        PythonCodeBlockParser(),
        CodeBlockParser("sh", check_commands),
        CodeBlockParser("toml", check_study),
    ]
    document = Sybil(parsers=parsers, pattern="*.md", path=str(ROOT)).parse(ROOT / page)
    shown = [""]
    document.namespace["missing"] = lambda package: find_spec(package) is None
    # What the block before has printed, for a block that compares it.
    document.namespace["printed"] = lambda: shown[0]
    for block in document.examples():
        with subtests.test(f"{page}:{block.line}"):
            capsys.readouterr()
            block.evaluate()
            shown[0] = capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_is_not_run_says_why(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("skip: ") == len(_SKIPPED.findall(text))
    assert set(_FENCE.findall(text)) - {""} <= {"python", "sh", "toml", *SHOWN}
    # Indented blocks have no language: nothing that is typed in is to stand in one.
    assert not _INDENTED.search(text)
    # Text that is printed as it comes is compared with the whole.
    for body, behind in _PYTHON.findall(text):
        if _AS_IT_COMES.search(body):
            assert "printed()" in behind, f"{page}: compare what this block prints, in an invisible one: {body}"


def commands_of(block: str) -> Iterator[list[str]]:
    """The words of each command of a block, without comments; `\\` continues a line."""
    for line in block.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def check_command(words: list[str], invoke: Invoke) -> None:
    """Run a command that is quick, or see that its options are there and take these values."""
    assert words[0] == "selfspec", f"{shlex.join(words)}: only commands of selfspec run; skip the block, with a reason"
    words, stdin = words[1:], b""
    if "<" in words:
        stdin = Path(words[words.index("<") + 1]).read_bytes()
        words = words[: words.index("<")]
    if (words[0] in RUN or Path(words[0]).exists()) and not any(map(_WRITTEN.search, words)):
        short = ["--max-new-tokens", "8"] if words[0] == "generate" else []
        ending = invoke(*words, *short, stdin=stdin)
        assert ending.status == 0, f"{shlex.join(words)}: {ending.stderr}"
        return
    parsed: Any = typer.main.get_command(app)
    context = typer.Context(parsed)
    while isinstance(parsed, TyperGroup):
        name, parsed, words = parsed.resolve_command(context, words)
        context = typer.Context(parsed, parent=context, info_name=name)
    parsed.make_context(context.info_name, words, parent=context.parent)


def test_a_wrong_command_is_seen(place: Path, invoke: Invoke) -> None:
    for line in ("bench MODEL --no-such-option", "nothing", "calibrate MODEL --repeats many"):
        with pytest.raises(Exception, match=r"(?i)no such|valid integer"):
            check_command(["selfspec", *line.split()], invoke)
    with pytest.raises(AssertionError):
        check_command(["selfspec", "generate", "MODEL", "--draft", "exit:99", "--prompt", "a"], invoke)

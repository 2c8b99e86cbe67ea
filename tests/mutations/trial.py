"""One planted bug and the tests that must notice it, in a child of a process that has imported the libraries."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import Phase, settings

from mutations.anchor import Planted

ROOT = Path(__file__).resolve().parents[2]
# What takes seconds to import. None of it imports the project, which each child imports anew, with its bug.
_LIBRARIES = (
    "numpy",
    "torch",
    "transformers.generation.utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
_ALREADY = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
_OPTIONS = ("-x", "-q", "-n0", "-m", "", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-W", _ALREADY)

Verdict = Literal["caught", "survived", "too long", "no verdict"]


@dataclass(frozen=True)
class Outcome:
    """What became of one planted bug.

    Attributes:
        verdict: "caught": a test failed that passes without the bug. "survived": tests passed, and none failed. "too
            long": the time limit ended them. "no verdict": none ran, or one fails without any bug.
        said: the test that failed, or what pytest said last.
        seconds: how long it took.
    """

    verdict: Verdict
    said: str
    seconds: float


@dataclass(frozen=True)
class _Report:
    """What pytest found: its exit status, how many tests passed, the first that failed, and its last line."""

    status: int
    passed: int
    failed: str | None
    said: str


def import_libraries() -> None:
    """Import in this process what its children shall not have to import."""
    for name in _LIBRARIES:
        importlib.import_module(name)


class ProjectCopy:
    """A copy of the project in which one bug after another is planted and tested.

    Args:
        tree: the root of the copy, which nothing else may use.
        log: where the output of pytest is written.
        limit: seconds after which the tests of a bug are ended.
        sound: tests that are known to pass without a bug. It grows.
    """

    def __init__(self, tree: Path, log: Path, limit: float, sound: set[str]) -> None:
        self.log = log
        self._tree = tree
        self._limit = limit
        self._sound = sound

    async def tried(self, planted: Planted, arguments: list[str]) -> Outcome:
        """Plant a bug, run the tests it has to meet, and run the one that failed without the bug."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._limit):
                verdict, said = await self._verdict(planted, arguments)
        except TimeoutError:
            verdict, said = "too long", f"ended after {self._limit:.0f} s"
        return Outcome(verdict, said, time.monotonic() - started)

    async def _verdict(self, planted: Planted, arguments: list[str]) -> tuple[Verdict, str]:
        file = self._tree / planted.file
        right = file.read_bytes()
        try:
            file.write_text(planted.text, encoding="utf-8")
            found = await self._pytest(arguments)
        finally:
            file.write_bytes(right)
        if found.status == pytest.ExitCode.OK and found.passed:
            return "survived", found.said
        if found.status != pytest.ExitCode.TESTS_FAILED or found.failed is None:
            return "no verdict", found.said
        if found.failed not in self._sound:
            without = await self._pytest([found.failed])
            if without.status != pytest.ExitCode.OK:
                return "no verdict", f"{found.failed} fails without any bug: {without.said}"
            self._sound.add(found.failed)
        return "caught", found.failed

    async def _pytest(self, arguments: list[str]) -> _Report:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(self._tree, arguments, self.log, sender))
        child.start()
        sender.close()
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(receiver.fileno(), over.set)
        try:
            await over.wait()
            report: _Report = receiver.recv()
            return report
        except EOFError:
            return _Report(-1, 0, None, f"the process of the tests died; see {self.log}")
        finally:
            loop.remove_reader(receiver.fileno())
            receiver.close()
            _end(child)


def _end(child: multiprocessing.process.BaseProcess) -> None:
    """End a child, and with it the processes that its tests have started."""
    assert child.pid is not None
    child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()


class _Notes:
    """A plugin of pytest that notes what passed and which test failed first; of a property one failure is enough."""

    passed = 0
    failed: str | None = None

    def pytest_collection(self) -> None:
        # Shrinking an example would take minutes. What tests set themselves is added to the profile that they find.
        assert settings.default is not None
        phases = set(settings.default.phases) - {Phase.shrink, Phase.explain}
        settings.register_profile("planted bugs", settings.default, phases=phases)
        settings.load_profile("planted bugs")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid
        self.passed += report.passed and report.when == "call"


def _child(tree: Path, arguments: list[str], log: Path, sender: Connection) -> None:
    # A group of processes that can be ended as a whole, and signals that mean what they mean to any process.
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    # The copy in place of the project, in this process and in those that its tests start.
    os.chdir(tree)
    own = {"", str(ROOT), str(ROOT / "tests")}
    sys.path[:] = [str(tree), *(folder for folder in sys.path if folder not in own)]
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1", CI="true")
    notes = _Notes()
    status = pytest.main([*_OPTIONS, *arguments], plugins=[notes])
    sys.stdout.flush()
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    sender.send(_Report(int(status), notes.passed, notes.failed, lines[-1] if lines else ""))

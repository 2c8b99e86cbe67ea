"""Plants bugs, several at a time, each in a copy of the project, and runs the tests that must notice it."""

from __future__ import annotations

import compileall
import contextlib
import multiprocessing
import os
import py_compile
import queue
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import Phase, settings

from mutations.anchor import Planted, Sources, Suite
from mutations.catalogue import Mutation

ROOT = Path(__file__).resolve().parents[2]
_PROJECT = ("selfspec", "adapters", "tests", "docs", "examples", "benchmarks", "README.md", "pyproject.toml")
# What takes seconds to import. None of it imports the project, which each child imports anew, with its bug.
LIBRARIES = (
    "numpy",
    "torch",
    "transformers.generation.utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
_ALREADY = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
_OPTIONS = ("-x", "-q", "-n0", "-m", "", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-W", _ALREADY)
_LINES = 20

Verdict = Literal["caught", "survived", "too long", "no verdict"]


@dataclass(frozen=True)
class Outcome:
    """What became of one planted bug, and the test that failed or the last lines of pytest.

    A bug is caught where a test fails that passes without it; there is no verdict where none runs, or one fails anyway.
    """

    verdict: Verdict
    said: str


@dataclass(frozen=True)
class _Report:
    """What pytest found: its exit status, how many tests passed, the first that failed, and its last lines."""

    status: int
    passed: int
    failed: str | None
    said: str


def try_all(
    catalogue: Sequence[Mutation],
    root: Path,
    jobs: int,
    limit: float,
    tell: Callable[[Mutation, Outcome], None],
    libraries: Sequence[str] = LIBRARIES,
) -> dict[str, Outcome]:
    """Plant each bug in a copy of the project and run its tests; return outcomes by the names of the bugs."""
    sources, suite = Sources(root), Suite(root)
    trials = [(mutation, sources.planted(mutation), suite.arguments(mutation)) for mutation in catalogue]
    runs = _Runs(limit, libraries)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            trees.put(_copied(root, Path(folder) / str(job)))

        def tried(trial: tuple[Mutation, Planted, list[str]]) -> tuple[str, Outcome]:
            mutation, planted, arguments = trial
            tree = trees.get()
            try:
                outcome = runs.outcome(tree, planted, arguments)
            finally:
                trees.put(tree)
            tell(mutation, outcome)
            return mutation.name, outcome

        try:
            return dict(pool.map(tried, trials))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            runs.end()
            raise


def _copied(root: Path, tree: Path) -> Path:
    tree.mkdir()
    for source in (root / name for name in _PROJECT):
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "mutations")
            shutil.copytree(source, tree / source.name, symlinks=True, ignore=ignored)
        elif source.exists():
            shutil.copy(source, tree / source.name)
    # Whoever plants a bug must not read another's bytecode: it is compared by content, times being too coarse.
    compileall.compile_dir(tree, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return tree


class _Runs:
    """Runs of pytest in children of a process that has imported the libraries; those that last too long are ended."""

    def __init__(self, limit: float, libraries: Sequence[str]) -> None:
        self._limit = limit
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(libraries))
        self._running: set[ForkServerProcess] = set()
        # Tests that are known to pass without a bug.
        self._sound: set[str] = set()

    def end(self) -> None:
        for child in list(self._running):
            _end(child)

    def outcome(self, tree: Path, planted: Planted, arguments: list[str]) -> Outcome:
        """Plant a bug, run the tests it has to meet, and run the one that failed without the bug."""
        file = tree / planted.file
        right = file.read_bytes()
        try:
            file.write_text(planted.text, encoding="utf-8")
            found = self._pytest(tree, arguments)
        finally:
            file.write_bytes(right)
        if found is None:
            return Outcome("too long", f"ended after {self._limit:.0f} s")
        if found.status == pytest.ExitCode.OK and found.passed:
            return Outcome("survived", found.said)
        if found.status != pytest.ExitCode.TESTS_FAILED or found.failed is None:
            return Outcome("no verdict", found.said)
        if found.failed not in self._sound:
            without = self._pytest(tree, [found.failed])
            if without is None or without.status != pytest.ExitCode.OK:
                said = "" if without is None else without.said
                return Outcome("no verdict", f"{found.failed} fails without any bug: {said}")
            self._sound.add(found.failed)
        return Outcome("caught", found.failed)

    def _pytest(self, tree: Path, arguments: list[str]) -> _Report | None:
        receiver, sender = self._context.Pipe(duplex=False)
        child = self._context.Process(target=_child, args=(tree, arguments, sender))
        child.start()
        self._running.add(child)
        sender.close()
        try:
            report: _Report | None = receiver.recv() if receiver.poll(self._limit) else None
            return report
        except EOFError:
            return _Report(-1, 0, None, "the process of the tests died")
        finally:
            receiver.close()
            _end(child)
            self._running.discard(child)


def _end(child: ForkServerProcess) -> None:
    """End a child, and with it the processes that its tests have started."""
    assert child.pid is not None
    child.join(1)
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


def _child(tree: Path, arguments: list[str], sender: Connection) -> None:
    # A group of processes that can be ended as a whole.
    os.setsid()
    log = tree.with_suffix(".log")
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
    sender.send(_Report(int(status), notes.passed, notes.failed, "\n".join(lines[-_LINES:])))

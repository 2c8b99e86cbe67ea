"""All planted bugs, several at a time. What was found is kept, so that a run that was ended goes on where it was."""

from __future__ import annotations

import asyncio
import compileall
import hashlib
import json
import py_compile
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from mutations.anchor import Sources
from mutations.catalogue import Mutation
from mutations.selection import Suite
from mutations.trial import Outcome, ProjectCopy

_PROJECT = ("selfspec", "adapters", "tests", "docs", "examples", "benchmarks", "README.md", "pyproject.toml")
# An entry may change without changing what was found for the others.
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "mutations")


async def try_all(
    catalogue: Sequence[Mutation],
    root: Path,
    results: Path,
    jobs: int,
    limit: float,
    tell: Callable[[Mutation, Outcome], None],
) -> dict[str, Outcome]:
    """Plant each bug in a copy of the project and run its tests; SIGINT and SIGTERM end what is running, and then this.

    Args:
        catalogue: the bugs.
        root: the root of the project.
        results: the folder of what is found. Bugs that were caught before in the same tree are not tried again; of
            others the output of pytest is written there.
        jobs: how many bugs are tried at once.
        limit: the seconds that a bug may take.
        tell: called with each outcome, as soon as it is there.

    Returns:
        Outcomes by the names of the bugs.

    Raises:
        AnchorError: a bug cannot be planted.
        SelectionError: tests of a bug are not there.
        CancelledError: a signal came.
    """
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / str(job) for job in range(jobs)]
        _copy_project(root, trees[0])
        ledger = _Ledger(results / f"{_digest(trees[0])}.jsonl")
        sources, suite = Sources(trees[0]), Suite(trees[0])
        trials = [(mutation, sources.planted(mutation), suite.arguments(mutation)) for mutation in catalogue]
        # Whoever plants a bug must not read another's bytecode: it is compared by content, times being too coarse.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(trees[0], quiet=2, invalidation_mode=mode)
        for tree in trees[1:]:
            shutil.copytree(trees[0], tree, symlinks=True)
        outcomes: dict[str, Outcome] = {}
        waiting = iter(trials)
        sound: set[str] = set()

        async def work(tree: Path) -> None:
            copy = ProjectCopy(tree, tree.with_suffix(".log"), limit, sound)
            for mutation, planted, arguments in waiting:
                outcome = ledger.caught(mutation)
                if outcome is None:
                    outcome = await copy.tried(planted, arguments)
                    ledger.keep(mutation, outcome)
                    if outcome.verdict != "caught":
                        shutil.copy(copy.log, results / f"{'-'.join(re.findall('[a-z0-9]+', mutation.name))}.log")
                outcomes[mutation.name] = outcome
                tell(mutation, outcome)

        async with asyncio.TaskGroup() as group:
            for tree in trees:
                group.create_task(work(tree))
        return outcomes


class _Ledger:
    """What was found in one tree, a line of JSON for each trial."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self._found = {line["key"]: Outcome(**line["outcome"]) for line in map(json.loads, lines)}

    def caught(self, mutation: Mutation) -> Outcome | None:
        """What was found for a bug, if it was caught; whatever else was found is tried again."""
        outcome = self._found.get(_key(mutation))
        return outcome if outcome is not None and outcome.verdict == "caught" else None

    def keep(self, mutation: Mutation, outcome: Outcome) -> None:
        line = {"name": mutation.name, "key": _key(mutation), "outcome": asdict(outcome)}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _key(mutation: Mutation) -> str:
    return hashlib.sha256(json.dumps(asdict(mutation)).encode()).hexdigest()


def _copy_project(root: Path, tree: Path) -> None:
    tree.mkdir()
    for source in (root / name for name in _PROJECT):
        if source.is_dir():
            shutil.copytree(source, tree / source.name, symlinks=True, ignore=_LEFT_OUT)
        elif source.exists():
            shutil.copy(source, tree / source.name)


def _digest(tree: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in tree.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(tree)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()

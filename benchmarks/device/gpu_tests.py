"""The suite's tests that need a device, in a process of their own, a case for each file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from device.figure import Figure, Rows
from device.stage import Bench, Case

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = _ROOT / "tests"
_MARK = "mark.gpu"
_MINUTES = 8
# Of a failed test; the log has them all.
_MOST_NAMED = 5


def test_cases(bench: Bench) -> Iterator[Case]:
    """Every file that has such tests. Others are not collected: what they import may not be there."""
    for file in sorted(_TESTS.rglob("test_*.py")):
        if _MARK in file.read_text(encoding="utf-8"):
            yield Case(file.relative_to(_TESTS).with_suffix("").as_posix(), partial(_tested, bench, file))


# A name that pytest would take for a test of its own.
test_cases.__test__ = False  # type: ignore[attr-defined]


def _tested(bench: Bench, file: Path) -> Rows:
    """Run the tests of a file.

    Raises:
        RuntimeError: some failed, or none ran on a device that is there.
    """
    log = bench.folder / f"tests.{file.stem}.log"
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        words = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-n0", "-q", str(file)]
        words += [f"--junitxml={found}", *(["--maxfail=1"] if bench.miniature else [])]
        with log.open("w", encoding="utf-8") as output:
            status = subprocess.run(
                words, cwd=_ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=60 * _MINUTES, check=False
            ).returncode
        if not found.exists():
            raise RuntimeError(f"pytest ended with status {status} and ran no test; {log} has what it said")
        cases = list(ElementTree.parse(found).iter("testcase"))
    wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    if wrong or (status and not skipped):
        names = ", ".join(str(case.get("name")) for case in wrong[:_MOST_NAMED])
        raise RuntimeError(f"{len(wrong)} of {len(cases)} tests failed ({names}); {log} has all of it")
    ran = len(cases) - len(skipped)
    if bench.device.type == "cuda" and not ran:
        raise RuntimeError(f"none of {len(cases)} tests ran; {log} says why")
    seconds = sum(float(case.get("time", 0)) for case in cases)
    return {
        "": {
            "passed": Figure.number(ran),
            "skipped": Figure.number(len(skipped)),
            "took": Figure.number(seconds, "s"),
        }
    }

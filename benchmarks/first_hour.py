"""Time a new user's first hour: a clean clone, a fresh environment, empty caches.

    python benchmarks/first_hour.py MODEL

MODEL is the folder of a checkpoint. Each step is a command of the documentation, run once, in order; where packages
come from decides how long installs take. A step that fails ends the run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from harness import HERE, keep
from rich.progress import track

from selfspec.measure.environment import environment

_INSTALL = "pip install -q -c constraints.txt"
_DEMO = "first text, first comparison"
_SERVER = "selfspec serve MODEL --name code"
_AT = "http://127.0.0.1:8000/v1"
_PROMPT = '--prompt "def walk("'
_PEOPLE = {
    "everybody": {
        "environment": "python3 -m venv .venv",
        "install": f"{_INSTALL} . ./demo_model",
        _DEMO: "selfspec demo",
        "what a checkpoint of one's own can do": "selfspec MODEL",
        "its text": f"selfspec generate MODEL {_PROMPT}",
    },
    "too little memory": {
        "its weights in planes": "selfspec pack MODEL --to PLANES",
        "text of these, drafted by half of their bits": f"selfspec generate PLANES {_PROMPT} --draft lookup+upper",
        "text within a budget": f"selfspec generate MODEL {_PROMPT} --memory 2GiB",
    },
    "a checkpoint to wrap or serve": {
        "its text with a draft": f"selfspec generate MODEL {_PROMPT} --draft lookup+int8",
        "what the server needs": f"{_INSTALL} '.[serve]'",
        "a server that answers": _SERVER,
    },
    "a study to run": {
        "what studies need": f"{_INSTALL} '.[bench]'",
        "a study and its pictures": "selfspec ablate --model MODEL --draft exits --texts 2 --max-new-tokens 24 "
        "--confirm 2 --temperature 0 --pricing weights --to STUDY",
    },
}
"""The task of each person, from nothing to its result, behind what everybody types."""
_STEPS = {what: command for steps in _PEOPLE.values() for what, command in steps.items()}


def main() -> None:
    """Take the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", default="first_hour", help="of the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        clone, caches = Path(place) / "clone", Path(place) / "caches"
        subprocess.run(["git", "clone", "-q", str(HERE.parent), str(clone)], check=True)
        shell = _fresh(clone, caches)
        took = {}
        for what, command in track(_STEPS.items(), transient=True):
            take = _served if command == _SERVER else _ran
            took[what] = take(command.replace("MODEL", str(options.model.resolve())), clone, shell)
    record = {"seconds": took, "environment": environment(torch.device("cpu"))}
    keep(options.name, record, said := _report(record))
    print(said)


def _fresh(clone: Path, caches: Path) -> dict[str, str]:
    """Return the environment of a fresh shell with the clone's environment activated."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "OMP"))}
    caches_of = {"XDG_CACHE_HOME": str(caches), "HF_HOME": str(caches / "hub")}
    return {**kept, **caches_of, "PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"}


def _ran(command: str, clone: Path, shell: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds until a command had written its first line, if it wrote any, and until its end."""
    started, times = time.perf_counter(), {}
    with _started(command, clone, shell) as process:
        assert process.stdout is not None
        if process.stdout.readline():
            times["first line"] = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{command}: status {process.returncode}")
    return {**times, "end": time.perf_counter() - started}


def _served(command: str, clone: Path, shell: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds until a server had answered a request."""
    started = time.perf_counter()
    with _started(command, clone, shell) as server:
        while not _answers():
            if server.poll() is not None:
                raise SystemExit(f"{command}: status {server.returncode}")
            time.sleep(0.05)
        server.terminate()
        return {"end": time.perf_counter() - started}


def _started(command: str, clone: Path, shell: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=clone, env=shell, stdout=subprocess.PIPE)


def _answers() -> bool:
    job = b'{"model": "code", "prompt": "def walk(", "max_tokens": 32, "temperature": 0}'
    request = urllib.request.Request(f"{_AT}/completions", job, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request):
            return True
    except urllib.error.HTTPError:
        # Whoever answers so would for ever.
        raise
    except urllib.error.URLError:
        return False


def _report(record: Mapping[str, Any]) -> str:
    machine, seconds = record["environment"], record["seconds"]
    demo, installed = seconds[_DEMO], sum(seconds[what]["end"] for what in ("environment", "install"))
    rows = []
    for person, steps in _PEOPLE.items():
        rows.append(f"| **{person}** | | |")
        rows += [f"| {what} | `{command}` | {seconds[what]['end']:.1f} |" for what, command in steps.items()]
    lines = [
        "# The first hour by a stop-watch\n",
        f"{machine['processor']}, {machine['threads']} threads; Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}. One run; seconds of whole commands.\n",
        f"From the clone to the demo's first line: {installed + demo['first line']:.0f} s; to its end: "
        f"{installed + demo['end']:.0f} s.\n",
        "| step | command | seconds |\n|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

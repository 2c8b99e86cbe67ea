"""Tell whether a change made decoding faster or slower: an older commit and this tree decode in turns.

    python benchmarks/two_commits.py COMMIT --threads 2

Two processes, one a tree, each load the embedded model once and then decode the same prompts alternately, so that
whatever else the machine does falls on both. Measured are plain decoding and exit:4 with a fixed draft length and with
the default control, greedily and sampled, one row and four; and look-ups, whose rounds are a verifying pass each and
little else. Ratios are new over old, so more than 1 is faster now: of tokens a second, of rounds a second (which leaves
out how lucky samples are), of verifying passes in a second of verifying, and of tokens a round. Each is the median over
turns, with its interval (90 %). Greedy texts have to be equal: else the exit status is 1. Last comes the most memory
that each process held, weights and libraries included.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import HERE, JsonWorker, keep
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer

from selfspec import demo
from selfspec.measure.environment import environment
from selfspec.measure.estimate import Estimate

_OLD, _NEW = "old", "new"
_DRAFTS = (("none", 0), ("exit:4", 3), ("exit:4", 0))
_WAYS = [(*draft, 0.0) for draft in (*_DRAFTS, ("lookup", 3), ("lookup", 7))] + [(*draft, 0.8) for draft in _DRAFTS]
_MEASURED = {"tokens/s": ("tokens", "seconds"), "rounds/s": ("rounds", "seconds")}
_MEASURED |= {"verifying passes/s": ("rounds", "verify seconds"), "tokens a row's round": ("tokens", "row rounds")}
"""What is compared: how much of the first there is for each of the second."""


@dataclass
class Case:
    """A way to decode, and the results of its turns: `draft` and `length` (0: the default control) as in `wrap`."""

    draft: str
    length: int
    temperature: float
    batch: int
    turns: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {_OLD: [], _NEW: []})

    @property
    def equal(self) -> bool:
        """Return whether both trees gave the same texts."""
        return all(old["text"] == new["text"] for old, new in zip(self.turns[_OLD], self.turns[_NEW], strict=True))

    def result(self) -> dict[str, Any]:
        """Return what JSON keeps: ratios, medians of what they are of, and whether texts are equal."""
        named = {name: getattr(self, name) for name in ("draft", "length", "temperature", "batch", "equal")}
        for name, (amount, unit) in _MEASURED.items():
            rates = {tree: [each[amount] / each[unit] for each in turns] for tree, turns in self.turns.items()}
            ratios = [new / old for new, old in zip(rates[_NEW], rates[_OLD], strict=True)]
            medians = {tree: statistics.median(each) for tree, each in rates.items()}
            named[name] = Estimate.of_median(ratios).to_dict() | medians
        return named


def main() -> int:
    """Run the benchmark; the exit status says whether all greedy texts are equal."""
    options = _options()
    # As Ctrl-C does, so that the checkout is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(options.threads)
    commit = _git("rev-parse", "--short=12", options.commit)
    batches = {rows: _prompts(rows) for rows in options.batch}
    cases = [Case(*way, batch) for batch in options.batch for way in _WAYS]
    with ExitStack() as stack:
        trees = {_OLD: stack.enter_context(_checked_out(commit)), _NEW: HERE.parent}
        workers = {name: _worker(tree, options.threads) for name, tree in trees.items()}
        for worker in workers.values():
            stack.callback(worker.end)
        turns = range(-options.warm_up, options.turns)
        for turn in track(turns, f"{commit} and this tree", console=Console(stderr=True)):
            for number, case in enumerate(cases):
                job = {"draft": case.draft, "length": case.length, "temperature": case.temperature, "seed": turn}
                job |= {"tokens": options.max_new_tokens, **batches[case.batch][turn % len(batches[case.batch])]}
                # Each prompt meets either order.
                for tree in (_OLD, _NEW) if (turn + turn // len(demo.PROMPTS) + number) % 2 else (_NEW, _OLD):
                    answer = workers[tree].ask(job)
                    if turn >= 0:
                        case.turns[tree].append(answer)
    record = {
        "settings": vars(options) | {"commit": commit, "dtype": "float32", "model": "embedded"},
        "environment": environment(torch.device("cpu")),
        "cases": [case.result() for case in cases],
        "peak_bytes": {tree: max(each["peak"] for case in cases for each in case.turns[tree]) for tree in trees},
    }
    keep(options.name, record, _table(record))
    print(_table(record))
    return int(not all(case.equal for case in cases if case.temperature == 0))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the older one")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=2, help="turns that are not counted")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="two_commits", help="of the results")
    return parser.parse_args()


def _prompts(rows: int) -> list[dict[str, Any]]:
    """Return left-padded batches, with the prompts in another order each."""
    tokenizer = AutoTokenizer.from_pretrained(demo.checkpoint_folder(), padding_side="left")
    number = len(demo.PROMPTS)
    texts = [[demo.PROMPTS[(first + row) % number] for row in range(rows)] for first in range(number)]
    encoded = [tokenizer(batch, padding=True) for batch in texts]
    return [{"ids": batch.input_ids, "mask": batch.attention_mask} for batch in encoded]


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """Check a commit out for as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        _git("worktree", "add", "--quiet", "--detach", folder, commit)
        try:
            yield Path(folder)
        finally:
            _git("worktree", "remove", "--force", folder)


def _worker(tree: Path, threads: int) -> JsonWorker:
    """Start a process that decodes by the code of a tree."""
    command = [sys.executable, "-P", HERE / "decoding_worker.py", tree, demo.checkpoint_folder(), threads]
    quiet = {"PYTHONPATH": str(tree), "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    return JsonWorker(command, env=os.environ | quiet, cwd=tree)


def _git(*words: str) -> str:
    return subprocess.check_output(["git", "-C", str(HERE), *words], text=True).strip()


def _table(record: dict[str, Any]) -> str:
    made, options = record["environment"], record["settings"]
    lines = [
        f"{made['commit']} (new) against {options['commit']} (old): {made['processor']}, {options['dtype']}, "
        f"{options['threads']} threads, torch {made['torch']}; {options['turns']} turns of "
        f"{options['max_new_tokens']} tokens. New over old, median over turns (90 % interval).\n",
        f"| draft | drafted | temperature | rows | tokens/s, old | {' | '.join(_MEASURED)} | texts |",
        "|---" * (6 + len(_MEASURED)) + "|",
    ]
    for case in record["cases"]:
        length = case["length"] or ("" if case["draft"] == "none" else "default")
        ratios = ["{value:.3f} ({low:.3f}-{high:.3f})".format(**case[name]) for name in _MEASURED]
        settings = [case["draft"], length, f"{case['temperature']:g}", case["batch"], f"{case['tokens/s'][_OLD]:.0f}"]
        cells = [*settings, *ratios, "equal" if case["equal"] else "differ"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    peak = record["peak_bytes"]
    if peak[_OLD]:
        held = {tree: f"{count / 2**20:.0f} MiB" for tree, count in peak.items()}
        lines.append(f"\nPeak memory: {held[_NEW]} against {held[_OLD]}, {peak[_NEW] / peak[_OLD]:.3f}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

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
from pathlib import Path
from typing import Any

from harness import HERE, JsonWorker
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer

from selfspec import demo
from selfspec.measure.estimate import Estimate
from selfspec.tools.lab.report import markdown_table

_OLD, _NEW = "old", "new"
_DRAFTS = (("none", 0), ("exit:4", 3), ("exit:4", 0))
_WAYS = [(*draft, 0.0) for draft in (*_DRAFTS, ("lookup", 3), ("lookup", 7))] + [(*draft, 0.8) for draft in _DRAFTS]
# What is compared: how much of the first there is for each of the second.
_MEASURED = {"tokens/s": ("tokens", "seconds"), "rounds/s": ("rounds", "seconds")}
_MEASURED |= {"verifying passes/s": ("rounds", "verify seconds"), "tokens a row's round": ("tokens", "row rounds")}


def main() -> int:
    """Run the benchmark; the exit status says whether all greedy texts are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the older one")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=2, help="turns that are not counted")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    # As Ctrl-C does, so that the checkout is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    batches = {rows: _prompts(rows) for rows in options.batch}
    cases = [(batch, *way) for batch in options.batch for way in _WAYS]
    found: dict[Any, dict[str, list[dict[str, Any]]]] = {case: {_OLD: [], _NEW: []} for case in cases}
    with ExitStack() as stack:
        trees = {_OLD: stack.enter_context(_checked_out(options.commit)), _NEW: HERE.parent}
        workers = {name: _worker(tree, options.threads) for name, tree in trees.items()}
        for worker in workers.values():
            stack.callback(worker.end)
        turns = range(-options.warm_up, options.turns)
        for turn in track(turns, f"{options.commit} and this tree", console=Console(stderr=True)):
            for number, case in enumerate(cases):
                batch, draft, length, temperature = case
                job = {"draft": draft, "length": length, "temperature": temperature, "seed": turn}
                job |= {"tokens": options.max_new_tokens, **batches[batch][turn % len(batches[batch])]}
                # Each prompt meets either order.
                for tree in (_OLD, _NEW) if (turn + turn // len(demo.PROMPTS) + number) % 2 else (_NEW, _OLD):
                    answer = workers[tree].ask(job)
                    if turn >= 0:
                        found[case][tree].append(answer)
    rows, same = [], True
    for (batch, draft, length, temperature), by_tree in found.items():
        pairs = [*zip(by_tree[_OLD], by_tree[_NEW], strict=True)]
        equal = all(old["text"] == new["text"] for old, new in pairs)
        same = same and (equal or temperature > 0)
        cells = [draft, str(length or ("" if draft == "none" else "default")), f"{temperature:g}", str(batch)]
        cells.append(f"{statistics.median(old['tokens'] / old['seconds'] for old, _ in pairs):.0f}")
        for amount, unit in _MEASURED.values():
            ratios = [new[amount] / new[unit] * old[unit] / old[amount] for old, new in pairs]
            cells.append(Estimate.of_median(ratios).shown(3))
        rows.append([*cells, "equal" if equal else "differ"])
    print(markdown_table(["draft", "drafted", "temperature", "rows", "tokens/s, old", *_MEASURED, "texts"], rows))
    peak = {tree: max(each["peak"] for by in found.values() for each in by[tree]) for tree in trees}
    print(f"\nPeak memory: {peak[_NEW] / 2**20:.0f} MiB, against {peak[_OLD] / 2**20:.0f} of the old one.")
    return int(not same)


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
    git = ["git", "-C", str(HERE), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.check_call([*git, "add", "--quiet", "--detach", folder, commit])
        try:
            yield Path(folder)
        finally:
            subprocess.check_call([*git, "remove", "--force", folder])


def _worker(tree: Path, threads: int) -> JsonWorker:
    """Start a process that decodes by the code of a tree."""
    command = [sys.executable, "-P", HERE / "decoding_worker.py", tree, demo.checkpoint_folder(), threads]
    quiet = {"PYTHONPATH": str(tree), "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    return JsonWorker(command, env=os.environ | quiet, cwd=tree)


if __name__ == "__main__":
    sys.exit(main())

"""Searched skip sets against random ones of the same size: predicted speed, with ten times the evaluations for chance.

    python benchmarks/search.py --model FOLDER --workload NAME=FILE

Both are judged by the same evaluator on the same texts, written by the model at temperature 1, at prices by weights;
then both winners once more on texts that neither has seen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from selfspec.environment import environment
from selfspec.tools.studies.board import Board
from selfspec.tools.studies.drafts import SkipSet, Space, skip_set
from selfspec.tools.studies.models import StudiedModel, load
from selfspec.tools.studies.search import evaluate, search, speed
from selfspec.tools.studies.study import Study
from selfspec.tools.studies.table import Row

_RESULTS = Path(__file__).parent / "results"
_LENGTHS = (1, 2, 3, 4, 5, 6, 8)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--evaluations", type=int, default=20)
    parser.add_argument("--random", type=int, default=200)
    parser.add_argument("--sizes", nargs="+", default=["any", "4", "6", "8"], help="sublayers left out, or any")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="search")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    declared = {"models": options.model, "workloads": options.workload, "texts": 8, "prompt_tokens": 12}
    declared |= {"temperatures": 1.0, "draft_lengths": list(_LENGTHS), "reach": 1, "pricing": "weights", "confirm": 0}
    seen, unseen = Study.of({**declared, "seeds": 0}), Study.of({**declared, "seeds": 1})
    studied = load(options.model, seen, "cpu")
    rows = [
        _compared(studied, seen, unseen, size, seed, options.evaluations, options.random)
        for size in options.sizes
        for seed in options.seeds
    ]
    settings = {**vars(options), "model": Path(options.model).name, "workload": options.workload.partition("=")[0]}
    record = {"settings": settings, "environment": environment(studied.model.device), "rows": rows}
    (_RESULTS / f"{options.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (_RESULTS / f"{options.name}.md").write_text(_table(rows))
    print(_table(rows))


def _compared(
    studied: StudiedModel, seen: Study, unseen: Study, size: str, seed: int, evaluations: int, count: int
) -> dict[str, Any]:
    model, adapter = studied.model, studied.adapter
    space = Space.of(model, adapter) if size == "any" else Space.of(model, adapter, int(size), int(size))
    begun = time.process_time()
    scores = search(studied, seen, space, evaluations)
    searched = time.process_time()
    found = max(scores, key=speed)
    drawn = _drawn(Space.of(model, adapter, found["skipped"], found["skipped"]), count, seed)
    chance_begun = time.process_time()
    best = max(_judged(studied, seen, drawn), key=speed)
    ended = time.process_time()
    again = _judged(studied, unseen, [skip_set(row["draft"]) for row in (found, best)])
    return {
        "size": size,
        "seed": seed,
        "left_out": found["skipped"],
        "found": found,
        "evaluations": len(scores),
        "search_seconds": searched - begun,
        "random": best,
        "random_evaluations": len(drawn),
        "random_seconds": ended - chance_begun,
        "unseen": [speed(row) for row in again],
    }


def _judged(studied: StudiedModel, study: Study, sets: list[SkipSet]) -> list[Row]:
    """What a study makes of sets of which it knows nothing yet."""
    with tempfile.TemporaryDirectory() as folder:
        return evaluate(Board(folder), study, studied, sets)


def _drawn(space: Space, count: int, seed: int) -> list[SkipSet]:
    """As many different sets, or as many as are found among many draws."""
    return list(dict.fromkeys(islice(space.random(1000 + seed), 100 * count)))[:count]


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| sublayers left out | seed | predicted speed-up | evaluations (CPU s) | best of random sets | "
        "evaluations (CPU s) | both on unseen text |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['left_out']}{' (free)' if row['size'] == 'any' else ''} | {row['seed']} | "
        f"{row['found']['predicted_speedup']:.3f} | {row['evaluations']} ({row['search_seconds']:.1f}) | "
        f"{row['random']['predicted_speedup']:.3f} | {row['random_evaluations']} ({row['random_seconds']:.1f}) | "
        f"{row['unseen'][0]:.3f}, {row['unseen'][1]:.3f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

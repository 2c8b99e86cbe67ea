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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from selfspec.environment import environment
from selfspec.tools.studies.board import Board
from selfspec.tools.studies.drafts import skip_set
from selfspec.tools.studies.models import StudiedModel, loader
from selfspec.tools.studies.search import Evaluator, search
from selfspec.tools.studies.skip_sets import SkipSet, Space
from selfspec.tools.studies.study import Study

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
    declared |= {"temperatures": 1.0, "draft_lengths": list(_LENGTHS), "reach": 1, "pricing": "weights"}
    seen, unseen = Study.of({**declared, "seeds": 0}), Study.of({**declared, "seeds": 1})
    studied = loader(seen, "cpu")(options.model)
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
    with _evaluator(studied, seen, space) as searched_by:
        begun = time.process_time()
        found = search(searched_by, evaluations, seed)
        searched = time.process_time()
    left_out = found.best["skipped"]
    same = Space.of(model, adapter, left_out, left_out)
    with _evaluator(studied, seen, same) as chance:
        chance_begun = time.process_time()
        chance.evaluate(_drawn(same, count, seed))
        ended = time.process_time()
    best = max(chance.scores.values(), key=lambda row: row["predicted_speedup"])
    with _evaluator(studied, unseen, same) as again:
        again.evaluate([skip_set(row["draft"]) for row in (found.best, best)])
    return {
        "size": size,
        "seed": seed,
        "left_out": left_out,
        "found": found.best,
        "evaluations": len(found.scores),
        "search_seconds": searched - begun,
        "random": best,
        "random_evaluations": len(chance.scores),
        "random_seconds": ended - chance_begun,
        "unseen": [again.scores[skip_set(row["draft"])]["predicted_speedup"] for row in (found.best, best)],
    }


@contextmanager
def _evaluator(studied: StudiedModel, study: Study, space: Space) -> Iterator[Evaluator]:
    """An evaluator that knows nothing yet."""
    with tempfile.TemporaryDirectory() as folder, Board(folder) as board:
        yield Evaluator(studied, study, space, board)


def _drawn(space: Space, count: int, seed: int) -> list[SkipSet]:
    """As many different sets, or as many as are found among many draws."""
    draws: Iterator[SkipSet] = space.random(1000 + seed)
    drawn: dict[SkipSet, None] = {}
    for _ in range(100 * count):
        if len(drawn) == count:
            break
        drawn[next(draws)] = None
    return list(drawn)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| sublayers left out | seed | found by | predicted speed-up | evaluations (CPU s) | best of random sets | "
        "evaluations (CPU s) | both on unseen text |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['left_out']}{' (free)' if row['size'] == 'any' else ''} | {row['seed']} | {row['found']['method']} | "
        f"{row['found']['predicted_speedup']:.3f} | {row['evaluations']} ({row['search_seconds']:.1f}) | "
        f"{row['random']['predicted_speedup']:.3f} | {row['random_evaluations']} ({row['random_seconds']:.1f}) | "
        f"{row['unseen'][0]:.3f}, {row['unseen'][1]:.3f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

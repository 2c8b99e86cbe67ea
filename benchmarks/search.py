"""Searched skip sets against random ones of the same size: predicted speed, with ten times the evaluations for chance.

    python benchmarks/search.py --model FOLDER --workload NAME=FILE

Both are judged by the same evaluator on the same texts, written by the model at temperature 1, at prices by weights;
then both winners once more on texts that neither has seen.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from selfspec.environment import environment
from selfspec.measure.teacher_forced.figures import WrittenTexts
from selfspec.tools.studies.models import StudiedModel, loader, texts_of, texts_point, write_texts
from selfspec.tools.studies.points import Result
from selfspec.tools.studies.prices import prices_by_weights
from selfspec.tools.studies.search import SearchPlan, search
from selfspec.tools.studies.search.evaluate import Evaluator
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
    study = Study.of({"models": options.model, "workloads": options.workload, "texts": 8, "prompt_tokens": 12})
    studied = loader(study, "cpu")(options.model)
    seen, unseen = _texts(studied, 0), _texts(studied, 1)
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


def _texts(studied: StudiedModel, seed: int) -> WrittenTexts:
    point = texts_point(studied, next(iter(studied.prompts)), 64, 1.0, seed)
    return texts_of(Result(point, write_texts(studied, point)), studied.model.device)


def _compared(
    studied: StudiedModel, seen: WrittenTexts, unseen: WrittenTexts, size: str, seed: int, evaluations: int, count: int
) -> dict[str, Any]:
    model, adapter = studied.model, studied.adapter
    prices = prices_by_weights(model, adapter)
    space = Space.of(model, adapter) if size == "any" else Space.of(model, adapter, int(size), int(size))
    begun = time.process_time()
    found = search(
        Evaluator(studied.views, seen, prices, _LENGTHS),
        space,
        SearchPlan(evaluations, space.fewest, space.most, seed=seed),
    )
    searched = time.process_time()
    left_out = len(found.best.skipped)
    same = Space.of(model, adapter, left_out, left_out)
    chance = Evaluator(studied.views, seen, prices, _LENGTHS)
    chance.evaluate(_drawn(same, count, seed))
    best = max(chance.scores.values(), key=lambda score: score.speedup)
    ended = time.process_time()
    again = Evaluator(studied.views, unseen, prices, _LENGTHS)
    again.evaluate([found.best.skipped, best.skipped])
    return {
        "size": size,
        "seed": seed,
        "left_out": left_out,
        "found": found.best.to_dict(),
        "method": found.methods[[score.skipped for score in found.scores].index(found.best.skipped)],
        "evaluations": len(found.scores),
        "layer_passes": found.layer_passes,
        "search_seconds": searched - begun,
        "random": best.to_dict(),
        "random_evaluations": chance.evaluations,
        "random_seconds": ended - searched,
        "unseen": [again.scores[each.skipped].speedup for each in (found.best, best)],
    }


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
        f"| {row['left_out']}{' (free)' if row['size'] == 'any' else ''} | {row['seed']} | {row['method']} | "
        f"{row['found']['speedup']:.3f} | {row['evaluations']} ({row['search_seconds']:.1f}) | "
        f"{row['random']['speedup']:.3f} | {row['random_evaluations']} ({row['random_seconds']:.1f}) | "
        f"{row['unseen'][0]:.3f}, {row['unseen'][1]:.3f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

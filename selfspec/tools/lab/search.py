"""Search for the skip set that promises the highest speed.

Sets are proposed by similarity of hidden states, by Bayesian optimisation or greedily, and estimated as in a study:
acceptance by teacher forcing, cost by price, speed by both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from selfspec.draft import LayerSkip
from selfspec.draft.layer_skip import write_skip_file
from selfspec.draft.registry import parse_draft
from selfspec.errors import StudyError
from selfspec.measure.environment import environment
from selfspec.measure.stock import Continuation
from selfspec.measure.teacher_forced import NOTHING, WHOLE, Parts, TeacherForcedText
from selfspec.measure.watch import Watch
from selfspec.model.identity import fingerprint
from selfspec.model.layer_path import Part, Sublayer
from selfspec.tools.lab.ablation import Finding, StudyOfModel
from selfspec.tools.lab.drafts import SkipSet, Space, named_drafts, skip_name
from selfspec.tools.lab.prices import Prices
from selfspec.tools.lab.runs import Row, Runs
from selfspec.tools.lab.study import StudiedModel, Study, text_run, texts_of
from selfspec.tools.lab.table import records, summarise

SearchBy = Literal["similarity", "bayes", "greedy"]
"""Ways to propose sets: by dynamic programming on similarity of states, by Bayesian optimisation, one unit by one."""

Promised = Callable[[Sequence[SkipSet]], list[float]]
"""Evaluates sets; returns the highest predicted speed-up of each, over the draft lengths."""

# Ways that dynamic programming keeps for each amount of cost saved.
_WIDTH = 6
# Texts, and drafted tokens of each, that states are compared on; a few tell as much as many.
_TEXTS, _TOKENS = 2, 32
# Proposals for each set to evaluate, of which many come again, before a search takes it that there are no more.
_PATIENCE = 20


def search(
    studied: StudiedModel,
    study: Study,
    space: Space,
    evaluations: int,
    runs: Runs | None = None,
    watch: Watch | None = None,
    by: SearchBy = "similarity",
) -> Finding:
    """Search for the skip set of a model that promises the highest speed on texts that it writes itself.

    Prompts are those of the first workload; the study has one temperature. The same call with the same runs continues.
    Returns what was found for all sets evaluated, at most `evaluations`; `evaluation` says in which order. One that
    failed is a StudyError, as is `by="bayes"` without Optuna.
    """
    study, kept, watch = replace(study, confirm=0), runs or Runs(None), watch or Watch()
    if by == "bayes" and find_spec("optuna") is None:
        raise StudyError("a Bayesian search needs Optuna; pip install 'selfspec[bench]'")
    studied = replace(studied, prompts=dict([next(iter(studied.prompts.items()))]))
    known = {row["measured"]: row for row in _found(kept, study, studied, [], watch)}
    (prompts,) = studied.prompts.values()
    # Sets by similarity are known all at once, and so is what is left of them.
    parts = None if by == "similarity" else _Parts(watch, evaluations * len(prompts))
    places: dict[str, int] = {}
    found: list[Row] = []

    def promised(sets: Sequence[SkipSet]) -> list[float]:
        names = [*map(skip_name, sets)]
        if parts is not None:
            parts.part = len(sets) * len(prompts)
        rows = _found(kept, study, studied, sets, parts or watch)
        new = dict.fromkeys(name for name in names if name not in places)
        places.update(zip(new, range(len(places) + 1, len(places) + len(new) + 1), strict=True))
        judged = [{**row, "evaluation": places[row["draft"]], "search": by} for row in rows if row.get("draft")]
        found.extend(row for row in judged if row["draft"] in new)
        best = summarise(judged).groupby("draft")["predicted_speedup"].max()
        return [float(best[name]) for name in names]

    if by == "similarity":
        (workload,) = studied.prompts
        texts = kept[text_run(studied, workload, study.temperatures[0], study)]
        compared = _compared(studied, texts_of(texts, studied.model.device))
        sets = _each_size_in_turn(sets_by_similarity(compared, space, Prices.of(known["costs"]), _WIDTH))
        if not sets:
            raise StudyError(f"no set of {space.fewest} to {space.most} sublayers is of whole layers; allow others")
        promised(sets[:evaluations])
    elif by == "bayes":
        search_by_bayes(space, evaluations, study.seed, promised)
    else:
        search_greedily(space, evaluations, promised)
    return Finding(study, found)


class _Parts(Watch):
    """Shows stages as parts of one stage of so many steps, in which what is known counts as done."""

    def __init__(self, watch: Watch, steps: int) -> None:
        self.part, self._watch = 0, watch
        watch.begin(steps)

    def begin(self, steps: int) -> None:
        self._watch.step("what is known", self.part - steps)

    def step(self, what: str, steps: int = 1) -> None:
        self._watch.step(what, steps)


def search_by_bayes(space: Space, evaluations: int, seed: int, promised: Promised) -> None:
    """Evaluate sets that a tree-structured Parzen estimator (Bergstra et al., 2011) proposes, one after the other.

    It models, of each set, its size and what each unit is worth. Bayesian optimisation of skip sets is Draft & Verify's
    (Zhang et al., 2024, arXiv 2309.08168), there with a Gaussian process.
    """
    import optuna

    sampler = optuna.samplers.TPESampler(seed=seed)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trials = optuna.create_study(direction="maximize", sampler=sampler)
    speeds: dict[SkipSet, float] = {}
    for _ in range(_PATIENCE * evaluations):
        trial = trials.ask()
        size = trial.suggest_int("sublayers", space.fewest, space.most)
        worth = {unit: trial.suggest_float(skip_name(unit), 0.0, 1.0) for unit in space.units}
        skipped: SkipSet = frozenset()
        for unit in sorted(space.units, key=lambda unit: worth[unit]):
            skipped |= unit if len(skipped | unit) <= size else frozenset()
        if skipped not in speeds:
            (speeds[skipped],) = promised([skipped])
        trials.tell(trial, speeds[skipped])
        if len(speeds) == evaluations:
            return


def search_greedily(space: Space, evaluations: int, promised: Promised) -> None:
    """Leave out one unit more at a time, always the one without which most is promised; begins with single ones."""
    chosen: SkipSet = frozenset()
    while True:
        longer = [chosen | unit for unit in space.units if not unit <= chosen and len(chosen | unit) <= space.most]
        longer = longer[:evaluations]
        if not longer:
            return
        evaluations -= len(longer)
        speeds = promised(longer)
        chosen = longer[speeds.index(max(speeds))]


def scored(finding: Finding) -> list[Row]:
    """Return the lines of the sets at their best draft lengths, those of a search in the order of evaluation."""
    best = (row for row in records(finding.table) if row.get("best_length"))
    return sorted(best, key=lambda row: row.get("evaluation", 0))


def _found(runs: Runs, study: Study, studied: StudiedModel, sets: Sequence[SkipSet], watch: Watch) -> list[Row]:
    drafts = named_drafts(map(skip_name, sets), studied.model, studied.adapter, study.seed)
    found = StudyOfModel(runs, study, studied, drafts, watch).rows()
    for row in found:
        if "error" in row:
            raise StudyError(f"{row['error']}; this is kept: repeat the search in another place once it is mended")
    return found


def _compared(studied: StudiedModel, texts: Sequence[Continuation]) -> TeacherForcedText:
    """Cut the longest texts to the length of the shortest, to compare states on."""
    longest = sorted(texts, key=lambda text: text.prompt - text.ids.shape[1])[:_TEXTS]
    first = min(text.prompt for text in longest)
    new = min(_TOKENS, *(text.ids.shape[1] - text.prompt for text in longest))
    # A prompt loses its beginning, where another is shorter.
    ids = torch.cat([text.ids[:, text.prompt - first : text.prompt + new] for text in longest])
    return TeacherForcedText(studied.views, ids, first)


def save(best: Row, studied: StudiedModel, file: Path, about: Mapping[str, Any]) -> None:
    """Write a set that was found, bound to the model's weights, and how it was found."""
    skip = parse_draft(best["draft"])
    assert isinstance(skip, LayerSkip)
    known = {"promises": best, "found": dict(about), "environment": environment(studied.model.device)}
    write_skip_file(skip, fingerprint(studied.model), file, known)


def _each_size_in_turn(sets: Sequence[SkipSet]) -> list[SkipSet]:
    """Order sets, the best of their size first, as the best ones of each size, then the second best ones, and so on."""
    by_size = [list(some) for _, some in groupby(sorted(sets, key=len), len)]
    return [each for rank in zip_longest(*by_size) for each in rank if each is not None]


# Layers whole, halved either way, or left out; what runs most comes first among equals.
_WAYS: tuple[Parts, ...] = (WHOLE, frozenset({Part.MLP}), frozenset({Part.ATTENTION}), NOTHING)
# No sublayer counts as more units than this, so that the tables stay small.
_MOST_UNITS = 4


@dataclass(frozen=True)
class _Kept:
    """A way through the first layers: sublayers left out, cost saved, and its states, `[texts, tokens, hidden]`."""

    skipped: SkipSet
    saved: int
    similarity: float
    states: Tensor


def sets_by_similarity(text: TeacherForcedText, space: Space, prices: Prices, width: int = 1) -> list[SkipSet]:
    """Return the sets that keep the last hidden states most like the full model's, for every amount of cost saved.

    After each layer, and for each amount of cost saved so far, the `width` ways with states most like the full model's
    are kept. That the best way to a layer begins with best ways to the layers before it is an approximation (CLaSp,
    Chen et al., 2025, arXiv 2505.24196); attention and MLP weigh what they cost rather than one each, as in KnapSpec.
    The text has a reach of 1. The most similar sets come first.
    """
    costs = {part: max(prices.of_part(part), 1e-6) for part in Part}
    units = {part: min(_MOST_UNITS, round(cost / min(costs.values()))) for part, cost in costs.items()}
    kept = [_Kept(frozenset(), 0, 1.0, text.exact(0))]
    for layer in range(len(text.states) - 1):
        entering = torch.cat([way.states for way in kept], -3)
        drafted = slice(text.first - 1, -1)
        target = text.exact(layer + 1)[..., drafted, :].float()
        found = []
        for parts in _WAYS:
            left_out = frozenset(Sublayer(layer, part) for part in WHOLE - parts)
            if space.has(left_out):
                leaving = text.run(layer, parts, entering).chunk(len(kept), -3)
                weight = sum(units[each.part] for each in left_out)
                for way, states in zip(kept, leaving, strict=True):
                    if len(way.skipped | left_out) <= space.most:
                        alike = float(torch.cosine_similarity(states[..., drafted, :].float(), target, -1).mean())
                        found.append(_Kept(way.skipped | left_out, way.saved + weight, alike, states))
        found.sort(key=lambda way: (way.saved, -way.similarity))
        kept = [way for _, ways in groupby(found, lambda way: way.saved) for way in islice(ways, width)]
    kept.sort(key=lambda way: -way.similarity)
    return [way.skipped for way in kept if len(way.skipped) >= space.fewest]

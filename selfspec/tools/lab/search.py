"""Search for the skip set that promises the highest speed.

Skip sets are proposed by similarity of hidden states, and estimated as in a study: acceptance by teacher forcing, cost
by price, speed by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.draft import LayerSkip
from selfspec.draft.layer_skip import write_skip_file
from selfspec.draft.registry import parse_draft
from selfspec.errors import StudyError
from selfspec.measure.environment import environment
from selfspec.measure.own_text import Continuation
from selfspec.measure.teacher_forced import NOTHING, WHOLE, Parts, TeacherForcedText
from selfspec.measure.watch import Watch
from selfspec.model.identity import fingerprint
from selfspec.model.layer_path import Part, Sublayer
from selfspec.tools.lab.ablation import Finding, StudyOfModel
from selfspec.tools.lab.drafts import SkipSet, Space, named_drafts, skip_name
from selfspec.tools.lab.prices import Prices
from selfspec.tools.lab.runs import Row, Runs
from selfspec.tools.lab.study import StudiedModel, Study, text_run, texts_of
from selfspec.tools.lab.table import records

# Ways that dynamic programming keeps for each amount of cost saved.
_WIDTH = 6
# Texts, and drafted tokens of each, that states are compared on; a few tell as much as many.
_TEXTS, _TOKENS = 2, 32


def search(
    studied: StudiedModel,
    study: Study,
    space: Space,
    evaluations: int,
    runs: Runs | None = None,
    watch: Watch | None = None,
) -> Finding:
    """Search for the skip set of a model that promises the highest speed on texts that it writes itself.

    Prompts are those of the first workload; the study has one temperature. The same call with the same runs continues.
    Returns what was found for all sets evaluated, at most `evaluations`, in order; one that failed is a StudyError.
    """
    study, kept, watch = replace(study, confirm=0), runs or Runs(None), watch or Watch()
    studied = replace(studied, prompts=dict([next(iter(studied.prompts.items()))]))
    known = {row["measured"]: row for row in _found(kept, study, studied, [], watch)}
    (workload,) = studied.prompts
    texts = kept[text_run(studied, workload, study.temperatures[0], study)]
    compared = _compared(studied, texts_of(texts, studied.model.device))
    sets = _each_size_in_turn(sets_by_similarity(compared, space, Prices.of(known["costs"]), _WIDTH))
    return Finding(study, _found(kept, study, studied, sets[:evaluations], watch))


def scored(finding: Finding) -> list[Row]:
    """Return the lines of the sets at their best draft lengths, in the order in which they were evaluated."""
    return [row for row in records(finding.table) if row.get("best_length")]


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
    by_size: dict[int, list[SkipSet]] = {}
    for each in sets:
        by_size.setdefault(len(each), []).append(each)
    ranks = range(max(map(len, by_size.values()), default=0))
    return [by_size[size][rank] for rank in ranks for size in sorted(by_size) if rank < len(by_size[size])]


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
            if left_out <= frozenset(space.choices):
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

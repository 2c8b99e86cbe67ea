"""Calibrate: acceptance of every draft, costs, speed-ups predicted from both, and a trial of the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.accept import Rule
from selfspec.api import SelfSpeculative, wrap
from selfspec.architecture import Adapter
from selfspec.arguments import checked_path
from selfspec.control import CostAware
from selfspec.control.costs import BatchCosts, Forecast
from selfspec.control.profile import Chosen, Profile, Setting
from selfspec.draft import Drafter
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import PLAIN, draft_name
from selfspec.errors import BenchError, UnsupportedModelError
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.estimate import Estimate
from selfspec.measure.prompts import read_given
from selfspec.measure.spare_cores import CoreWatch, SpareCores
from selfspec.measure.stock import bare, continued
from selfspec.measure.teacher_forced import acceptance_rate, first_steps
from selfspec.measure.watch import Watch
from selfspec.model.registry import find_adapter
from selfspec.runtime import Native
from selfspec.tools.calibrate.candidates import (
    Candidate,
    considered,
    costs_of,
    fitting,
    predicted,
    to_confirm,
    to_measure,
)
from selfspec.tools.calibrate.measurements import Measurements
from selfspec.tools.lab.arms import ArmSpec, Cell, OwnArm, Prompts, batched
from selfspec.tools.lab.drafts import Given, content, paths_of
from selfspec.tools.lab.generations import ArmRun, measure, rows_of
from selfspec.tools.lab.report import require_packages, write_report
from selfspec.tools.lab.runs import Row, Runs, model_name

# Draft lengths at which costs are measured, and times that is done.
_LENGTHS, _REPEATS = (1, 4), 7
# Sizes of batches that the costs of what was chosen are measured for, and tokens to verify in each row.
_BATCHES, _WIDTHS = (1, 4, 16), (1, 2, 4, 8)
# Texts of a trial in batches, at least.
_TEXTS = 16


@dataclass(frozen=True)
class _Kind:
    """Findings for one kind of decoding; `in_batches` has the fastest in batches of more rows, by their number."""

    temperature: float
    acceptance: dict[str, Estimate]
    predictions: dict[str, Forecast]
    confirmed: list[Confirmed]
    in_batches: dict[str, Confirmed]
    chosen: Chosen


def calibrate(
    model: PreTrainedModel,
    prompts: Tensor | Sequence[str] | Sequence[Tensor],
    drafts: Sequence[str | Drafter] | None = None,
    measurements: Measurements | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    accept: str | Rule | None = None,
    keep: str | Path | None = None,
    adapter: Adapter | None = None,
    watch: Watch | None = None,
) -> Profile:
    """Find the draft that decodes fastest here, greedily and sampling.

    Considered are plain decoding, look-ups, the model in 8 and in 4 bits, every exit, exact and in 8 bits (or the
    drafts given in place of exits), a head that the checkpoint brings along, look-ups before each, recycling, and trees
    along the best. The formula narrows them down; the chosen one was the fastest in real generations in turns with
    plain decoding, and surely faster than that.

    Args:
        model: the stock model; it is left as it is.
        prompts: texts, or token ids, `[texts, tokens]` or each `[1, tokens]`; the result holds for texts like these.
        drafts: drafts to consider in place of exits, by name or as drafters that have one.
        measurements: how much is measured; None: the defaults.
        tokenizer: for prompts that are texts.
        accept: acceptance rule of the candidates; None: selfspec's default.
        keep: a new folder for a report of the generations, and for all their texts, as of `selfspec.bench`; None:
            they are not kept.
        adapter: where the model keeps its layers, for an architecture selfspec does not know.
        watch: shows progress, stage by stage.

    Returns:
        The choice; the profile itself is not written anywhere yet. Its report has all that was measured.

    Raises:
        UnsupportedModelError, DraftConfigError, PromptError, ProfileError, ExitHeadError: before any forward pass.
        StorageError: the report cannot be written.
        BenchError: `keep` is no folder for a report.
    """
    asked, progress = measurements or Measurements(), watch or Watch()
    runs = None if keep is None else Runs(checked_path("keep", keep, BenchError))
    if runs is not None:
        require_packages()
    found = adapter or find_adapter(model)
    prompts = read_given(model, prompts, tokenizer)
    drafters = None if drafts is None else [Given().drafter(each) if isinstance(each, str) else each for each in drafts]
    every = considered(len(found.decoder_layers(model)), drafters, max(prompt.shape[1] for prompt in prompts))
    # A model may refuse what it was not asked for: one that is quantised has no use for fewer bits.
    for drafter in drafters or ():
        drafter.check_model(model, found)
    every = fitting(every, model, found)
    named = paths_of(every.values())
    others = [
        Candidate(each, step=each.cost(model, found))
        for each in every.values()
        if not isinstance(each, LayerPathDrafter)
    ]
    setting = Setting.of(model)
    busy = CoreWatch()
    plain = wrap(bare(model), adapter=found, accept=accept, runtime=Native(after=0))
    grouped = _checked(plain, prompts, asked)

    temperatures = (0.0, asked.temperature)
    alphas: list[dict[str, Estimate]] = []
    for temperature in temperatures:
        texts = continued(model, prompts, asked.max_new_tokens, temperature, asked.seed, progress)
        progress.begin(1)
        progress.step("acceptance of every draft")
        judged = first_steps(model, found, named, texts, temperature)
        alphas.append({name: acceptance_rate(figures) for name, figures in judged.items()})
    rates = [{name: each.value for name, each in some.items()} for some in alphas]
    measured_costs = partial(
        measure_costs,
        model,
        found,
        context=max(prompt.shape[1] for prompt in prompts) + asked.max_new_tokens // 2,
        repeats=_REPEATS,
        lengths=[min(length, asked.longest_draft) for length in _LENGTHS],
        base=plain,
        watch=progress,
    )
    wanted = paths_of(each.draft for each in others)
    measured = to_measure(model, found, named, rates, wanted)
    costs = measured_costs(measured, range(1, asked.longest_draft + 2), batch=asked.batch)
    kinds: list[_Kind] = []
    winners: list[Candidate | None] = []
    trials: list[Trial] = []
    nodes = 0
    with suppress(UnsupportedModelError):
        found.check_trees(model)
        nodes = asked.nodes
    for temperature, alpha, rate in zip(temperatures, alphas, rates, strict=True):
        predictions = predicted(rate, costs, asked.longest_draft)
        candidates = to_confirm(predictions, named, nodes, others)
        trials.append(confirm(plain, candidates, costs, grouped, temperature, asked, progress))
        best = fastest(trials[-1].confirmed)
        winners.append(None if best is None else candidates[best.name])
        chosen = _chosen(best, winners[-1], temperature, asked.longest_draft)
        kinds.append(_Kind(temperature, alpha, predictions, trials[-1].confirmed, {}, chosen))
    paths = paths_of(winner.draft for winner in winners if winner is not None)
    in_batches: list[MeasuredCosts] = []
    # None of these where nothing drafts, or where rows of several lengths cannot be run.
    for rows in _BATCHES if any(winners) and found.ragged != "none" else ():
        if rows == asked.batch:
            continue
        try:
            widths = [width for width in _WIDTHS if width <= asked.longest_draft + 1]
            in_batches.append(measured_costs(list(paths.values()), widths, batch=rows))
        except torch.OutOfMemoryError:
            # A batch that the device has no room for needs no costs.
            break
    by_rows = sorted([costs, *in_batches], key=lambda each: each.batch)
    greedy, sampled = (
        kind if winner is None else _in_batches(kind, winner, by_rows, plain, prompts, asked, progress, trials)
        for kind, winner in zip(kinds, winners, strict=True)
    )
    load = busy.read()
    report = {
        "load": asdict(load),
        "doubts": _doubts(load, setting.threads, (greedy, sampled)),
        "settings": {**asdict(asked), "prompts": len(prompts)},
        "costs": costs.to_dict(),
        "in_batches": [each.to_dict() for each in in_batches],
        "greedy": asdict(greedy),
        "sampled": asdict(sampled),
    }
    if runs is not None and keep is not None:
        name, kept = model_name(model), list[Row]()
        for each in trials:
            kept += rows_of(model, name, each.cell, each.prompts, each.runs)
        runs.keep(kept)
        write_report("Calibration", kept, {"settings": report["settings"], **asdict(setting)}, Path(keep))
    return Profile(setting, greedy.chosen, sampled.chosen, report)


def _doubts(load: SpareCores, threads: int, kinds: Sequence[_Kind]) -> list[str]:
    """Say which figures cannot be, or were measured beside other work."""
    every = [each for kind in kinds for each in kind.confirmed]
    wrong = {each.name: each.speedup.doubt(each.mean_accepted_length) for each in every}
    busy = load.doubt(threads)
    return [*([busy] if busy else []), *(f"{name}: {doubt}" for name, doubt in wrong.items() if doubt)]


def fastest(confirmed: Sequence[Confirmed]) -> Confirmed | None:
    """Return the fastest of those that are surely faster than plain decoding; None where none is."""
    faster = [each for each in confirmed if each.speedup.low > 1]
    return max(faster, key=lambda each: each.speedup.value, default=None)


def _chosen(best: Confirmed | None, winner: Candidate | None, temperature: float, longest: int) -> Chosen:
    if best is None or winner is None:
        return Chosen(PLAIN, longest, None, temperature, (1.0, 1.0, 1.0))
    speedup = (best.speedup.value, best.speedup.low, best.speedup.high)
    return Chosen(draft_name(winner.draft), winner.levels(longest), None, temperature, speedup, nodes=winner.nodes)


def _in_batches(
    kind: _Kind,
    winner: Candidate,
    by_rows: Sequence[MeasuredCosts],
    plain: SelfSpeculative,
    prompts: Sequence[Tensor],
    asked: Measurements,
    progress: Watch,
    trials: list[Trial],
) -> _Kind:
    """Add the costs of the chosen draft in all batches that were measured, and a trial in the larger ones."""
    tried: dict[str, Confirmed] = {}
    most_rows = None
    for measured in by_rows:
        rows = measured.batch
        if rows > asked.batch and most_rows is None:
            grouped, candidates = batched(prompts, rows, _TEXTS), {winner.name: winner}
            trials.append(confirm(plain, candidates, measured, grouped, kind.temperature, asked, progress))
            (found,) = trials[-1].confirmed
            tried[str(rows)] = found
            # Where a gain is not sure, plain decoding is.
            most_rows = rows - 1 if found.speedup.low <= 1 else None
    costs = BatchCosts(tuple(costs_of(winner, each) for each in by_rows))
    return replace(kind, in_batches=tried, chosen=replace(kind.chosen, costs=costs, most_rows=most_rows))


def _checked(plain: SelfSpeculative, prompts: Sequence[Tensor], asked: Measurements) -> list[Prompts]:
    """Return the prompts in batches, all of which the model can continue."""
    grouped = batched(prompts, asked.batch)
    for each in grouped:
        # Reads and refuses the request; a generation runs only as it is iterated over.
        plain.stream(each.ids, each.mask, **cell_of([each], 0.0, asked).options)
    return grouped


# Arms that go on after the first timed turn, besides plain decoding.
_KEPT = 3
# Turns before the first timed one, in which programs are made of most kinds of passes that will come.
_WARM_UPS = 2


@dataclass(frozen=True)
class Confirmed:
    """A candidate in real generations, timed in so many turns.

    `speedup` is over plain decoding in turns with it, without prefill, in tokens a second over all prompts, with an
    interval over prompts; `mean_accepted_length` counts tokens per target pass of a row.
    """

    name: str
    speedup: Estimate
    acceptance_rate: float | None
    mean_accepted_length: float
    turns: int


@dataclass(frozen=True)
class Trial:
    """Runs of plain decoding, the first, and of candidates in a cell, and what each candidate is worth, fastest first.

    `prompts` are those of each call.
    """

    cell: Cell
    prompts: Sequence[Prompts]
    runs: Sequence[ArmRun]
    confirmed: list[Confirmed]


def confirm(
    plain: SelfSpeculative,
    candidates: Mapping[str, Candidate],
    costs: MeasuredCosts,
    prompts: Sequence[Prompts],
    temperature: float,
    asked: Measurements,
    watch: Watch,
) -> Trial:
    """Generate with each candidate and by plain decoding, in turns.

    All warm up on all prompts. After the first timed turn only the fastest go on. `costs` were measured in such
    batches.
    """
    arms = [OwnArm(ArmSpec("plain"), plain)]
    for each in candidates.values():
        spec = ArmSpec("draft", draft_name(each.draft), nodes=each.nodes, content=content(each.draft))
        control = CostAware(each.levels(asked.longest_draft), costs_of(each, costs), each.nodes)
        arms.append(OwnArm(spec, plain.drafting(each.draft, control)))
    cell, kept = cell_of(prompts, temperature, asked), min(len(candidates), _KEPT)
    watch.begin(len(prompts) * ((_WARM_UPS + 1) * len(arms) + (asked.repeats - 1) * (1 + kept)))
    tick = partial(watch.step, f"confirming drafts, {cell.decoding}")
    runs = measure(plain.model, cell, arms, prompts, 1, _WARM_UPS, tick, seed=asked.seed)
    going = [runs[0], *sorted(runs[1:], key=lambda run: sum(chain(*seconds(run, 1))))[:_KEPT]]
    seed = asked.seed + len(prompts)
    going_on = [run.arm for run in going]
    for run, more in zip(
        going, measure(plain.model, cell, going_on, prompts, asked.repeats - 1, 0, tick, seed=seed), strict=True
    ):
        run.calls += more.calls
    confirmed = [beside(runs[0], run, name) for name, run in zip(candidates, runs[1:], strict=True)]
    return Trial(cell, prompts, runs, sorted(confirmed, key=lambda each: each.speedup.value, reverse=True))


def cell_of(prompts: Sequence[Prompts], temperature: float, asked: Measurements) -> Cell:
    """Return the conditions of a trial, in which nothing but the settings ends a text."""
    first, longest = prompts[0], max(each.ids.shape[1] for each in prompts)
    return Cell("prompts", temperature, len(first.ids), longest, asked.max_new_tokens)


def beside(plain: ArmRun, run: ArmRun, name: str) -> Confirmed:
    """Compare a candidate with plain decoding in the turns that it took part in."""
    turns = len(run.calls)
    speedup = Estimate.of_speedup(seconds(plain, turns), seconds(run, turns))
    counted = [call.stats for calls in run.calls for call in calls if call.stats is not None]
    judged, rounds = sum(each.judged for each in counted), sum(each.row_rounds for each in counted)
    return Confirmed(
        name=name,
        speedup=speedup,
        acceptance_rate=sum(each.accepted for each in counted) / judged if judged else None,
        mean_accepted_length=sum(each.new_tokens for each in counted) / rounds,
        turns=turns,
    )


def seconds(run: ArmRun, turns: int) -> list[list[float]]:
    """Return the seconds of a token by prompt, prefill apart, in each of the first turns."""
    return [[call.seconds_a_token for call in calls] for calls in zip(*run.calls[:turns], strict=True)]

"""Calibrates: acceptance of every draft, costs, what the formula makes of both, and a trial of the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.api import SelfSpeculative, wrap
from selfspec.control.costs import BatchCosts
from selfspec.control.profile import Chosen, Profile
from selfspec.control.setting import Setting
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.named import PLAIN, draft_name
from selfspec.errors import PromptError
from selfspec.measure.acceptance import Acceptance, teacher_forced
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.own_text import continued
from selfspec.measure.progress import Unwatched, Watch
from selfspec.measure.stock import bare
from selfspec.model.adapter import Adapter
from selfspec.model.registry import find_adapter
from selfspec.runtime import Traced
from selfspec.tools.calibrate.candidates import (
    Candidate,
    Prediction,
    considered,
    fitting,
    predicted,
    rates_of,
    to_confirm,
    to_measure,
)
from selfspec.tools.calibrate.confirm import Batch, Confirmed, batches, confirm, generation_options
from selfspec.tools.calibrate.settings import Settings

# Draft lengths at which costs are measured, and times that is done.
_LENGTHS, _REPEATS = (1, 4), 7
# Sizes of batches that the costs of what was chosen are measured for, and tokens to verify in each row.
_BATCHES, _WIDTHS = (1, 4, 16), (1, 2, 4, 8)
# Texts of a trial in batches, at least.
_TEXTS = 16


@dataclass(frozen=True)
class Kind:
    """What was found for one kind of decoding.

    Attributes:
        temperature: 0 is greedy decoding.
        acceptance: of each draft on the model's own text at this temperature.
        predictions: what the formula promises, most first.
        confirmed: what candidates were worth, fastest first.
        in_batches: what the fastest was worth in batches of more rows, by their number; none after one that lost.
        chosen: what to draft with.
    """

    temperature: float
    acceptance: dict[str, Acceptance]
    predictions: list[Prediction]
    confirmed: list[Confirmed]
    in_batches: dict[int, Confirmed]
    chosen: Chosen

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "temperature": self.temperature,
            "acceptance": {name: each.to_dict() for name, each in self.acceptance.items()},
            "predictions": [asdict(each) for each in self.predictions],
            "confirmed": [asdict(each) for each in self.confirmed],
            "in_batches": {str(rows): asdict(each) for rows, each in self.in_batches.items()},
        }


@dataclass(frozen=True)
class Calibration:
    """What was measured, and the profile made of it.

    Attributes:
        profile: not written anywhere yet.
        costs: of every draft.
        in_batches: of what was chosen, in batches of other sizes.
        greedy: what was found for greedy decoding.
        sampled: what was found for sampling.
    """

    profile: Profile
    costs: MeasuredCosts
    in_batches: list[MeasuredCosts]
    greedy: Kind
    sampled: Kind


def calibrate(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    drafters: Sequence[LayerPathDrafter] | None = None,
    settings: Settings | None = None,
    *,
    adapter: Adapter | None = None,
    watch: Watch | None = None,
) -> Calibration:
    """Find the draft that decodes fastest here, greedily and sampling.

    Considered are plain decoding, look-ups, every exit, the model in 8 and in 4 bits, exits in 8 bits (or the drafts
    given), and look-ups before each. The formula narrows them down; what is chosen was the fastest in real generations
    in turns with plain decoding, and surely faster than that.

    Args:
        model: the stock model; it is left as it is.
        prompts: token ids, each `[1, prompt]`, on the model's device; what is measured holds for texts like these.
        drafters: drafts along a path of the model to consider in place of the usual ones.
        settings: how much is measured; None: the defaults.
        adapter: where the model keeps its layers, for an architecture selfspec does not know.
        watch: is told of each step, stage by stage.

    Raises:
        UnsupportedModelError, DraftConfigError, PromptError, ProfileError, ExitHeadError: before any forward pass.
    """
    asked, told = settings or Settings(), watch or Unwatched()
    found = adapter or find_adapter(model)
    named = considered(len(found.decoder_layers(model)), drafters)
    if drafters is None:
        named = fitting(named, model, found)
    else:
        for drafter in named.values():
            drafter.check_model(model, found)
    setting = Setting.of(model)
    plain = wrap(bare(model), adapter=found, runtime=Traced(after=0))
    grouped = _checked(plain, prompts, asked)

    temperatures = (0.0, asked.temperature)
    acceptances = [_acceptance(model, found, named, prompts, each, asked, told) for each in temperatures]
    rates = [rates_of(each, at) for each, at in zip(acceptances, temperatures, strict=True)]
    measured = to_measure(model, found, named, rates)
    context = max(prompt.shape[1] for prompt in prompts) + asked.max_new_tokens // 2
    costs = measure_costs(
        model,
        found,
        measured,
        tuple(range(1, asked.longest_draft + 2)),
        context=context,
        repeats=_REPEATS,
        lengths=_lengths(asked),
        batch=asked.batch,
        base=plain,
        watch=told,
    )
    kinds, best = [], []
    for temperature, acceptance, rate in zip(temperatures, acceptances, rates, strict=True):
        predictions = predicted(rate, costs, asked.longest_draft)
        candidates = to_confirm(predictions, named, costs)
        confirmed = confirm(plain, candidates, grouped, temperature, asked, told)
        chosen = choose(confirmed, candidates, temperature, asked)
        kinds.append(Kind(temperature, acceptance, predictions, confirmed, {}, chosen))
        best.append(next((each for each in candidates if each.name == chosen.draft), None))
    in_batches = _in_batches(plain, [each for each in best if each is not None], context, asked, told)
    greedy, sampled = (
        kind if each is None else _with_batches(kind, each, in_batches, plain, prompts, asked, told)
        for kind, each in zip(kinds, best, strict=True)
    )
    report = {
        "settings": {**asked.to_dict(), "prompts": len(prompts)},
        "costs": costs.to_dict(),
        "in_batches": [each.to_dict() for each in in_batches],
        "greedy": greedy.to_dict(),
        "sampled": sampled.to_dict(),
    }
    return Calibration(Profile(setting, greedy.chosen, sampled.chosen, report), costs, in_batches, greedy, sampled)


def choose(
    confirmed: Sequence[Confirmed], candidates: Sequence[Candidate], temperature: float, settings: Settings
) -> Chosen:
    """The fastest of those that are surely faster than plain decoding; plain decoding where none is.

    Args:
        confirmed: what candidates were worth.
        candidates: with their costs.
        temperature: they were confirmed at.
        settings: of the calibration.
    """
    faster = [each for each in confirmed if each.speedup.low > 1]
    best = max(faster, key=lambda each: each.speedup.value, default=None)
    if best is None:
        return Chosen(PLAIN, settings.longest_draft, None, temperature, (1.0, 1.0, 1.0))
    costs = next(each.costs for each in candidates if each.name == best.name)
    speedup = (best.speedup.value, best.speedup.low, best.speedup.high)
    return Chosen(best.name, settings.longest_draft, BatchCosts((costs,)), temperature, speedup)


def _in_batches(
    plain: SelfSpeculative, best: Sequence[Candidate], context: int, settings: Settings, told: Watch
) -> list[MeasuredCosts]:
    """The costs of what was chosen in batches of other sizes than that of the settings; none where nothing drafts."""
    if not best or plain.adapter.ragged == "none":
        return []
    paths = {draft_name(each.path): each.path for each in best if each.path is not None}
    measured: list[MeasuredCosts] = []
    for rows in _BATCHES:
        if rows == settings.batch:
            continue
        try:
            costs = measure_costs(
                plain.model,
                plain.adapter,
                list(paths.values()),
                [width for width in _WIDTHS if width <= settings.longest_draft + 1],
                context=context,
                repeats=_REPEATS,
                lengths=_lengths(settings),
                batch=rows,
                base=plain,
                watch=told,
            )
        except torch.OutOfMemoryError:
            # A batch that the device has no room for needs no costs.
            break
        measured.append(costs)
    return measured


def _with_batches(
    kind: Kind,
    best: Candidate,
    in_batches: Sequence[MeasuredCosts],
    plain: SelfSpeculative,
    prompts: Sequence[Tensor],
    settings: Settings,
    told: Watch,
) -> Kind:
    """The same with the costs of what was chosen in all batches that were measured, and tried in the larger ones."""
    tried: dict[int, Confirmed] = {}
    most_rows = None
    for measured in in_batches:
        if measured.batch < settings.batch:
            continue
        candidate = replace(best, costs=best.costs_in(measured))
        grouped = batches(prompts, measured.batch, _TEXTS)
        (tried[measured.batch],) = confirm(plain, [candidate], grouped, kind.temperature, settings, told)
        # Where a gain is not sure, plain decoding is.
        if tried[measured.batch].speedup.low <= 1:
            most_rows = measured.batch - 1
            break
    costs = [best.costs, *(best.costs_in(measured) for measured in in_batches)]
    by_rows = BatchCosts(tuple(sorted(costs, key=lambda each: each.rows)))
    return replace(kind, in_batches=tried, chosen=replace(kind.chosen, costs=by_rows, most_rows=most_rows))


def _lengths(settings: Settings) -> list[int]:
    return [min(length, settings.longest_draft) for length in _LENGTHS]


def _checked(plain: SelfSpeculative, prompts: Sequence[Tensor], settings: Settings) -> list[Batch]:
    """The prompts in batches, all of which the model can go on with."""
    if not prompts:
        raise PromptError("no prompt: give at least one, each of shape [1, prompt]")
    for prompt in prompts:
        if prompt.ndim != 2 or prompt.shape[0] != 1:
            raise PromptError(f"each prompt must be of shape [1, prompt], got {list(prompt.shape)}")
    grouped = batches(prompts, settings.batch)
    for each in grouped:
        # Reads and refuses the request; a generation runs only as it is iterated over.
        plain.stream(each.ids, attention_mask=each.mask, **generation_options(0.0, settings))
    return grouped


def _acceptance(
    model: PreTrainedModel,
    adapter: Adapter,
    drafters: dict[str, LayerPathDrafter],
    prompts: Sequence[Tensor],
    temperature: float,
    settings: Settings,
    told: Watch,
) -> dict[str, Acceptance]:
    texts = continued(model, prompts, settings.max_new_tokens, temperature, settings.seed, told)
    return teacher_forced(model, adapter, drafters, texts, (settings.temperature,), told)

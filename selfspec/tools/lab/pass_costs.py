"""What the parts of a round cost, timed apart from the run: the c, V and o of the speed-up formula, by draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from selfspec.api import wrap
from selfspec.draft import Drafter, PromptLookup
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import PLAIN, draft_name
from selfspec.measure.costs import MeasuredCosts, measure_costs, verify_cost
from selfspec.measure.estimate import Estimate
from selfspec.measure.stock import bare
from selfspec.model.registry import find_adapter
from selfspec.runtime.named import RuntimeName, runtime_named
from selfspec.tools.lab.arms import Arm, OwnArm
from selfspec.tools.lab.cell import Cell, Prompts

_LENGTHS = (1, 2, 3, 5, 7)
_REPEATS = 7
_PLAIN_ROUND = Estimate(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class PassCosts:
    """The costs of one draft, as `selfspec.measure.measure_costs` times them; the unit is a round of plain decoding.

    Attributes:
        step_seconds: seconds of a round of plain decoding.
        draft: c, a draft step, head included; None for look-ups, which take none.
        verify: V(m) after draft steps by m, the tokens to verify: of a pass that resumes where the draft left, if it
            can.
        from_tokens: V(m) of a target pass from tokens on, as after a look-up.
        overhead: o of a round that drafts with the model; of look-ups that of a round with a draft for nothing.
    """

    step_seconds: Estimate
    draft: Estimate | None
    verify: dict[int, Estimate] = field(default_factory=dict)
    from_tokens: dict[int, Estimate] = field(default_factory=dict)
    overhead: Estimate = field(default=Estimate(0.0, 0.0, 0.0))

    def of_round(self, steps: int, drafted: int) -> Estimate | None:
        """The cost of a round without o, of a look-up if it has no steps; None where its draft step was not timed.

        Its interval has all parts at one end at a time, so it is wide.
        """
        if drafted == 0:
            return _PLAIN_ROUND  # A round of plain decoding is the unit.
        if steps and self.draft is None:
            return None
        draft = self.draft if steps and self.draft is not None else Estimate(0.0, 0.0, 0.0)
        verify = self.verify if steps else self.from_tokens

        def at(end: str) -> float:
            by_width = {width: float(getattr(cost, end)) for width, cost in verify.items()}
            return steps * float(getattr(draft, end)) + verify_cost(by_width, drafted + 1)

        return Estimate(at("value"), at("low"), at("high"), draft.confidence)


def costs_of(
    model: PreTrainedModel, cell: Cell, arms: Sequence[Arm], prompts: Sequence[Prompts]
) -> list[PassCosts | None]:
    """The costs of each arm's draft under the conditions of a cell, in the middle of its texts.

    None for arms that do not draft, that draft trees, whose steps read several nodes at once, or in a way that has no
    known parts. All of selfspec's arms run passes alike.
    """
    drafts = [arm.drafter(cell) if isinstance(arm, OwnArm) and arm.spec.nodes is None else None for arm in arms]
    paths = {draft_name(path): path for path in map(_path, drafts) if path is not None}
    runtime = next((arm.spec.runtime for arm in arms if arm.spec.own), RuntimeName.NATIVE)
    lengths = sorted({*_LENGTHS, max([*_LENGTHS, *(arm.spec.length or 1 for arm in arms)])})
    measured = measure_costs(
        model,
        find_adapter(model),
        list(paths.values()),
        widths=[length + 1 for length in lengths],
        context=max(call.ids.shape[1] for call in prompts) + cell.max_new_tokens // 2,
        repeats=_REPEATS,
        lengths=lengths,
        batch=cell.batch,
        temperature=cell.temperature,
        base=wrap(bare(model), runtime=runtime_named(runtime, after=0)),
    )
    known = (LayerPathDrafter, PromptLookup)
    return [_costs(measured, _path(draft)) if isinstance(_last(draft), known) else None for draft in drafts]


def _last(draft: Drafter | None) -> Drafter | None:
    """The last source of a cascade or union."""
    return None if draft is None else draft.last


def _path(draft: Drafter | None) -> LayerPathDrafter | None:
    draft = _last(draft)
    return draft if isinstance(draft, LayerPathDrafter) else None


def _costs(measured: MeasuredCosts, path: LayerPathDrafter | None) -> PassCosts:
    """Those of a draft along a path, or, without one, of look-ups."""
    name = PLAIN if path is None else draft_name(path)
    verify: Mapping[str, Mapping[int, Estimate]] = measured.verify
    return PassCosts(
        step_seconds=measured.step_seconds,
        draft=None if path is None else measured.draft[name],
        verify={} if path is None else dict(verify[name]),
        from_tokens=dict(verify[PLAIN]),
        overhead=measured.overhead[name],
    )

"""What the parts of a round cost, timed apart from the run: the c, V and o of the speed-up formula, by draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedModel

from selfspec.api import wrap
from selfspec.draft import Cascade, Drafter, PromptLookup
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.named import PLAIN, draft_name
from selfspec.measure.costs import MeasuredCosts, measure_costs, verify_cost
from selfspec.measure.stock import bare
from selfspec.model.registry import find_adapter
from selfspec.runtime.named import RuntimeName, runtime_named
from selfspec.tools.bench.arm import Arm
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.own_arms import OwnArm

_LENGTHS = (1, 2, 3, 5, 7)
_REPEATS = 7


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

    step_seconds: float
    draft: float | None
    verify: dict[int, float] = field(default_factory=dict)
    from_tokens: dict[int, float] = field(default_factory=dict)
    overhead: float = 0.0

    def of_round(self, steps: int, drafted: int) -> float | None:
        """The cost of a round without o; None where its draft step was not timed.

        Args:
            steps: draft steps; 0: a look-up.
            drafted: draft tokens; 0: a round of plain decoding, which costs 1.
        """
        if drafted == 0:
            return 1.0
        if steps == 0:
            return verify_cost(self.from_tokens, drafted + 1)
        return None if self.draft is None else steps * self.draft + verify_cost(self.verify, drafted + 1)

    @classmethod
    def of(cls, measured: MeasuredCosts, path: LayerPathDrafter | None) -> PassCosts:
        """Those of a draft along a path, or, without one, of look-ups."""
        name = PLAIN if path is None else draft_name(path)
        return cls(
            step_seconds=measured.step_seconds.value,
            draft=None if path is None else measured.draft[name].value,
            verify={} if path is None else {m: each.value for m, each in measured.verify[name].items()},
            from_tokens={m: each.value for m, each in measured.verify[PLAIN].items()},
            overhead=measured.overhead[name].value,
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> PassCosts:
        """Read back from JSON, whose keys are strings."""
        widths = {name: {int(m): cost for m, cost in found[name].items()} for name in ("verify", "from_tokens")}
        return cls(**{**found, **widths})


def costs_of(model: PreTrainedModel, cell: Cell, arms: Sequence[Arm]) -> list[PassCosts | None]:
    """The costs of each arm's draft under the conditions of a cell, in the middle of its texts.

    Args:
        model: stock.
        cell: the conditions.
        arms: of any kind; all of selfspec's run passes alike.

    Returns:
        One for each arm; None for arms that do not draft, or in a way that has no known parts.
    """
    drafts = [arm.drafter(cell) if isinstance(arm, OwnArm) else None for arm in arms]
    paths = {draft_name(path): path for path in map(_path, drafts) if path is not None}
    runtime = next((arm.spec.runtime for arm in arms if isinstance(arm, OwnArm)), RuntimeName.TRACED)
    longest = max([*_LENGTHS, *(arm.spec.length or 1 for arm in arms)])
    measured = measure_costs(
        model,
        find_adapter(model),
        list(paths.values()),
        widths=[length + 1 for length in (*_LENGTHS, longest)],
        context=cell.context + cell.max_new_tokens // 2,
        repeats=_REPEATS,
        lengths=sorted({*_LENGTHS, longest}),
        batch=cell.batch,
        temperature=cell.temperature,
        base=wrap(bare(model), runtime=runtime_named(runtime, after=0)),
    )
    return [PassCosts.of(measured, _path(draft)) if _has_parts(draft) else None for draft in drafts]


def _path(draft: Drafter | None) -> LayerPathDrafter | None:
    if isinstance(draft, Cascade):
        return draft.path
    return draft if isinstance(draft, LayerPathDrafter) else None


def _has_parts(draft: Drafter | None) -> bool:
    return isinstance(draft, (Cascade, LayerPathDrafter, PromptLookup))

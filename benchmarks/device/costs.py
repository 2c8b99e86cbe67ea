"""c, V and o of drafts at the shapes of well-known models, by each way to run passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from device.figure import Figure, Rows
from device.stage import Bench, Case

from selfspec.api import SelfSpeculative, wrap
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import PLAIN, draft_name, parse_draft
from selfspec.measure.costs import measure_costs
from selfspec.measure.stock import bare
from selfspec.model.registry import find_adapter
from selfspec.tools.lab.arms import RuntimeName, runtime_named

_LENGTHS, _FEW_LENGTHS = (1, 3, 7), (3,)
_WIDTHS, _FEW_WIDTHS = (1, 2, 4, 8, 16), (1, 4)


@dataclass(frozen=True)
class _Wanted:
    """Settings of one case."""

    runtime: RuntimeName
    draft: str
    context: int
    batch: int = 1

    @property
    def name(self) -> str:
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        return f"{self.runtime}, {self.draft}{batch}, {self.context} tokens"


def cost_cases(shape: str, bench: Bench) -> Iterator[Case]:
    """Return cases of each runtime, with an exit at a quarter of the depth and with fewer bits."""
    exit_ = f"exit:{max(1, bench.models.config(shape).num_hidden_layers // 4)}"
    context, longer = (16, 24) if bench.miniature else (512, 4096)

    runtimes, drafts = (RuntimeName.GRAPHS, RuntimeName.EAGER), ("int8", "int4", exit_)
    wanted = [_Wanted(name, draft, context) for name in runtimes for draft in drafts]
    wanted += [_Wanted(RuntimeName.GRAPHS, exit_, context, batch=8), _Wanted(RuntimeName.GRAPHS, exit_, longer)]
    for each in wanted:
        yield Case(each.name, partial(_measured, shape, bench, each))


def _measured(shape: str, bench: Bench, wanted: _Wanted) -> Rows:
    model = bare(bench.models.random(shape))
    drafter = parse_draft(wanted.draft)
    assert isinstance(drafter, LayerPathDrafter)
    # Refuses by name what the device cannot run.
    base = wrap(model, drafter, runtime=runtime_named(wanted.runtime, after=0))
    measured = measure_costs(
        model,
        find_adapter(model),
        [drafter],
        _FEW_WIDTHS if bench.miniature else _WIDTHS,
        wanted.context,
        1 if bench.miniature else 15,
        lengths=_FEW_LENGTHS if bench.miniature else _LENGTHS,
        batch=wanted.batch,
        base=base.drafting(None),
    )
    name = draft_name(drafter)
    figures = {
        "plain step": Figure.estimated(measured.step_seconds, "ms", 1000),
        "c": Figure.estimated(measured.draft[name]),
        "o": Figure.estimated(measured.overhead[name]),
        **{f"V({m})": Figure.estimated(each) for m, each in measured.verify[name].items()},
        **{f"V({m}), from tokens": Figure.estimated(each) for m, each in measured.verify[PLAIN].items() if m > 1},
    }
    if wanted.batch > 1 and measured.out_of_step is not None:
        figures["out of step"] = Figure.estimated(measured.out_of_step)
    if wanted.draft.startswith("int"):
        figures["substitutes"] = Figure.number(base.substitutes.nbytes / 2**20, "MiB")
    return {"": {**figures, **_programs(base)}}


def _programs(base: SelfSpeculative) -> dict[str, Figure]:
    """Return how many kinds of passes programs ran; a figure without them would be the stock modules'."""
    if base.runtime.after is None:
        return {}
    refused = Counter(base.programs.refusals.values())
    reasons = "; ".join(f"{number} x {reason}" for reason, number in refused.items())
    return {"kinds by programs": Figure.number(len(base.programs.proved)), "refused kinds": Figure(reasons or "none")}

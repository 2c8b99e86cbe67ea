"""Measure, apart from the run, the c, V and o of each draft, and the peak memory of each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from selfspec.api import wrap
from selfspec.device import backend, on_host
from selfspec.draft import Drafter, PromptLookup
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import PLAIN, draft_name
from selfspec.measure.costs import MeasuredCosts, measure_costs, verify_cost
from selfspec.measure.estimate import Estimate
from selfspec.measure.stock import bare
from selfspec.measure.timing import peak_memory
from selfspec.model.registry import find_adapter
from selfspec.model.tensor_parallel import whole
from selfspec.process import resident_bytes
from selfspec.tools.lab.arms import Arm, ArmSpec, Cell, OwnArm, Prompts, RuntimeName, make_arm, runtime_named

_LENGTHS = (1, 2, 3, 5, 7)
_REPEATS = 7
_PLAIN_ROUND = Estimate(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class PassCosts:
    """The costs of one draft, as `measure_costs` times them; the unit is a round of plain decoding.

    Attributes:
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
        """Return the cost of a round without o, of a look-up if `steps` is 0; None where its draft step was not timed.

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
    """Return the costs of each arm's draft under the conditions of a cell, in the middle of its texts.

    They are None for arms that do not draft, that draft trees, or whose draft has no known parts.
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
    """Return the last source of a cascade or union."""
    return None if draft is None else draft.last


def _path(draft: Drafter | None) -> LayerPathDrafter | None:
    draft = _last(draft)
    return draft if isinstance(draft, LayerPathDrafter) else None


def _costs(measured: MeasuredCosts, path: LayerPathDrafter | None) -> PassCosts:
    """Return the costs of a draft along a path; without one, of look-ups."""
    name = PLAIN if path is None else draft_name(path)
    verify: Mapping[str, Mapping[int, Estimate]] = measured.verify
    return PassCosts(
        step_seconds=measured.step_seconds,
        draft=None if path is None else measured.draft[name],
        verify={} if path is None else dict(verify[name]),
        from_tokens=dict(verify[PLAIN]),
        overhead=measured.overhead[name],
    )


# Tokens enough for every kind of pass.
_FEW = 16


@dataclass(frozen=True)
class PeakMemory:
    """Memory of one call, in bytes: of the loaded weights, and at the peak, the weights included.

    It is counted by "torch", or by the "system": the resident set without Python and its libraries.
    """

    weights: int
    peak: int
    counted_by: str

    @property
    def growth(self) -> int:
        """Bytes of the call above the weights."""
        return self.peak - self.weights


@dataclass(frozen=True)
class _Job:
    """The work of the other process, and its device."""

    arm: ArmSpec
    cell: Cell
    prompts: Prompts
    place: str
    dtype: torch.dtype
    device: torch.device
    threads: int


def measure_memory(arm: ArmSpec, cell: Cell, prompts: Prompts, place: str, dtype: torch.dtype) -> PeakMemory | None:
    """Let a new process load the model and decode once, on the device of the prompts; None: the system cannot tell."""
    there = Prompts(prompts.ids.cpu(), prompts.mask.cpu())
    job = _Job(arm, cell, there, place, dtype, prompts.ids.device, torch.get_num_threads())
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            return process.submit(_measure, job).result()
        except Exception as error:
            raise RuntimeError(f"memory of {arm.name} could not be measured: {error}") from error


def _measure(job: _Job) -> PeakMemory | None:
    """Load the model, decode a few tokens so that all code is loaded, and then measure a whole call."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job.threads)
    before = _in_use(job.device)
    model = AutoModelForCausalLM.from_pretrained(job.place, dtype=job.dtype).to(job.device).eval()
    # Weights may be mapped from their file, and are not in memory before they are read.
    for weight in model.parameters():
        whole(weight).sum()
    weights = _in_use(job.device) - before
    arm, prompts = make_arm(job.arm, model), Prompts(job.prompts.ids.to(job.device), job.prompts.mask.to(job.device))
    few = Prompts.of_one_length(prompts.ids[:, -_FEW:])
    arm.decode(few, replace(job.cell, max_new_tokens=_FEW), seed=0)
    loaded = _in_use(job.device)
    growth = peak_memory(lambda: arm.decode(prompts, job.cell, seed=0), job.device)
    if growth is None:
        return None
    return PeakMemory(weights, loaded - before + growth, "torch" if _counts(job.device) else "system")


def _in_use(device: torch.device) -> int:
    allocated: int = backend(device).memory_allocated(device) if _counts(device) else resident_bytes() or 0
    return allocated


def _counts(device: torch.device) -> bool:
    """Return whether torch counts the memory of a device."""
    return not on_host(device) and hasattr(backend(device), "memory_allocated")

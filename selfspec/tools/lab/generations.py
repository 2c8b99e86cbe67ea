"""Generate with several arms of one model in turns, so that a busy machine slows all alike; a row for each text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.api import wrap
from selfspec.decode.text_stream import shared_length
from selfspec.draft import Drafter, PromptLookup
from selfspec.draft.registry import PLAIN, draft_name
from selfspec.measure.costs import measure_costs
from selfspec.measure.environment import environment
from selfspec.measure.rounding import Bound, tie_gap, widths_of
from selfspec.measure.spare_cores import CoreWatch
from selfspec.measure.stock import bare, read_reference, repeated_share, stepwise_logits
from selfspec.measure.watch import Watch
from selfspec.model.registry import find_adapter
from selfspec.tools.lab.arms import Arm, ArmSpec, Call, Cell, OwnArm, Prompts, runtime_named
from selfspec.tools.lab.drafts import path_of, paths_of
from selfspec.tools.lab.prices import RoundCosts
from selfspec.tools.lab.runs import Row, Run, Runs, digest_of, origin

Part = Literal["speed", "costs", "quality", "acceptance"]
"""Parts of a measurement. Without `speed` and what needs it, texts are decoded once and nothing is timed."""

_TIMED: frozenset[Part] = frozenset({"speed", "costs"})
_LENGTHS, _REPEATS = (1, 2, 3, 5, 7), 7


def run_of(of: Row, cell: Cell, prompts: Sequence[Prompts], arm: ArmSpec, labels: Row, **how: Any) -> Run:
    """Return the run of an arm, of a model whose `origin` is `of`; `how` it is measured is a part of its key."""
    conditions, decodes = asdict(cell), asdict(arm)
    named = {"workload": conditions.pop("workload"), "arm": arm.name, "lossless": decodes.pop("lossless")}
    decodes = {**decodes, "decoder": decodes.pop("kind"), "draft_length": decodes.pop("length")}
    digest = digest_of([call.rows for call in prompts])
    under = {**of, **conditions, "prompts": digest, **decodes, **how}
    return Run("generation", under, {**labels, **named})


def turns_of(specs: Sequence[ArmSpec]) -> str:
    """Return a digest of the arms that take turns: times belong together only within one such measurement."""
    return digest_of([asdict(spec) for spec in specs])


@dataclass(frozen=True, kw_only=True)
class Generations:
    """Measures the arms of one model in each cell; they begin with `model.generate`, unless nothing is timed.

    Attributes:
        warm_up: how often each arm decodes all prompts before it is timed.
        parts: to measure.
        tokenizer: writes prompts and texts down; None: token ids alone are kept.
    """

    name: str
    model: PreTrainedModel
    arms: Sequence[Arm]
    repeats: int = 5
    warm_up: int = 3
    parts: frozenset[Part] = _TIMED
    tokenizer: PreTrainedTokenizerBase | None = None

    def measure(self, cells: Mapping[Cell, Sequence[Prompts]], runs: Runs, watch: Watch) -> list[Row]:
        """Measure the cells, given with the prompts of each call, that were not measured before; return all rows."""
        arms = [*self.arms]
        of, timed = origin(self.model), bool(self.parts & _TIMED)
        repeats, warm_up = (self.repeats, self.warm_up) if timed else (1, 0)
        labels = {"model": self.name, "parameters": self.model.num_parameters()}
        how = {"repeats": self.repeats if timed else 0, "parts": sorted(self.parts)}
        if timed:
            how["turns"] = turns_of([arm.spec for arm in arms])
        asked = {
            cell: [run_of(of, cell, prompts, arm.spec, labels, **how) for arm in arms]
            for cell, prompts in cells.items()
        }
        # What is timed is timed in turns; what is counted depends on no other arm.
        missing = {
            cell: [arm for arm, run in zip(arms, wanted, strict=True) if run not in runs]
            for cell, wanted in asked.items()
        }
        missing = {cell: arms if timed else some for cell, some in missing.items() if some}
        times = repeats + warm_up
        watch.begin(sum(len(some) * len(cells[each]) * times for each, some in missing.items()))
        for number, (cell, going) in enumerate(missing.items(), 1):
            tick = partial(watch.step, f"cell {number} of {len(missing)}: {cell.workload}, {cell.decoding}")
            busy, prompts = CoreWatch(), cells[cell]
            results = measure(self.model, cell, going, prompts, repeats, warm_up, tick)
            around = {**environment(self.model.device), **asdict(busy.read())}
            costs = costs_of(self.model, cell, going, prompts) if "costs" in self.parts else [None] * len(going)
            wanted = {run.labels["arm"]: run for run in asked[cell]}
            greedy = [[*call.rows] for call in results[0].calls[0]] if results[0].refused is not None else None
            for result, cost in zip(results, costs, strict=True):
                # Greedily every repeat says the same.
                scored = (result.calls if cell.sampled else result.calls[:1]) if "quality" in self.parts else ()
                nats = [nats_of(self.model, prompts, [call.rows for call in calls]) for calls in scored]
                found = arm_rows(result, prompts, self.tokenizer, cost, nats, greedy)
                runs.keep(wanted[result.arm.spec.name].rows(found if timed else untimed(found), around))
        return [row for wanted in asked.values() for run in wanted for row in runs[run]]


def rows_of(
    model: PreTrainedModel, name: str, cell: Cell, prompts: Sequence[Prompts], results: Sequence[ArmRun]
) -> list[Row]:
    """Return the rows of a model's arms that took turns in a cell; greedy texts are compared with the first arm's."""
    of, around, turns = origin(model), environment(model.device), turns_of([each.arm.spec for each in results])
    expected = None if cell.sampled else [call.rows for call in results[0].calls[0]]
    how = {"repeats": max(len(each.calls) for each in results), "parts": ["speed"], "turns": turns}
    rows: list[Row] = []
    for each in results:
        run = run_of(of, cell, prompts, each.arm.spec, {"model": name}, **how)
        rows += run.rows(arm_rows(each, prompts, expected=expected), around)
    return rows


def latest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of benchmarks: of each cell those that were timed together last, and all that were counted."""
    names = ("setting", "workload", "prompts", "temperature", "batch", "context", "chat", "max_new_tokens", "repeats")
    cells = [(*(row.get(name) for name in names), *row["parts"]) if "parts" in row else None for row in rows]
    last = {cell: row.get("turns") for cell, row in zip(cells, rows, strict=True)}
    return [row for cell, row in zip(cells, rows, strict=True) if cell and row.get("turns") == last[cell]]


def arm_rows(
    result: ArmRun,
    prompts: Sequence[Prompts],
    tokenizer: PreTrainedTokenizerBase | None = None,
    costs: RoundCosts | None = None,
    nats: Sequence[list[list[float]]] = (),
    expected: Sequence[Sequence[list[int]]] | None = None,
) -> list[Row]:
    """Return a row for each text of an arm, or one that says why there is none.

    `expected` are the texts of each call by `model.generate`; None where there is nothing to compare with.
    """
    if result.absence is not None:
        return [{"absence": result.absence}]
    refused = bool(result.refused) and result.arm.spec.lossless
    found: list[Row] = []
    for repeat, calls in enumerate(result.calls):
        for number, (asked, call) in enumerate(zip(prompts[: len(calls)], calls, strict=True)):
            counted = call_columns(call)
            if costs is not None and "judged" in counted:
                counted = costs.priced(counted)
            for row, (prompt, text) in enumerate(zip(asked.rows, call.rows, strict=True)):
                found.append(
                    {
                        "repeat": repeat,
                        "call": number,
                        "row": row,
                        "seed": call.seed,
                        "prompt_tokens": len(prompt),
                        "new_tokens": len(text),
                        "token_ids": text,
                        "repeated_share": repeated_share(text),
                        **counted,
                        **({} if expected is None else {"equal": text == expected[number][row]}),
                        **({} if result.refused is None else {"refused": refused}),
                    }
                )
                if tokenizer is not None:
                    found[-1] |= {"prompt": str(tokenizer.decode(prompt)), "text": str(tokenizer.decode(text))}
                if repeat < len(nats):
                    found[-1]["nats"] = nats[repeat][number][row]
    return found


def untimed(rows: Sequence[Row]) -> list[Row]:
    """Return rows without the times that nobody asked for."""
    return [{name: value for name, value in row.items() if not name.endswith("seconds")} for row in rows]


def call_columns(call: Call) -> Row:
    """Return the columns of a call: its times, and of selfspec's arms its counts."""
    found: Row = {
        "seconds": call.seconds,
        "first_seconds": call.first_seconds,
        "first_tokens": call.first_tokens,
        "passes": call.passes,
    }
    stats = call.stats
    # Rows of `model.generate` are one pass a token each.
    found["rounds"] = call.passes if len(call.rows) == 1 else call.tokens
    if stats is not None:
        shapes = [[*shape, number] for shape, number in sorted(call.rounds.items())]
        found |= {
            "rounds": stats.row_rounds,
            "judged": stats.judged_per_depth,
            "accepted": stats.accepted_per_depth,
            "shapes": shapes,
            "draft_seconds": stats.seconds.get("draft", 0.0),
            "verify_seconds": stats.seconds.get("verify", 0.0),
            "cache_bytes": stats.cache_bytes,
        }
    return found


def costs_of(
    model: PreTrainedModel, cell: Cell, arms: Sequence[Arm], prompts: Sequence[Prompts]
) -> list[RoundCosts | None]:
    """Time, apart from the run, what the rounds of each arm's draft cost in a cell, in the middle of its texts.

    They are None for arms that do not draft, that draft trees, or whose draft has no known parts.
    """
    chains = [arm if isinstance(arm, OwnArm) and arm.spec.own and arm.spec.nodes is None else None for arm in arms]
    drafts = [None if arm is None else arm.drafter(cell) for arm in chains]
    runtime = next((arm.spec.runtime for arm in arms if arm.spec.own), "native")
    lengths = sorted({*_LENGTHS, max([*_LENGTHS, *(arm.spec.length or 1 for arm in arms)])})
    measured = measure_costs(
        model,
        find_adapter(model),
        list(paths_of(drafts).values()),
        widths=[length + 1 for length in lengths],
        context=max(call.ids.shape[1] for call in prompts) + cell.max_new_tokens // 2,
        repeats=_REPEATS,
        lengths=lengths,
        batch=cell.batch,
        temperature=cell.temperature,
        base=wrap(bare(model), runtime=runtime_named(runtime, after=0)),
    )
    named = [_timed_as(draft) for draft in drafts]
    return [None if name is None else RoundCosts.of(measured, name) for name in named]


def _timed_as(draft: Drafter | None) -> str | None:
    """Return the name under which the rounds of a draft are timed."""
    if (path := path_of(draft)) is not None:
        return draft_name(path)
    return PLAIN if draft is not None and isinstance(draft.last, PromptLookup) else None


@torch.no_grad()
def nats_of(
    model: PreTrainedModel, prompts: Sequence[Prompts], texts: Sequence[Sequence[Sequence[int]]]
) -> list[list[float]]:
    """Return the negative log-likelihood of each text under the stock model at temperature 1, by call and row."""
    stock = bare(model)
    found: list[list[float]] = []
    for asked, rows in zip(prompts, texts, strict=True):
        found.append([])
        for prompt, row in zip(asked.rows, rows, strict=True):
            ids = torch.tensor([[*prompt, *row]], device=model.device)
            logits = stock(ids).logits[0, len(prompt) - 1 : -1]
            likelihoods = logits.float().log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
            found[-1].append(-float(likelihoods.sum()))
    return found


# Not one of those that are timed.
_WARM_UP_SEED = 2**31

ENDLESS = 10**6
"""Repeats, where time ends them."""


@dataclass
class ArmRun:
    """Calls of an arm in a cell: for each repeat, one for each batch of prompts.

    `absence` says why it did not run. `refused` is None where nothing was compared; True if its greedy texts are not
    those of `model.generate`, up to what half precision's rounding explains, so that it may not be scored.
    """

    arm: Arm
    absence: str | None = None
    calls: list[list[Call]] = field(default_factory=list)
    refused: bool | None = None


def measure(
    model: PreTrainedModel,
    cell: Cell,
    arms: Sequence[Arm],
    prompts: Sequence[Prompts],
    repeats: int,
    warm_up: int,
    tick: Callable[[int], None],
    *,
    seed: int = 0,
    until: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> list[ArmRun]:
    """Measure all arms in a cell. Greedy texts are compared with those of `model.generate`, where that is the first.

    Every arm first decodes every batch `warm_up` times untimed, so that passes are compiled or recorded when it is
    timed. Then each batch is decoded by one arm after the other, beginning with another one from batch to batch. Draws
    are seeded by repeat and batch, on from `seed`. `tick` is called with 1 before every call, at most
    `len(arms) * len(prompts) * (warm_up + repeats)` times, and with 0 before texts are compared.

    By the clock no turn of all arms begins that would end later than `until`, but for the first; so the last repeat may
    have fewer calls than there are prompts.
    """
    results = [ArmRun(arm) for arm in arms]
    # Those of selfspec come last and warm up first: they refuse what they cannot do.
    for result in reversed(results):
        result.absence = _warmed_up(result.arm, prompts, cell, warm_up, tick)
    running = [result for result in results if result.absence is None]
    longest = 0.0
    for turn in range(repeats * len(prompts)):
        started, (repeat, number) = clock(), divmod(turn, len(prompts))
        if turn and started + longest > until:
            break
        first = (repeat + number) % max(len(running), 1)
        for result in [*running[first:], *running[:first]]:
            tick(1)
            if number == 0:
                result.calls.append([])
            result.calls[-1].append(result.arm.decode(prompts[number], cell, seed=seed + turn))
        longest = max(longest, clock() - started)
    if not cell.sampled and running and running[0].arm.spec.kind == "generate":
        tick(0)
        for result in running:
            result.refused = differ(model, _pairs(running[0], result, prompts))
    return results


def _warmed_up(arm: Arm, prompts: Sequence[Prompts], cell: Cell, times: int, tick: Callable[[int], None]) -> str | None:
    """Decode untimed; what keeps an arm of `transformers` from it is a reason not to have it, and no more."""
    try:
        for warm_up, batch in product(range(times), prompts):
            tick(1)
            arm.decode(batch, cell, seed=_WARM_UP_SEED + warm_up)
    except Exception as error:
        if arm.spec.own or arm.spec.kind == "generate":
            raise
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    return None


def _pairs(reference: ArmRun, result: ArmRun, prompts: Sequence[Prompts]) -> list[Pair]:
    """Return pairs of texts of all repeats, since an arm need not write the same every time."""
    return [
        Pair(tuple(prompt), tuple(expected), tuple(found))
        for calls in zip(reference.calls, result.calls, strict=True)
        for asked, stock, own in zip(prompts[: len(calls[0])], *calls, strict=True)
        for prompt, expected, found in zip(asked.rows, stock.rows, own.rows, strict=True)
    ]


_HALF = (torch.float16, torch.bfloat16)
# Widths of the passes whose rounding is measured: no arm's blocks are much wider.
_BLOCK = 10


class Pair(NamedTuple):
    """A prompt, its new tokens by `model.generate`, and those by an arm."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    found: tuple[int, ...]


def differ(model: PreTrainedModel, pairs: Iterable[Pair]) -> bool:
    """Return whether an arm's greedy texts differ from those of `model.generate` by more than rounding explains.

    It excuses tokens of half precision that are nearly tied where texts part; in float32 and float64 nothing.
    """
    parted = {pair: shared_length(pair.expected, pair.found) for pair in pairs if pair.expected != pair.found}
    # Where texts part one may end sooner; one that only stops early is not the other up to rounding.
    early = any(place == min(len(pair.expected), len(pair.found)) for pair, place in parted.items())
    if not parted or early or model.dtype not in _HALF:
        return bool(parted)
    bound, gaps = Bound(widths_of(_BLOCK)), []
    stock = bare(model)
    stock.generation_config.eos_token_id = None
    for pair, place in parted.items():
        prompt = torch.tensor([pair.prompt], device=model.device)
        bound.measure(model, read_reference(stock, prompt, len(pair.expected)))
        # How far the two tokens where the texts part are from a tie, by the model's own one-token passes.
        logits = stepwise_logits(model, prompt, pair.expected[: place + 1])[-1]
        gaps.append(tie_gap(logits, pair.expected[place], pair.found[place]))
    return max(gaps) > bound.near_tie

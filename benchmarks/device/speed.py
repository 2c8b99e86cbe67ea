"""Tokens a second, all ways to decode in turns: `model.generate`, plain decoding by each runtime, and drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from device.arms import drafting, plain, ready
from device.figure import Figure, Rows
from device.stage import Bench, Case

from selfspec.measure.prompts import built_in
from selfspec.runtime.named import RuntimeName
from selfspec.tools.bench.arms import ArmSpec
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.figures import figures
from selfspec.tools.bench.measure import ArmRun, measure
from selfspec.tools.bench.record import Record, Setup, record_of

_RATE = "tokens/s"
_REFERENCE = ArmSpec("generate")
_EXITS = (1 / 3, 3 / 4)
_ASSISTED = 3
# Of trees: levels along a path of the model, and nodes. A tree of recycled candidates is as large as pays.
_LEVELS, _NODES = 4, (16, 32, 64)
# Larger models take longer: fewer tokens, and texts.
_TOKENS = {"1B": 96, "8B": 64}
_TEXTS = {"1B": 2, "8B": 1}
_CONTEXT, _REPEATS, _WARM_UP = 128, 5, 2


def speed_cases(shape: str, bench: Bench) -> Iterator[Case]:
    """Greedy and sampled texts, and greedy ones in a batch."""
    context, tokens = (8, 6) if bench.miniature else (_CONTEXT, _TOKENS[shape])
    rows = 2 if bench.miniature else 8
    for name, temperature, batch in (("greedy", 0.0, 1), ("temperature 0.8", 0.8, 1), (f"batch {rows}", 0.0, rows)):
        cell = Cell("code", temperature, batch, context, tokens)
        yield Case(name, partial(_measured, shape, bench, cell, _specs(shape, bench, cell)))


def tree_cases(shape: str, bench: Bench) -> Iterator[Case]:
    """Trees of several sizes beside chains along the same paths and beside plain decoding, greedily and sampled."""
    context, tokens = (8, 6) if bench.miniature else (_CONTEXT, _TOKENS[shape])
    for name, temperature in (("greedy", 0.0), ("temperature 0.8", 0.8)):
        cell = Cell("code", temperature, 1, context, tokens)
        yield Case(name, partial(_measured, shape, bench, cell, _tree_specs(shape, bench)))


def _tree_specs(shape: str, bench: Bench) -> list[ArmSpec]:
    paths = (f"exit:{bench.models.exit_layer(shape, _EXITS[1])}", "int4")
    chains = drafting([*paths, "recycle"], RuntimeName.GRAPHS)
    trees = [
        replace(chain, length=_LEVELS if chain.draft in paths else None, nodes=nodes)
        for chain in chains
        for nodes in _NODES
    ]
    levels = [replace(chain, length=_LEVELS) for chain in chains if chain.draft in paths]
    return [_REFERENCE, *plain(RuntimeName.GRAPHS), *chains, *levels, *trees]


def _specs(shape: str, bench: Bench, cell: Cell) -> list[ArmSpec]:
    early, late = (bench.models.exit_layer(shape, share) for share in _EXITS)
    stock = [_REFERENCE, ArmSpec("static")]
    own = plain(RuntimeName.EAGER, RuntimeName.TRACED, RuntimeName.GRAPHS)
    own += drafting([f"exit:{early}", f"exit:{late}", "int8", "int4", "lookup", "recycle"], RuntimeName.GRAPHS)
    if cell.batch == 1 and not cell.sampled:
        # To compile, or to draft as transformers does, takes long: once will do.
        stock.append(ArmSpec("early-exit", exit_layer=late, length=_ASSISTED))
        own += plain(RuntimeName.COMPILED)
    return list(dict.fromkeys([*stock, *own]))


def _measured(shape: str, bench: Bench, cell: Cell, specs: Sequence[ArmSpec]) -> Rows:
    checkpoint = bench.models.trained(shape)
    model = checkpoint.model
    number = max(_TEXTS[shape], cell.batch)
    prompts = [
        each.to(model.device) for each in built_in().prompts(checkpoint.tokenizer, number, cell.batch, cell.context)
    ]
    found = ready(specs, model, cell, prompts[0])
    if _REFERENCE.name in found.others:
        raise RuntimeError(f"nothing to compare with: {found.others[_REFERENCE.name]}")
    repeats, warm_up = (2, 1) if bench.miniature else (_REPEATS, _WARM_UP)
    runs = measure(model, cell, found.arms, prompts, repeats, warm_up, lambda: None)
    settings = Setup(shape, model.num_parameters(), "bfloat16", model.device.type, 0, repeats, len(prompts), "")
    records = {
        run.arm.spec.name: record_of(run, "device", cell, settings, {}, None, None, [])
        for run in runs
        if run.absence is None
    }
    rows = {run.arm.spec.name: _row(run, records) for run in runs}
    return {**rows, **{name: {_RATE: reason} for name, reason in found.others.items()}}


def _row(run: ArmRun, records: dict[str, Record]) -> dict[str, Figure]:
    if run.absence is not None:
        return {_RATE: Figure(cannot=run.absence)}
    record = records[run.arm.spec.name]
    found = figures(record, records[_REFERENCE.name], None)
    row = {
        _RATE: Figure.estimated(found.decoding_tokens_per_second, _RATE),
        "of model.generate": Figure.estimated(found.decoding_against["model_generate"]),
        "first token": Figure.estimated(found.first_token_seconds, "ms", 1000),
        "tokens a round": Figure.number(found.mean_accepted_length),
    }
    if record.agreement is not None:
        equal = f"{record.agreement.equal} of {record.agreement.texts} equal"
        refused = f"{equal}, and rounding does not explain the others"
        row["texts"] = Figure(failed=refused) if record.refused else Figure(equal)
    return row

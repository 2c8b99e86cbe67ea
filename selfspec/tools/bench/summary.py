"""The figures of measured cells, as JSON prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfspec.tools.bench import figures
from selfspec.tools.bench.arm import ArmKind
from selfspec.tools.bench.prediction import prediction, round_cost
from selfspec.tools.bench.record import Record
from selfspec.tools.bench.results_file import MeasuredCell


def summary(cells: Sequence[MeasuredCell]) -> dict[str, Any]:
    """The figures of all cells, ready for JSON."""
    return {"cells": [_cell(measured) for measured in cells]}


def _cell(measured: MeasuredCell) -> dict[str, Any]:
    reference, plain = (_of_kind(measured, kind) for kind in (ArmKind.GENERATE, ArmKind.PLAIN))
    return {
        "cell": measured.cell.to_dict(),
        "settings": vars(measured.settings),
        "environment": measured.arms[0].environment,
        "arms": [_arm(record, reference, plain) for record in measured.arms],
    }


def _arm(record: Record, reference: Record | None, plain: Record | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": record.arm.name,
        "arm": record.arm.to_dict(),
        "absence": record.absence,
        "agreement": None if record.agreement is None else record.agreement.to_dict(),
        "memory": None if record.memory is None else vars(record.memory),
    }
    if not record.scored:
        return found
    others = {"model_generate": reference, "plain": plain}
    cost = None if plain is None else round_cost(record, plain)
    predicted = None if plain is None else prediction(record, plain)
    return {
        **found,
        "decoding_tokens_per_second": figures.speed(record, figures.decoding).to_dict(),
        "whole_call_tokens_per_second": figures.speed(record, figures.whole_call).to_dict(),
        "first_token_seconds": figures.first_token_seconds(record).to_dict(),
        "decoding_against": {
            name: figures.ratio(record, other, figures.decoding).to_dict()
            for name, other in others.items()
            if other is not None
        },
        "mean_accepted_length": figures.mean_accepted_length(record),
        "acceptance_rate": record.counts.acceptance_rate if record.counts and record.counts.judged else None,
        "acceptance_by_depth": None if record.counts is None else figures.acceptance_by_depth(record.counts),
        "cycle_share": figures.cycle_share(record),
        "round_in_plain_steps": None if cost is None else cost.to_dict(),
        "prediction": None if predicted is None else predicted.to_dict(),
    }


def _of_kind(measured: MeasuredCell, kind: ArmKind) -> Record | None:
    return next((record for record in measured.arms if record.arm.kind is kind and record.scored), None)

"""Check the basics: drafts give the text of plain decoding, rounds wait once, and kernels in Triton are trusted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from device.figure import Figure, Rows
from device.products import NO_TRITON
from device.stage import Bench, Case
from device.waits import NOT_COUNTED, waits_of_rounds
from harness import equal_tokens, sampling

from selfspec.api import wrap
from selfspec.control import FixedLength
from selfspec.decode.generation import Generation
from selfspec.draft.registry import PLAIN, parse_draft
from selfspec.kernels import trial
from selfspec.measure.prompts import built_in
from selfspec.measure.stock import bare
from selfspec.tools.lab.arms import RuntimeName, runtime_named

_CHAIN, _TREE = FixedLength(3), FixedLength(3, nodes=7)
_DRAFTS = {
    "plain": (PLAIN, _CHAIN),
    "exit": ("exit:2", _CHAIN),
    "tree along an exit": ("exit:2", _TREE),
    "int8": ("int8", _CHAIN),
    "int4": ("int4", _CHAIN),
    "look-ups": ("lookup", _CHAIN),
    "recycled tokens": ("recycle", _TREE),
}
_NOT_PROVED = "no kind of pass ran by a program"
_ROWS, _PROMPT, _TOKENS, _ROUNDS = 3, 64, 96, 12


def first_cases(bench: Bench) -> Iterator[Case]:
    """Yield each draft by stock modules and by graphs."""
    for by in (RuntimeName.EAGER, RuntimeName.GRAPHS):
        for name in _DRAFTS:
            yield Case(f"{by}, {name}", partial(_seen, bench, by, name))


def _seen(bench: Bench, by: RuntimeName, name: str) -> Rows:
    """Return the text of a draft, and messages about kernels meanwhile."""
    heard, logger = _Heard(), logging.getLogger(trial.__name__)
    logger.addHandler(heard)
    try:
        figures = _written(bench, by, name)
    finally:
        logger.removeHandler(heard)
    kernels = Figure("trusted") if trial.runs_triton(bench.device) else Figure(cannot=NO_TRITON)
    if heard.said:
        kernels = Figure(failed="; ".join(heard.said))
    return {"": {**figures, "kernels in Triton": kernels}}


def _written(bench: Bench, by: RuntimeName, name: str) -> dict[str, Figure]:
    """Return the text of a draft with the small trained model in float32, and the waits of a round."""
    checkpoint = bench.models.small("float32")
    model, (draft, length) = bare(checkpoint.model), _DRAFTS[name]
    context, tokens, rounds = (8, 12, 2) if bench.miniature else (_PROMPT, _TOKENS, _ROUNDS)
    prompts = built_in().prompts(checkpoint.tokenizer, _ROWS, _ROWS, context)[0].to(bench.device)
    given: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None}
    mask = torch.ones_like(prompts)
    spec = wrap(model, parse_draft(draft), draft_length=length, accept="coupled", runtime=runtime_named(by, after=0))

    def begun() -> Generation:
        return spec.stream(prompts, mask, **given, **sampling(0.0))

    wanted = model.generate(prompts, attention_mask=mask, pad_token_id=0, **given, **sampling(0.0))
    # The second time programs run that were proved the first time.
    greedy = [begun().finish().sequences for _ in range(2)][-1]
    sampled, plain = (
        each.generate(prompts, mask, seed=1, **given, **sampling(0.8)).sequences
        for each in (spec, wrap(model, None, accept="coupled"))
    )
    waits = Figure(cannot=NOT_COUNTED)
    if bench.device.type == "cuda":
        waits = waits_of_rounds(begun, rounds)
    proved = len(spec.programs.proved)
    # Miniature texts end too soon.
    missed = spec.runtime.after is not None and not proved and not bench.miniature
    ran = Figure(failed=_NOT_PROVED) if missed else Figure.number(proved)
    compared = {"greedy text": _compared(greedy, wanted), "sampled text": _compared(sampled, plain)}
    return {**compared, "waits a round": waits, "kinds by programs": ran}


def _compared(found: torch.Tensor, wanted: torch.Tensor) -> Figure:
    for row, (text, other) in enumerate(zip(found.tolist(), wanted.tolist(), strict=True)):
        alike = equal_tokens(text, other)
        if alike < len(other):
            return Figure(failed=f"row {row} is another text from its token {alike} on")
    return Figure("EQUAL")


class _Heard(logging.Handler):
    """Keeps what a logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

"""Puts every causal LM of the installed `transformers` to the contract and writes the table of architectures.

python -m helpers.survey                                # all of them, on the terminal
python -m helpers.survey llama gpt2                     # some
python -m helpers.survey --write ../docs/architectures.md  # all of them, into the table
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from helpers.contract import CHECKS, TOLERANCE, Subject
from helpers.encoder_decoders import ENCODER_DECODERS, encoder_decoder_subject, verdict
from helpers.shrunken import shrunken, shrunken_config
from helpers.snippets import run_types
from helpers.tiny import DEPTH
from selfspec.adapters import ADAPTERS, REFUSED
from selfspec.architecture import Adapter
from selfspec.errors import UnsupportedModelError
from selfspec.model.registry import adapter_for, find_adapter

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every causal-LM type of the installed `transformers`."""

_SINGLE = {"xglm": torch.float32}  # Its masks have no fp64.

ONE_ROW = "works except for batches: one prompt at a time"


@dataclass(frozen=True)
class Row:
    model_type: str
    model: str
    verdict: str

    def __str__(self) -> str:
        return f"| {self.model_type} | {self.model} | {self.verdict} |"


def declared(model_type: str) -> str | None:
    """What the declarations say of a type, without running it; None: nothing."""
    adapter = adapter_of(model_type)
    if adapter is not None:
        return ONE_ROW if adapter.ragged == "none" else "works"
    return f"refused because {REFUSED[model_type]}" if model_type in REFUSED else None


def adapter_of(model_type: str) -> Adapter | None:
    """The adapter of a type, or of the language model inside; None: there is none, or the type is refused."""
    if model_type in REFUSED:
        return None
    if model_type in ADAPTERS:
        return ADAPTERS[model_type]
    with suppress(UnsupportedModelError):
        return adapter_for(shrunken_config(model_type))
    return None


def subject(model_type: str) -> Subject:
    dtype = _SINGLE.get(model_type, torch.float64)
    model = shrunken(model_type, dtype)
    made = Subject(model, find_adapter(model), TOLERANCE[dtype])
    assert made.depth == DEPTH
    return made


def checks(model_type: str) -> list[str]:
    adapter = adapter_of(model_type)
    one_row = adapter is not None and adapter.ragged == "none"
    return [name for name in CHECKS if not (one_row and name == "ragged batch")]


def failures(tested: Subject, names: Iterable[str]) -> list[str]:
    """The checks that a subject does not hold to, each with the first line of why."""
    found = []
    for name in names:
        try:
            CHECKS[name](tested)
        except Exception as error:
            found.append(f"{name}: {' '.join(str(error).split())[:200]}")
    return found


def rows() -> list[Row]:
    return [
        Row(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], declared(name) or "not classified") for name in MODEL_TYPES
    ]


def encoder_decoder_rows() -> list[Row]:
    return [Row(name, made, verdict(name) or "not classified") for name, made in ENCODER_DECODERS.items()]


def table(lines: Iterable[Row], with_encoders: Iterable[Row]) -> str:
    listed, others = list(lines), list(with_encoders)
    working = sum(line.verdict.startswith("works") for line in listed)
    body = "\n".join(map(str, listed))
    more = "\n".join(map(str, others))
    with_encoder = sum(line.verdict == "works" for line in others)
    return f"""# Architectures

Causal language models of `transformers` {transformers.__version__}, each built tiny from its own config class with
random weights and put to the contract in `tests/helpers/contract.py`: prefill, step, block, rollback, every exit,
every sublayer and whole layers left out, resuming, ragged batches, trees, greedy text, drafts in fewer bits. Written by
`cd tests && python -m helpers.survey --write ../docs/architectures.md`.

{working} of {len(listed)} work. A type that is not listed is unknown: [declare it yourself](your_own_adapter.md).

| type | model | |
|---|---|---|
{body}

## Encoder-decoders

The encoder reads its input once; what is gated, drafted, verified and rolled back is the decoder. {with_encoder} of the
{len(others)} that write text work.

| type | model | |
|---|---|---|
{more}
"""


def _run(name: str) -> tuple[str, bool]:
    said = [declared(name)] if name in MODEL_TYPES else []
    said += [verdict(name)] if name in ENCODER_DECODERS else []
    found = []
    try:
        if name in MODEL_TYPES and (declared(name) or "").startswith("works"):
            found += failures(subject(name), checks(name))
        if name in ENCODER_DECODERS and verdict(name) == "works":
            found += failures(encoder_decoder_subject(name), CHECKS)
    except Exception as error:
        found.append(f"cannot be built: {' '.join(str(error).split())[:200]}")
    return f"{name}: {'; '.join(found) or '; '.join(map(str, said))}", not found and None not in said


if __name__ == "__main__":
    every = sorted({*MODEL_TYPES, *ENCODER_DECODERS})
    sys.exit(run_types(__doc__, every, _run, lambda _: table(rows(), encoder_decoder_rows())))

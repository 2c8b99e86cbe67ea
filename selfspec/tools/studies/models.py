"""A model under study: loaded once, with its prompts, and the texts that it writes itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import StudyError
from selfspec.measure.embedded import DEMO, model_place
from selfspec.measure.own_text import own_text
from selfspec.measure.prompts import read_workloads
from selfspec.measure.teacher_forced.figures import WrittenTexts
from selfspec.measure.teacher_forced.passes import LayerViews
from selfspec.model.adapter import Adapter
from selfspec.model.checkpoint import load_checkpoint, read_config
from selfspec.model.fingerprint import fingerprint
from selfspec.model.registry import find_adapter
from selfspec.tools.studies.points import Point, Result
from selfspec.tools.studies.study import Study


@dataclass
class StudiedModel:
    """A model and its prompts by workload.

    Attributes:
        prompts: token ids, `[texts, prompt]`, by workload.
        tokenizer: for reports; None: they show token ids.
    """

    name: str
    model: PreTrainedModel
    adapter: Adapter
    prompts: Mapping[str, Tensor]
    tokenizer: PreTrainedTokenizerBase | None = None

    @cached_property
    def base(self) -> str:
        """Fingerprint of its weights."""
        return fingerprint(self.model)[:20]

    @cached_property
    def views(self) -> LayerViews:
        """Views of its layers."""
        return LayerViews(self.model, self.adapter)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.adapter.decoder_layers(self.model))

    @property
    def dtype(self) -> str:
        """The dtype it computes in."""
        return str(self.model.dtype).removeprefix("torch.")

    def pieces(self, ids: Sequence[int], first: int) -> list[str]:
        """Return what each token from `first` on adds to a text, as reports show it."""
        if self.tokenizer is None:
            return [f"{token} " for token in ids[first:]]
        read = [str(self.tokenizer.decode(ids[:end])) for end in range(first, len(ids) + 1)]
        # Where a token completes a character, the mark of its beginning is gone.
        return [after.removeprefix(before.rstrip("\ufffd")) for before, after in pairwise(read)]


def texts_point(studied: StudiedModel, workload: str, new_tokens: int, temperature: float, seed: int) -> Point:
    """Return the point of letting a model continue the prompts of a workload."""
    ids = studied.prompts[workload]
    content = {
        "base": studied.base,
        "dtype": studied.dtype,
        "prompts": hashlib.sha256(repr(ids.tolist()).encode()).hexdigest()[:20],
        "new_tokens": new_tokens,
        "temperature": temperature,
        # Greedy texts do not depend on a seed.
        "seed": seed if temperature else 0,
    }
    place = {"model": studied.name, "workload": workload, "temperature": temperature, "seed": seed}
    return Point("texts", content, place)


def write_texts(studied: StudiedModel, point: Point) -> dict[str, Any]:
    """Let the stock model continue the prompts of a workload; nothing ends a text early."""
    prompts, temperature = studied.prompts[point.place["workload"]], point.content["temperature"]
    # Exactness is judged by greedy texts, so each is generated alone, as drafts are confirmed.
    parts = prompts.split(len(prompts) if temperature else 1)
    seed, new_tokens = point.content["seed"], point.content["new_tokens"]
    ids = torch.cat([own_text(studied.model, part, new_tokens, temperature, seed) for part in parts])
    rows: list[list[int]] = ids.tolist()
    first = prompts.shape[1]
    return {"ids": rows, "first": first, "tokens": [studied.pieces(row, first) for row in rows]}


def texts_of(written: Result, device: torch.device) -> WrittenTexts:
    """Return the texts of a result, on a device."""
    if written.error is not None:
        raise StudyError(f"its texts could not be written: {written.error}")
    ids = torch.tensor(written.found["ids"], device=device)
    return WrittenTexts(ids, written.found["first"], written.point.content["temperature"])


def check_inputs(study: Study) -> None:
    """Refuse models and workloads that cannot be read, before any weights are loaded."""
    for model in study.models:
        read_config(model_place(model))
    read_workloads(study.workloads)


def load(name: str, study: Study, device: str) -> StudiedModel:
    """Load a model of a study and its prompts."""
    checkpoint = load_checkpoint(model_place(name), study.dtype, device)
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    prompts = {
        each: torch.cat(workload.prompts(tokenizer, study.texts, 1, study.prompt_tokens)).long().to(model.device)
        for each, workload in read_workloads(study.workloads).items()
    }
    return StudiedModel(name if name == DEMO else Path(name).name, model, find_adapter(model), prompts, tokenizer)

"""A model under study: loaded once, with its prompts, and the texts that it writes itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.architecture import Adapter
from selfspec.errors import StudyError
from selfspec.measure.embedded import DEMO, model_place
from selfspec.measure.own_text import Continuation, continued
from selfspec.measure.prompts import PromptWriter, check_context, read_workloads
from selfspec.measure.teacher_forced.passes import LayerViews
from selfspec.model.checkpoint import load_checkpoint, read_config
from selfspec.model.registry import find_adapter
from selfspec.tools.lab.drafts import Given
from selfspec.tools.lab.origin import Origin
from selfspec.tools.lab.runs import Asked, Run
from selfspec.tools.lab.study import Study


@dataclass
class StudiedModel:
    """A model and its prompts by workload.

    Attributes:
        prompts: token ids by workload, `[1, prompt]` each, on the model's device.
        tokenizer: for reports; None: they show token ids.
        given: drafters and rules that are objects.
    """

    name: str
    model: PreTrainedModel
    adapter: Adapter
    prompts: Mapping[str, Sequence[Tensor]]
    tokenizer: PreTrainedTokenizerBase | None = None
    given: Given = field(default_factory=Given)

    @cached_property
    def origin(self) -> Origin:
        """Its weights, and where and how it runs."""
        return Origin.of(self.model)

    @cached_property
    def views(self) -> LayerViews:
        """Views of its layers."""
        return LayerViews(self.model, self.adapter)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.adapter.decoder_layers(self.model))

    @property
    def place(self) -> dict[str, str]:
        """What reports call it."""
        return {"model": self.name, "weights": self.origin.short}

    def pieces(self, ids: Sequence[int], first: int) -> list[str]:
        """Return what each token from `first` on adds to a text, as reports show it."""
        if self.tokenizer is None:
            return [f"{token} " for token in ids[first:]]
        read = [str(self.tokenizer.decode(ids[:end])) for end in range(first, len(ids) + 1)]
        # Where a token completes a character, the mark of its beginning is gone.
        return [after.removeprefix(before.rstrip("\ufffd")) for before, after in pairwise(read)]


def texts_asked(studied: StudiedModel, workload: str, temperature: float, study: Study) -> Asked:
    """Ask for the texts that a model writes on from the prompts of a workload."""
    prompts = [prompt.tolist() for prompt in studied.prompts[workload]]
    under = {
        **asdict(studied.origin),
        "prompts": hashlib.sha256(repr(prompts).encode()).hexdigest()[:20],
        "new_tokens": study.max_new_tokens,
        "temperature": temperature,
        # Greedy texts do not depend on a seed.
        "seed": study.seed if temperature else 0,
    }
    return Asked("texts", under, {**studied.place, "workload": workload, "temperature": temperature})


def write_texts(studied: StudiedModel, asked: Asked) -> dict[str, Any]:
    """Let the stock model continue the prompts of a workload, each up to where it ends the text."""
    under, prompts = asked.under, studied.prompts[asked.place["workload"]]
    texts = continued(studied.model, prompts, under["new_tokens"], under["temperature"], under["seed"])
    rows: list[list[int]] = [text.ids[0].tolist() for text in texts]
    pieces = [studied.pieces(row, text.prompt) for row, text in zip(rows, texts, strict=True)]
    return {"ids": rows, "prompt_tokens": [text.prompt for text in texts], "tokens": pieces}


def texts_of(written: Run, device: torch.device) -> list[Continuation]:
    """Return the texts of a run, on a device."""
    if written.error is not None:
        raise StudyError(f"its texts could not be written: {written.error}")
    pairs = zip(written.found["ids"], written.found["prompt_tokens"], strict=True)
    return [Continuation(torch.tensor([ids], device=device), prompt) for ids, prompt in pairs]


def check_inputs(study: Study) -> None:
    """Refuse models and workloads that cannot be read, before any weights are loaded."""
    for model in study.models:
        read_config(model_place(model))
    read_workloads(study.workloads)


def load(name: str, study: Study, device: str) -> StudiedModel:
    """Load a model of a study and its prompts.

    Raises:
        PromptError: it has no chat template, and the study asks for one; or a prompt and its text exceed the context.
    """
    checkpoint = load_checkpoint(model_place(name), study.dtype, device)
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    writer, prompts = PromptWriter(checkpoint, study.chat, study.max_new_tokens), {}
    for each, workload in read_workloads(study.workloads).items():
        if study.prompt_tokens is None:
            found = workload.whole_prompts(writer, study.texts)
        else:
            found = workload.prompts(tokenizer, study.texts, 1, study.prompt_tokens)
        check_context(model, found, study.max_new_tokens)
        prompts[each] = [prompt.long().to(model.device) for prompt in found]
    return StudiedModel(name if name == DEMO else Path(name).name, model, find_adapter(model), prompts, tokenizer)

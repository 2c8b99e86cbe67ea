"""A model under study, loaded once, and the prompts it writes on from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import StudyError
from selfspec.measure.embedded import checkpoint_folder
from selfspec.measure.forced_passes import LayerViews
from selfspec.measure.prompts import BUILT_IN, Workload, built_in, parse_workloads
from selfspec.model.adapter import Adapter
from selfspec.model.checkpoint import load_checkpoint, read_config
from selfspec.model.fingerprint import fingerprint
from selfspec.model.registry import find_adapter
from selfspec.tools.studies.study import Study

DEMO = "demo"
"""The embedded model, by what a study calls it."""


@dataclass
class Subject:
    """A model, and its prompts by workload.

    Attributes:
        name: what reports call it.
        model: the stock model.
        adapter: where its layers are.
        prompts: token ids, `[texts, prompt]`, by workload.
        tokenizer: for reports; None: they show token ids.
    """

    name: str
    model: PreTrainedModel
    adapter: Adapter
    prompts: Mapping[str, Tensor]
    tokenizer: PreTrainedTokenizerBase | None = field(default=None)

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
        """What it computes in."""
        return str(self.model.dtype).removeprefix("torch.")

    def pieces(self, ids: Sequence[int], first: int) -> list[str]:
        """What each token from the first on adds to a text, as reports show it."""
        if self.tokenizer is None:
            return [f"{token} " for token in ids[first:]]
        read = [str(self.tokenizer.decode(ids[:end])) for end in range(first, len(ids) + 1)]
        # Where a token completes a character, what stood for its beginning is gone.
        return [after.removeprefix(before.rstrip("\ufffd")) for before, after in pairwise(read)]


def digest(ids: Tensor) -> str:
    """Of token ids."""
    return hashlib.sha256(repr((tuple(ids.shape), ids.flatten().tolist())).encode()).hexdigest()[:20]


def check_inputs(study: Study) -> None:
    """Refuse models and workloads that cannot be read, before any weights are.

    Raises:
        CheckpointError, UnsupportedModelError, PromptError: naming the model or file.
    """
    for model in study.models:
        read_config(_place(model))
    _workloads(study)


def loader(study: Study, device: str) -> Callable[[str], Subject]:
    """What loads the models of a study when they are first asked for, one at a time."""
    kept: dict[str, Subject] = {}

    def load(name: str) -> Subject:
        if name not in kept:
            kept.clear()
            checkpoint = load_checkpoint(_place(name), study.dtype, device)  # type: ignore[arg-type]
            model, tokenizer = checkpoint.model, checkpoint.tokenizer
            prompts = {
                workload.name: torch.cat(workload.prompts(tokenizer, study.texts, 1, study.prompt_tokens))
                .long()
                .to(model.device)
                for workload in _workloads(study)
            }
            kept[name] = Subject(_label(name), model, find_adapter(model), prompts, tokenizer)
        return kept[name]

    return load


def _place(model: str) -> str:
    return str(checkpoint_folder()) if model == DEMO else model


def _label(model: str) -> str:
    return model if model == DEMO else Path(model).name


def _workloads(study: Study) -> list[Workload]:
    found: list[Workload] = []
    for given in study.workloads:
        found += [built_in()] if given == BUILT_IN else parse_workloads(given)
    names = [workload.name for workload in found]
    if len(set(names)) < len(names):
        raise StudyError(f"workloads: two are called the same, {names}; name each differently")
    return found

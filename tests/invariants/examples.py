"""An example of every drafter that is registered, and of drafts that are joined: what the table of invariants is over.

A new drafter is tested by an example of itself here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers import published_heads, tiny
from helpers.joints import VOCAB
from helpers.shrunken import shrunken
from selfspec.draft import (
    Cascade,
    Drafter,
    EarlyExit,
    LayerSkip,
    LowPrecision,
    PromptLookup,
    Recycling,
    ReducedVocabulary,
)
from selfspec.draft.layer_skip import write_skip_file
from selfspec.model.identity import fingerprint
from selfspec.tools.train.lesson import ExitHeads

Draft = str | Drafter
Make = Callable[[PreTrainedModel, Path], Draft]


@dataclass(frozen=True)
class Example:
    """A draft for tiny models of at least three layers, or what makes it for a model, with a folder for its files."""

    draft: Draft | Make
    # Makes its model of a folder and a size of the vocabulary; None: it drafts for every architecture.
    build: Callable[[Path, int], PreTrainedModel] | None = None

    def made_for(self, model: PreTrainedModel, folder: Path) -> Draft:
        return self.draft(model, folder) if callable(self.draft) else self.draft

    def made(
        self, folder: Path, architecture: str = "llama", vocabulary: int = tiny.VOCABULARY, **options: Any
    ) -> tuple[PreTrainedModel, Draft]:
        """Make a model and the draft for it; options are fields of the config of one of any architecture."""
        if self.build is not None:
            model = self.build(folder, vocabulary)
        else:
            model = tiny.BUILDERS[architecture](vocab_size=vocabulary, **options)
        return model, self.made_for(model, folder)


def _exit_head(model: PreTrainedModel, folder: Path, layer: int, tokens: Tensor | None = None) -> str:
    heads = ExitHeads(32, 16, (1, 2), tokens)
    generator = torch.Generator().manual_seed(1)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=generator)
    heads.save(folder, torch.float64, fingerprint(model), 2, {})
    return f"head:{folder}@{layer}"


def _skip_file(model: PreTrainedModel, folder: Path) -> str:
    write_skip_file(LayerSkip(attention=[1], mlp=[2]), fingerprint(model), folder / "found.json", {})
    return f"skip-file:{folder / 'found.json'}"


def _reduced(model: PreTrainedModel, folder: Path) -> Drafter:
    return ReducedVocabulary(EarlyExit(2), tuple(range(1, model.get_output_embeddings().out_features, 2)))


def _published(kind: str, before: str = "", **options: Any) -> Make:
    name = before + kind.rstrip("13")
    return lambda model, folder: f"{name}:{published_heads.WRITERS[kind](folder, model, **options)}"


def _mtp(modules: int) -> Example:
    return Example("mtp", lambda folder, size: published_heads.mtp(folder, "glm4_moe", modules, vocab_size=size).model)


def _llama(folder: Path, vocabulary: int) -> PreTrainedModel:
    return tiny.llama(vocab_size=vocabulary)


def _mixtral(folder: Path, vocabulary: int) -> PreTrainedModel:
    return shrunken("mixtral", vocab_size=vocabulary).double()


def _gemma4(folder: Path, vocabulary: int) -> PreTrainedModel:
    return shrunken("gemma4_text", vocab_size=vocabulary, vocab_size_per_layer_input=vocabulary)


def _in_planes(folder: Path, vocabulary: int) -> PreTrainedModel:
    model = tiny.llama(vocab_size=vocabulary).bfloat16().double()
    tiny.hold_planes(model)
    return model


def _queries(model: PreTrainedModel, folder: Path) -> str:
    return f"queries:{published_heads.queries(folder, model)}"


_LOW: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
_NAMES = (
    "exit:1", "exit:2", "skip:attn=1", "skip:mlp=0,2", "skip:layers=1", "int8", "int8+exit:2", "int4",
    "int4+skip:attn=1", "recycle", "suffix",
    "suffix+recycle+exit:2",
    "int4+window:4", "exit:1+window:4",
)  # fmt: skip
EXAMPLES: dict[str, Example] = {
    **{name: Example(name) for name in _NAMES},
    "head": Example(partial(_exit_head, layer=2)),
    "head of some tokens": Example(partial(_exit_head, layer=1, tokens=torch.arange(0, VOCAB, 2))),
    "int8 of experts": Example("int8", _mixtral),
    "skip-file": Example(_skip_file),
    "lookup": Example(PromptLookup(shortest=1)),
    "lookup+int8": Example(Cascade(PromptLookup(shortest=1), LowPrecision(8))),
    "recycle:3": Example(Recycling(candidates=3)),
    "exit:2+vocab": Example(_reduced),
    "upper": Example("upper", _in_planes),
    "int8+window:64": Example("int8+window:64", _llama),
    "eagle:1": Example(_published("eagle1")),
    "eagle:3": Example(_published("eagle3", **_LOW)),
    "lookup+int8+eagle:3": Example(_published("eagle3", "lookup+int8+", **_LOW)),
    "suffix+eagle:1": Example(_published("eagle1", "suffix+")),
    "medusa": Example(_published("medusa")),
    "hydra": Example(_published("hydra"), _llama),
    "dflash": Example(_published("dflash")),
    "mtp": _mtp(1),
    "mtp of two": _mtp(2),
    "queries": Example(_queries, _gemma4),
}
"""By what is tested: each name that is registered is in one of these."""

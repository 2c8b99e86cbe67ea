"""Drafting with a second model over a cache of its own: the classic form of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.arguments import check_kind, check_weights, shown
from selfspec.cache.shared_cache import SharedCache
from selfspec.draft.assistant_state import AssistantState
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.growing import GrowingDrafter
from selfspec.draft.tree_growth import grow
from selfspec.errors import DraftConfigError, UnsupportedModelError, UnsupportedOptionError
from selfspec.model.adapter import Adapter
from selfspec.model.checkpoint import load_checkpoint
from selfspec.model.decodable import check_decodable
from selfspec.model.registry import check_causal, find_adapter
from selfspec.model.substitutes import Substitutes
from selfspec.model.unwrap import stock_model
from selfspec.model.vocabulary import tokens_by_id, vocabulary_size
from selfspec.model.weights_read import bytes_read
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.recorded import runner_for

if TYPE_CHECKING:
    from selfspec.decode.batch import Batch


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Assistant(GrowingDrafter):
    """A second, smaller model with the same vocabulary drafts, as in Leviathan et al. (2023) and Chen et al. (2023).

    Its passes run over a cache of its own, which costs memory beside its weights; it is there to compare
    self-speculation with. It drafts as far as its own context goes.

    Attributes:
        model: the assistant; it is not changed.
        adapter: where it keeps its layers.
        source: the folder that it was loaded from, which moves it to the device and dtype of each model that is
            wrapped; None: it was handed over, and stays where it is.
    """

    model: PreTrainedModel
    adapter: Adapter
    source: str | None

    def __init__(self, model: nn.Module | str | Path, adapter: Adapter | None = None) -> None:
        """Load or take over the assistant.

        Args:
            model: any causal LM of a supported architecture, or the folder of a checkpoint.
            adapter: where it keeps its layers, for an architecture that selfspec does not know.

        Raises:
            CheckpointError: the folder cannot be used.
            UnsupportedModelError: the model cannot be decoded.
            DraftConfigError: it is no model.
        """
        if not isinstance(model, nn.Module | str | Path):
            raise DraftConfigError(f"an assistant is a model, or the folder of a checkpoint; got {shown(model)}")
        source = None if isinstance(model, nn.Module) else str(model)
        own = stock_model(model if isinstance(model, nn.Module) else load_checkpoint(str(model), device="cpu").model)
        check_causal(own)
        check_weights(own)
        check_kind("adapter", adapter, Adapter, "see docs/your_own_adapter.md, or leave it out")
        adapter = adapter or find_adapter(own)
        adapter.check(own)
        for name, value in {"model": own, "adapter": adapter, "source": source}.items():
            object.__setattr__(self, name, value)

    def check(self, depth: int) -> None:
        return

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_decodable(self.model)
        own = {id(weight) for weight in self.model.parameters()}
        if own.issuperset(map(id, model.parameters())):
            raise DraftConfigError(
                "the assistant is the model itself, so that drafting takes as long as decoding; give a smaller model, "
                "or draft with an exit, skipped layers or fewer bits"
            )
        _check_same_tokens(self.model, model)

    def prepare(self, model: PreTrainedModel, substitutes: Substitutes) -> None:
        device = model.get_input_embeddings().weight.device
        if self.source is not None and device.type != "meta":
            self.model.to(device=device, dtype=model.dtype)

    def check_joining(self) -> None:
        raise DraftConfigError(
            "an assistant's keys and values are those of one batch, and rows cannot join it; serve with a draft of the "
            "model itself, such as 'lookup' or 'exit:4'"
        )

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return bytes_read(self.model, self.adapter) / bytes_read(model, adapter)

    def begin(self, batch: Batch) -> AssistantState:
        self._check_batch(batch)
        sequences = batch.sequences
        programs = batch.programs and batch.memories.setdefault(self, batch.programs.for_another_model())
        assert programs is None or isinstance(programs, GraphCache)
        cache = SharedCache.of_model(
            self.model,
            self.adapter,
            batch.size,
            limit=max(map(sequences.text_length, sequences.running)) + batch.stopping.max_new_tokens,
            slack=batch.controller.most.nodes,
            bucket=1 if programs is None else programs.bucket,
        )
        runner = runner_for(self.model, self.adapter, cache, programs)
        weights = sum(weight.nbytes for weight in self.model.parameters())
        return AssistantState(runner, cache, sequences.running, batch.runner.vocabulary, weights)

    def propose(self, batch: Batch, budget: Budget) -> Draft:
        state = self.state(batch)
        assert isinstance(state, AssistantState)
        budget = budget.within(self._room(batch))
        if not budget.depth or not batch.controller.tries(match=0):
            return batch.no_draft()
        tree = self.tree(batch, budget)

        def read(tokens: Tensor, first: int) -> Tensor:
            return state.after_text(batch.sequences, tree) if first < 0 else state.after(tokens, first)

        return grow(batch, tree, read)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__ if self.source is None else repr(self.source)})"

    def _room(self, batch: Batch) -> int:
        """Return how many tokens its context leaves to be drafted; the last of them is not read."""
        context = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return batch.stopping.max_new_tokens if context is None else context - batch.longest + 1

    def _check_batch(self, batch: Batch) -> None:
        """Refuse prompts that the assistant cannot read.

        Raises:
            UnsupportedOptionError: they are not token ids alone.
            UnsupportedModelError: they are several, and the assistant takes one; or it cannot read trees.
            DraftConfigError: they are on another device.
        """
        check_decodable(self.model)
        if batch.controller.most.nodes > batch.controller.most.depth:
            self.adapter.check_trees(self.model)
        name, own, device = type(self.model).__name__, self.model.device, batch.last_tokens.device
        if not batch.sequences.are_text:
            raise UnsupportedOptionError(
                f"the assistant {name} reads token ids, and these prompts have embeddings, a soft prompt or a past of "
                "other tokens; pass the whole text as input_ids, or draft with the model itself"
            )
        if self.adapter.ragged == "none" and batch.size > 1:
            raise UnsupportedModelError(
                f"the assistant {name} counts positions in a way that rows of different lengths cannot share; pass one "
                "prompt at a time"
            )
        if own != device:
            raise DraftConfigError(f"the assistant {name} is on {own} and the model on {device}; move one of them")


def _check_same_tokens(assistant: PreTrainedModel, model: PreTrainedModel) -> None:
    """Refuse an assistant whose ids are other tokens, by the tokenizers in the folders both were loaded from.

    Models of one family may pad their vocabularies to different sizes. Without tokenizers, sizes must be equal.

    Raises:
        DraftConfigError: naming a token that differs.
    """
    sizes = [vocabulary_size(each) for each in (assistant, model)]
    theirs, own = tokens_by_id(assistant), tokens_by_id(model)
    if not theirs or not own:
        if sizes[0] != sizes[1]:
            raise DraftConfigError(
                f"the assistant has a vocabulary of {sizes[0]}, the model one of {sizes[1]}; an assistant needs the "
                "same tokens: take a smaller model of the same family"
            )
        return
    other = next((number for number in sorted(theirs) if own.get(number, theirs[number]) != theirs[number]), None)
    if other is not None:
        raise DraftConfigError(
            f"token {other} is {theirs[other]!r} for the assistant and {own[other]!r} for the model; an assistant "
            "needs the same tokens: take a smaller model of the same family"
        )

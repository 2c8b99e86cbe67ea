"""A draft head that is bound to a target: what it reads, what its own layers are, and which state it goes on from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter


class Fusion(nn.Module):
    """What a head makes of states of the target, and of a state and the token after it."""

    def state(self, features: Sequence[Tensor]) -> Tensor:
        """Make what stands for a token of the target, `[rows, tokens, hidden]`; here its only feature as it is.

        Args:
            features: one for each point that the head reads, `[rows, tokens, target hidden]` each.
        """
        (state,) = features
        return state

    @abstractmethod
    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Return what enters the head's layers.

        Args:
            embedded: embeddings of tokens, `[rows, tokens, hidden]`.
            state: of the token before each of them, by the target or by the head itself, the same shape.
        """


@dataclass(frozen=True, eq=False)
class Head:
    """A head over one target.

    Attributes:
        fusion: comes before its layers.
        layers: a causal LM of its layers, final norm and language-model head, which is called with embeddings.
        adapter: where it keeps its layers.
        recycled: which of its own states stands for a token that it drafted.
        embed: the embeddings of tokens, its own or the target's.
        tokens: ids that it can draft, in the order of its logits; None: all.
        nbytes: of the weights that are its own.
        masked: what enters its layers in the place of a token that is not known yet, `[input]`; None: it takes none.
        passes_on: which states the module behind it reads, if there is one: those that it made, or that it read.
    """

    fusion: Fusion
    layers: PreTrainedModel
    adapter: Adapter
    recycled: Literal["last", "normed"]
    embed: nn.Module
    tokens: Tensor | None
    nbytes: int
    masked: Tensor | None = None
    passes_on: Literal["made", "read"] = "made"

    def spread(self, logits: Tensor, vocabulary: int) -> Tensor:
        """Return logits over the target's vocabulary: -inf, and so q = 0, at tokens that cannot be drafted.

        Args:
            logits: of the head, `[rows, tokens, ids it can draft]`.
            vocabulary: number of logits that the target gives.

        Returns:
            `[rows, tokens, vocabulary]`.
        """
        if self.tokens is None and logits.shape[-1] == vocabulary:
            return logits
        known = torch.arange(logits.shape[-1], device=logits.device) if self.tokens is None else self.tokens
        spread = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
        return spread.index_copy_(-1, known, logits)

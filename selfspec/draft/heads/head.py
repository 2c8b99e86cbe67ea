"""A draft head that is bound to a target: what it reads, what its own layers are, and which state it goes on from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.errors import DraftConfigError
from selfspec.kernels.low_bits import has_kernels
from selfspec.kernels.rounded import Precision, RoundedWeight
from selfspec.model.substitutes import Substitutes
from selfspec.model.tensor_parallel import check_on_one_process
from selfspec.model.vocabulary import weight_of

_GROUP_SIZE = 32


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
        masked: what enters its layers in the place of a token that is not known yet, `[input]`; None: it takes none.
        passes_on: which states the module behind it reads, if there is one: those that it made, or that it read.
        precision: what its linear layers are rounded to; None: they have the dtype of the target.
    """

    fusion: Fusion
    layers: PreTrainedModel
    adapter: Adapter
    recycled: Literal["last", "normed"]
    embed: nn.Module
    tokens: Tensor | None
    masked: Tensor | None = None
    passes_on: Literal["made", "read"] = "made"
    precision: Precision | None = None

    def rounded(self, bits: int, substitutes: Substitutes) -> Head:
        """Return the same with linear layers in fewer bits, which are all that is kept of its own.

        Args:
            bits: of a weight, 8 or 4.
            substitutes: hold a copy of the target's language-model head for all heads that read it.
        """
        precision = precision_of(bits)
        fusion, layers = (
            substitutes.within(module, name, precision)
            for name, module in (("fusion", self.fusion), ("layers", self.layers))
        )
        assert isinstance(fusion, Fusion)
        assert isinstance(layers, PreTrainedModel)
        return replace(self, fusion=fusion, layers=layers, precision=precision)

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


def precision_of(bits: int) -> Precision:
    """Return how weights of heads are kept in fewer bits."""
    return Precision(bits, _GROUP_SIZE)


def check_for_head(model: PreTrainedModel, what: str, bits: int | None) -> None:
    """Refuse a model that no head drafts for.

    Args:
        model: the target.
        what: the head, for messages.
        bits: of its weights; None: they have the model's dtype.

    Raises:
        UnsupportedModelError: it lies on several processes.
        DraftConfigError: its device has no kernels for so few bits.
    """
    check_on_one_process(model, what)
    if bits is not None and not has_kernels(model.device.type):
        raise DraftConfigError(
            f"there are no kernels for {what} in {bits} bits on {model.device.type}; leave int{bits}+ out, or use "
            "cpu or cuda"
        )


def own_bytes(heads: Iterable[Head], model: nn.Module) -> int:
    """Count bytes of the weights of heads that are not those of their target."""
    its = {id(weight) for weight in model.parameters()}
    modules = (module for head in heads for module in (head.fusion, head.layers))
    own = {id(weight): weight.nbytes for module in modules for weight in module.parameters()}
    return sum(size for key, size in own.items() if key not in its)


def weight_bytes(shapes: Mapping[str, Sequence[int]], itemsize: int, bits: int | None) -> int:
    """Count bytes of weights by name, of which those of linear layers may be in fewer bits.

    Args:
        shapes: of the weights; embeddings are not rounded.
        itemsize: bytes of a number that is not rounded.
        bits: of a weight that is; None: none is.
    """
    return sum(_bytes_of(name, shape, itemsize, bits) for name, shape in shapes.items())


def bytes_read(shapes: Mapping[str, Sequence[int]], model: PreTrainedModel, bits: int | None) -> int:
    """Count bytes that a step reads: of weights, as `weight_bytes`, and the model's own head where they have none."""
    output = weight_of(model.get_output_embeddings()).shape
    return weight_bytes({"lm_head.weight": output, **shapes}, model.dtype.itemsize, bits)


def bytes_kept(shapes: Mapping[str, Sequence[int]], model: PreTrainedModel, bits: int | None) -> int:
    """Count bytes that are kept: of weights, as `weight_bytes`; in fewer bits the model's own head has a copy."""
    return weight_bytes(shapes, model.dtype.itemsize, None) if bits is None else bytes_read(shapes, model, bits)


def _bytes_of(name: str, shape: Sequence[int], itemsize: int, bits: int | None) -> int:
    is_linear = len(shape) == 2 and not name.endswith("embed_tokens.weight")
    if bits is None or not is_linear or (bits == 4 and shape[-1] % _GROUP_SIZE):
        return torch.Size(shape).numel() * itemsize
    return RoundedWeight.empty(shape, precision_of(bits), torch.device("meta")).nbytes

"""A draft head bound to a target: its inputs, its own layers, and the state that stands for a drafted token."""

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
from selfspec.formats.format import Format
from selfspec.model.identity import weight_of
from selfspec.model.layer_path import WeightCopy
from selfspec.model.substitutes import Substitutes
from selfspec.model.tensor_parallel import check_on_one_process


class Fusion(nn.Module):
    """Computes the inputs of a head's layers from states of the target and the tokens after them."""

    def state(self, features: Sequence[Tensor]) -> Tensor:
        """Make one state for each token of the target, `[rows, tokens, hidden]`; by default its only feature.

        Args:
            features: one for each point that the head reads, `[rows, tokens, target hidden]` each.
        """
        (state,) = features
        return state

    @abstractmethod
    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Return the inputs of the head's layers.

        Args:
            embedded: embeddings of tokens, `[rows, tokens, hidden]`.
            state: states of the tokens before them, by the target or by the head itself, in the same shape.
        """


@dataclass(frozen=True, eq=False)
class Head:
    """Holds the parts of a head over one target.

    Attributes:
        fusion: computes the inputs of its layers.
        layers: a causal LM of its layers, final norm and language-model head, which is called with embeddings.
        adapter: where the causal LM keeps its layers.
        recycled: the one of its own states that stands for a drafted token.
        embed: the embeddings of tokens, its own or the target's.
        tokens: ids that it can draft, in the order of its logits; None: all.
        masked: the input of its layers in the place of an unknown token, `[input]`; None: it reads no such tokens.
        passes_on: the states that the module behind it reads, if there is one: those that it made, or that it read.
        copy: the copy of its weights that its linear layers run; None: they have the dtype of the target.
    """

    fusion: Fusion
    layers: PreTrainedModel
    adapter: Adapter
    recycled: Literal["last", "normed"]
    embed: nn.Module
    tokens: Tensor | None
    masked: Tensor | None = None
    passes_on: Literal["made", "read"] = "made"
    copy: WeightCopy | None = None

    def packed(self, format: Format, substitutes: Substitutes) -> Head:
        """Return a copy with linear layers in a format, without the head's own full-precision ones.

        Args:
            format: format of the weights.
            substitutes: hold a copy of the target's language-model head for all heads that read it.
        """
        copy = WeightCopy(format)
        fusion, layers = (
            substitutes.within(module, name, copy)
            for name, module in (("fusion", self.fusion), ("layers", self.layers))
        )
        assert isinstance(fusion, Fusion)
        assert isinstance(layers, PreTrainedModel)
        return replace(self, fusion=fusion, layers=layers, copy=copy)

    def spread(self, logits: Tensor, vocabulary: int) -> Tensor:
        """Return the head's logits, `[rows, tokens, ids it can draft]`, as `[rows, tokens, vocabulary]` of the target.

        Tokens that cannot be drafted get -inf, and so q = 0.
        """
        if self.tokens is None and logits.shape[-1] == vocabulary:
            return logits
        known = torch.arange(logits.shape[-1], device=logits.device) if self.tokens is None else self.tokens
        spread = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
        return spread.index_copy_(-1, known, logits)


def check_for_head(model: PreTrainedModel, what: str, format: Format | None) -> None:
    """Refuse a model that no head can draft for.

    Args:
        model: the target.
        what: the head, for messages.
        format: format of its weights; None: they have the model's dtype.

    Raises:
        UnsupportedModelError: the model is spread over several processes.
        DraftConfigError: its device has no kernels for the format.
    """
    check_on_one_process(model, what)
    if format is not None and not format.runs_on(model.device.type):
        raise DraftConfigError(
            f"there are no kernels for {what} in {format.bits} bits on {model.device.type}; leave {format.name}+ out, "
            "or use cpu or cuda"
        )


def own_bytes(heads: Iterable[Head], model: nn.Module) -> int:
    """Count bytes of the heads' weights that they do not share with the target."""
    its = {id(weight) for weight in model.parameters()}
    modules = (module for head in heads for module in (head.fusion, head.layers))
    own = {id(weight): weight.nbytes for module in modules for weight in module.parameters()}
    return sum(size for key, size in own.items() if key not in its)


def weight_bytes(shapes: Mapping[str, Sequence[int]], itemsize: int, format: Format | None) -> int:
    """Count bytes of weights; those of linear layers may be packed.

    Args:
        shapes: shapes of the weights by name; embeddings are not packed.
        itemsize: bytes of a number that is not packed.
        format: format of packed weights; None: no weight is packed.
    """
    return sum(_bytes_of(name, shape, itemsize, format) for name, shape in shapes.items())


def bytes_read(shapes: Mapping[str, Sequence[int]], model: PreTrainedModel, format: Format | None) -> int:
    """Count bytes that a step reads: the weights, as in `weight_bytes`, and the model's head if they have no head."""
    output = weight_of(model.get_output_embeddings()).shape
    return weight_bytes({"lm_head.weight": output, **shapes}, model.dtype.itemsize, format)


def bytes_kept(shapes: Mapping[str, Sequence[int]], model: PreTrainedModel, format: Format | None) -> int:
    """Count bytes to keep: the weights, as in `weight_bytes`, and in a format also a copy of the model's head."""
    return weight_bytes(shapes, model.dtype.itemsize, None) if format is None else bytes_read(shapes, model, format)


def _bytes_of(name: str, shape: Sequence[int], itemsize: int, format: Format | None) -> int:
    is_linear = len(shape) == 2 and not name.endswith("embed_tokens.weight")
    if format is None or not is_linear or not format.fits(shape):
        return torch.Size(shape).numel() * itemsize
    return format.nbytes(shape)

"""Vocabularies of models: the tokens of ids, as far as the model's folder says them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.errors import CheckpointError, UnsupportedModelError
from selfspec.model.checkpoint import load_tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Binds a file of token ids to a model, by the number of ids of its head and a digest of the tokens.

    The digest is empty if there is no tokenizer.
    """

    size: int
    digest: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Vocabulary:
        """Return the vocabulary of a model."""
        tokens = sorted(tokens_by_id(model).items())
        return cls(
            vocabulary_size(model),
            hashlib.sha256(repr(tokens).encode()).hexdigest() if tokens else "",
        )

    def is_same(self, other: Vocabulary) -> bool:
        """Return whether ids are the same tokens: by digest if both have one, else by the number of ids.

        Models of one family may pad their vocabularies to different sizes.
        """
        return self.digest == other.digest if self.digest and other.digest else self.size == other.size


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of ids of a model's head: logits per token."""
    head = model.get_output_embeddings()
    # Quantised layers may keep their weight in a function.
    sizes = (getattr(module, "out_features", None) for module in head.modules())
    return next((size for size in sizes if type(size) is int), None) or weight_of(head).shape[0]


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of an embedding or a head, also if another module wraps it, as PEFT's output cast does.

    Raises:
        UnsupportedModelError: it has none.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return weight
    # Other weights of a wrapper are smaller: biases, norms, low-rank additions.
    weights = [each for each in module.parameters() if each.ndim == 2]
    if not weights:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no weight of ids by numbers, as the embedding and the head of a model have; "
            "wrap the model before that module is put into it"
        )
    return max(weights, key=Tensor.numel)


def tokens_by_id(model: PreTrainedModel) -> dict[int, str]:
    """Return the tokens by id if the model was loaded from a folder with a tokenizer; else none."""
    folder = model.name_or_path
    if not folder or not Path(folder).is_dir():
        return {}
    try:
        return {number: token for token, number in load_tokenizer(folder).get_vocab().items()}
    except CheckpointError:
        return {}

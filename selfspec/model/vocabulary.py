"""Which tokens the ids of a model are, as far as the folder that it was loaded from says."""

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
    """What binds a file of token ids to a model: how many its head knows, and a digest of the tokens that these are.

    The digest is empty where no tokenizer says them.
    """

    size: int
    digest: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Vocabulary:
        """The vocabulary of a model."""
        tokens = sorted(tokens_by_id(model).items())
        return cls(
            vocabulary_size(model),
            hashlib.sha256(repr(tokens).encode()).hexdigest() if tokens else "",
        )

    def is_same(self, other: Vocabulary) -> bool:
        """Whether ids are the same tokens: by the tokenizers where both are known, else by the number of ids.

        Models of one family may pad their vocabularies to different sizes.
        """
        return self.digest == other.digest if self.digest and other.digest else self.size == other.size


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return how many ids the head of a model knows: how many logits each token has."""
    head = model.get_output_embeddings()
    # Quantised layers may keep their weight in a function.
    sizes = (getattr(module, "out_features", None) for module in head.modules())
    return next((size for size in sizes if type(size) is int), None) or weight_of(head).shape[0]


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of an embedding or a head, also of one that another module wraps, as PEFT's output cast does.

    Raises:
        UnsupportedModelError: it has none.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return weight
    # What else a wrapper has is smaller: biases, norms, low-rank additions.
    weights = [each for each in module.parameters() if each.ndim == 2]
    if not weights:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no weight of ids by numbers, as the embedding and the head of a model have; "
            "wrap the model before that module is put into it"
        )
    return max(weights, key=Tensor.numel)


def tokens_by_id(model: PreTrainedModel) -> dict[int, str]:
    """The tokens of a model that was loaded from a folder with a tokenizer; of any other none."""
    folder = model.name_or_path
    if not folder or not Path(folder).is_dir():
        return {}
    try:
        return {number: token for token, number in load_tokenizer(folder).get_vocab().items()}
    except CheckpointError:
        return {}

"""A checkpoint as tools load it: the model and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import CheckpointError, PromptError
from selfspec.model.checkpoint import (
    DtypeName,
    find_device,
    load_to_device,
    load_tokenizer,
    local_folder,
    read_config,
    weight_files,
)

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass(frozen=True)
class Checkpoint:
    """Holds a loaded checkpoint: the model, in evaluation mode and on its device, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> Tensor:
        """Return the token ids of a prompt, `[1, tokens]`, on the model's device; of an empty one the bos token."""
        ids: list[int] = self.tokenizer(text).input_ids
        # Not all tokenizers put the bos token before a text.
        begun = ids or [self.tokenizer.bos_token_id]
        if begun == [None]:
            raise PromptError("the prompt is empty, and this tokenizer has no bos token to start from; give some text")
        return torch.tensor([begun], device=self.model.device)


def load_checkpoint(name: str, dtype: DtypeName = "auto", device: str = "auto") -> Checkpoint:
    """Load model and tokenizer."""
    find_device(device)
    config, folder = read_config(name), local_folder(name)
    if folder is not None:
        weight_files(folder, config)
    if folder is not None and not any((folder / file).is_file() for file in _TOKENIZERS):
        raise CheckpointError(
            f"{folder} has no tokenizer (tokenizer.json); copy it from the original, or save it there: "
            "AutoTokenizer.from_pretrained(original).save_pretrained(folder)"
        )
    # It is read first: a broken one is found before the weights are.
    tokenizer = load_tokenizer(name)
    return Checkpoint(load_to_device(name, dtype, device), tokenizer)

"""A checkpoint as tools load it: the model and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.draft.drafter import Drafter
from selfspec.errors import CheckpointError, PromptError
from selfspec.model.checkpoint import (
    DtypeName,
    find_device,
    load_tokenizer,
    local_folder,
    read_config,
    weight_files,
)
from selfspec.placement.stored import is_packed
from selfspec.placement.whole import CONTEXT, load_whole

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


@dataclass(frozen=True)
class Use:
    """Says what a model is loaded for, so that its memory is counted before it is read."""

    draft: Drafter | None = None
    text: str = ""
    new_tokens: int = CONTEXT


def load_checkpoint(
    name: str, dtype: DtypeName = "auto", device: str = "auto", weights: str | None = None, use: Use | None = None
) -> Checkpoint:
    """Load model and tokenizer. UnsupportedOptionError: they take more memory than there is."""
    use = use or Use()
    find_device(device)
    config, folder = read_config(name), local_folder(name)
    if folder is not None and folder.is_dir():
        if not is_packed(folder):
            weight_files(folder, config)
        if not any((folder / file).is_file() for file in _TOKENIZERS):
            raise CheckpointError(
                f"{folder} has no tokenizer (tokenizer.json); copy it from the original, or save it there: "
                "AutoTokenizer.from_pretrained(original).save_pretrained(folder)"
            )
    # It is read first: a broken one is found before the weights are.
    tokenizer = load_tokenizer(name)
    context = len(tokenizer(use.text).input_ids) + use.new_tokens
    return Checkpoint(load_whole(name, weights, dtype, device, use.draft, context), tokenizer)

"""Text that the model itself writes on from the beginnings of a user's text."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from selfspec.errors import TrainingError
from selfspec.files.writing import whole
from selfspec.measure.own_text import own_text
from selfspec.tools.train.corpus import Blocks
from selfspec.tools.train.course import CHECKPOINTS

_NAME = "own_text.safetensors"
# Rows written at once.
_BATCH = 32


def kept_own_text(model: PreTrainedModel, beginnings: Blocks, length: int, seed: int, folder: Path) -> Blocks:
    """Let a model write on from some beginnings, at temperature 1, as it would without anyone's filters.

    What was written is kept in the folder batch by batch, so that an interrupted call goes on.

    Args:
        model: writes.
        beginnings: token ids, `[texts, beginning]`.
        length: tokens of a text, beginning included.
        seed: of the draws.
        folder: of the training; texts are kept among its checkpoints.

    Raises:
        TrainingError: what lies in the folder cannot be read.
        StorageError: the folder cannot be written to.
    """
    kept = folder / CHECKPOINTS / _NAME
    written = _read(kept) if kept.exists() else torch.empty(0, length, dtype=torch.long)
    for start in range(written.shape[0], len(beginnings), _BATCH):
        ids = beginnings.ids[start : start + _BATCH].to(model.device)
        texts = own_text(model, ids, length - ids.shape[1], 1.0, seed + start)
        written = torch.cat([written, texts.cpu()])
        with whole(kept) as draft:
            save_file({"ids": written}, draft)
    return Blocks(written)


def _read(file: Path) -> torch.Tensor:
    try:
        return load_file(file)["ids"]
    except (SafetensorError, OSError, KeyError) as error:
        raise TrainingError(
            f"{file} is truncated or corrupt ({error}); remove it to have the text written again"
        ) from error

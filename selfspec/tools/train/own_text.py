"""Text that the model itself writes on from the beginnings of a user's text."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel

from selfspec.errors import TrainingError
from selfspec.files.writing import whole
from selfspec.tools.train.corpus import Blocks
from selfspec.tools.train.course import CHECKPOINTS

_NAME = "own_text.safetensors"
# Rows written at once.
_BATCH = 32


@torch.no_grad()
def own_text(model: PreTrainedModel, beginnings: Blocks, length: int, seed: int, folder: Path) -> Blocks:
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
    # One length for all, so nothing may end a text early.
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_length=length,
        min_length=length,
        eos_token_id=None,
        pad_token_id=0,
    )
    for start in range(written.shape[0], len(beginnings), _BATCH):
        ids = beginnings.ids[start : start + _BATCH].to(model.device)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed + start)
            texts = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
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

"""Weights between a trained checkpoint and its base: nearly all that was taught, at a smaller cost to the full model.

The weights of a model and of what it was fine-tuned to can be averaged, since they lie in one valley of the loss
(Wortsman et al., 2022, arXiv 2109.01903). After the LayerSkip recipe a small share of the base gives back more of the
full model's loss than it takes from its exits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from selfspec.errors import TrainingError
from selfspec.model.checkpoint import load_checkpoint
from selfspec.model.fingerprint import fingerprint
from selfspec.tools.train.corpus import identified, packed, read_documents, spread
from selfspec.tools.train.folder import RunFolder
from selfspec.tools.train.layerskip import LayerSkipLesson
from selfspec.tools.train.settings import Averaging


def average(trained: str, base: str, averaging: Averaging, to: Path) -> dict[str, Any]:
    """Average two checkpoints and save the result as the trained one was saved.

    Returns:
        The report, also in `training.json`: what was averaged, and figures of the trained checkpoint before and of the
        result after.

    Raises:
        CheckpointError: a checkpoint cannot be loaded.
        CorpusError: the text cannot be read or is too short.
        TrainingError: the two are not of one shape, or the folder is taken.
        StorageError: the folder cannot be written to.
    """
    folder = RunFolder(to)
    folder.check()
    checkpoint = load_checkpoint(trained, "auto", "cpu")
    other = load_checkpoint(base, "auto", "cpu").model
    dtype, model = checkpoint.model.dtype, checkpoint.model.float()
    shapes, others = ({name: weight.shape for name, weight in each.named_parameters()} for each in (model, other))
    if type(model) is not type(other) or shapes != others:
        raise TrainingError(f"{trained} was not trained from {base}: their weights differ in shape")
    lesson = None
    if averaging.held_out is not None:
        blocks = packed(read_documents(averaging.held_out), checkpoint.tokenizer, averaging.length)
        lesson = LayerSkipLesson(checkpoint, None, spread(blocks, averaging.held_out_blocks))
    settings = {
        "trained": {"model": trained, "fingerprint": fingerprint(model)},
        "base": {"model": base, "fingerprint": fingerprint(other)},
        "base_share": averaging.base_share,
        "held_out": averaging.held_out and identified(averaging.held_out),
        "held_out_blocks": averaging.held_out_blocks,
    }
    before = folder.begin(settings, lesson.measure() if lesson else {}) or {}
    with torch.no_grad():
        for weight, towards in zip(model.parameters(), other.parameters(), strict=True):
            weight.lerp_(towards.to(weight.dtype), averaging.base_share)
    # What is measured is what is saved.
    model.to(dtype).float()
    report = {**settings, "before": before, "after": lesson.measure() if lesson else {}}

    def save(new: Path) -> None:
        model.to(dtype).save_pretrained(new)
        checkpoint.tokenizer.save_pretrained(new)

    folder.finish(save, report)
    return report

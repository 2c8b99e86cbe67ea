"""Weights between a trained checkpoint and its base: nearly all that was taught, at a smaller cost to the full model.

The weights of a model and of what it was fine-tuned to can be averaged, since they lie in one valley of the loss
(Wortsman et al., 2022, arXiv 2109.01903). After the LayerSkip recipe a small share of the base gives back more of the
full model's loss than it takes from its exits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selfspec.errors import TrainingError
from selfspec.model.checkpoint import load_checkpoint
from selfspec.model.fingerprint import fingerprint
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import packed, read_documents, spread
from selfspec.tools.train.folder import RunFolder
from selfspec.tools.train.layerskip import LayerSkipLesson


@dataclass(frozen=True)
class Average:
    """What to average.

    Attributes:
        trained: the trained checkpoint, a folder or a hub name.
        base: the checkpoint it was trained from.
        base_share: weight of the base, in 0..1; the rest is the trained one's.
        held_out: text to measure on, before and after; None: nothing is measured.
        held_out_blocks: how many blocks of it.
        length: tokens of a block.
    """

    trained: str
    base: str
    base_share: float
    held_out: Path | None
    held_out_blocks: int
    length: int

    def __post_init__(self) -> None:
        if not 0 < self.base_share < 1:
            raise TrainingError(f"the base's share lies between 0 and 1, e.g. 0.1; got {self.base_share}")


def average(wanted: Average, to: Path) -> dict[str, Any]:
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
    trained = load_checkpoint(wanted.trained, "auto", "cpu")
    base = load_checkpoint(wanted.base, "auto", "cpu").model
    dtype, model = trained.model.dtype, trained.model.float()
    _check_alike(model, base, wanted)
    held_out = None
    if wanted.held_out is not None:
        blocks = packed(read_documents(wanted.held_out), trained.tokenizer, wanted.length)
        held_out = spread(blocks, wanted.held_out_blocks)
    settings = {
        "trained": {"model": wanted.trained, "fingerprint": fingerprint(model)},
        "base": {"model": wanted.base, "fingerprint": fingerprint(base)},
        "base_share": wanted.base_share,
        "held_out": wanted.held_out and wanted.held_out.name,
        "held_out_blocks": wanted.held_out_blocks,
    }
    folder.begin(settings)

    @torch.no_grad()
    def measured() -> dict[str, float]:
        if held_out is None:
            return {}
        return LayerSkipLesson(model, find_adapter(model), None, held_out).evaluate()

    before = measured()
    with torch.no_grad():
        for weight, other in zip(model.parameters(), base.parameters(), strict=True):
            weight.lerp_(other.to(weight.dtype), wanted.base_share)
    # What is measured is what is saved.
    model.to(dtype).float()
    report = {**settings, "before": before, "after": measured()}

    def save(new: Path) -> None:
        model.to(dtype).save_pretrained(new)
        trained.tokenizer.save_pretrained(new)

    folder.finish(save, report)
    return report


def _check_alike(trained: nn.Module, base: nn.Module, wanted: Average) -> None:
    shapes, others = ({name: weight.shape for name, weight in model.named_parameters()} for model in (trained, base))
    if type(trained) is not type(base) or shapes != others:
        raise TrainingError(f"{wanted.trained} was not trained from {wanted.base}: their weights differ in shape")

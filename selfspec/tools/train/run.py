"""Run a training: from a checkpoint and text to a folder with the result and its report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from selfspec.errors import TrainingError
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.environment import environment
from selfspec.measure.prompts import check_reads_text
from selfspec.model.identity import fingerprint
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import all_documents, beginnings, given_text, identified, written_text
from selfspec.tools.train.course import CHECKPOINTS, Observer, RunFolder, resumed_step, train
from selfspec.tools.train.eagle3 import Eagle3Lesson
from selfspec.tools.train.lesson import ExitLesson, LayerSkipLesson, Lesson
from selfspec.tools.train.recipe import (
    BesideRecipe,
    Course,
    ExitHeadRecipe,
    HeadRecipe,
    LayerSkipRecipe,
    Texts,
    rate_of_model,
)


def run(
    model: str,
    texts: Texts,
    course: Course,
    recipe: LayerSkipRecipe | ExitHeadRecipe | HeadRecipe,
    to: Path,
    observe: Observer,
    device: str = "auto",
) -> dict[str, Any]:
    """Train a draft: the model itself by the LayerSkip recipe, or heads for a base that stays as it is.

    Args:
        model: folder or hub name of the base.
        texts: to learn from.
        course: steps, rates and batches.
        recipe: of exits or of a draft head.
        to: the folder that becomes the result. The same call resumes an interrupted training there.
        observe: called at every step, in the first process of a distributed training.
        device: as in `torch.device`, or "auto".

    Returns:
        The report, also in `training.json`: figures on the held-out text before and after, and the log.

    Raises:
        CheckpointError, UnsupportedModelError: the base cannot be loaded.
        CorpusError: a text cannot be read or is too short.
        TrainingError: a package is missing, the settings do not fit, the folder is taken, or the loss became NaN.
        StorageError: the folder cannot be written to, or the disk is full; what was finished is kept.
    """
    if find_spec("accelerate") is None:
        raise TrainingError("training needs accelerate; pip install 'selfspec[train]'")
    # Only training needs the package, so it may be missing.
    from accelerate import PartialState

    # As `accelerate launch` or `torchrun` started them; mostly one.
    processes, folder = PartialState(cpu=device == "cpu"), RunFolder(to)
    if processes.is_main_process:
        folder.check()
    checkpoint = load_checkpoint(model, "auto", device)
    check_reads_text(checkpoint.model)
    dtype = checkpoint.model.dtype
    # The passes of a base that does not learn need no other weights than their products.
    in_half = isinstance(recipe, HeadRecipe) and course.precision == "bfloat16"
    base = checkpoint.model.to(torch.bfloat16 if in_half else torch.float32)
    if course.learning_rate is None:
        own = recipe.usual_rate if isinstance(recipe, BesideRecipe) else rate_of_model(base.num_parameters())
        course = replace(course, learning_rate=own)
    if isinstance(recipe, ExitHeadRecipe | LayerSkipRecipe):
        recipe.exits_of(len(find_adapter(base).decoder_layers(base)))
    documents = all_documents(texts.text, course.seed)
    settings = {
        # Names, not folders, so that a training may move.
        "source": {
            "model": model,
            "text": [*map(identified, texts.text)],
            "held_out": texts.held_out and identified(texts.held_out),
            "held_out_blocks": texts.held_out_blocks,
        },
        "base": fingerprint(base),
        "course": asdict(course),
        "recipe": asdict(recipe),
    }
    # The other processes of a distributed training find what the first one wrote.
    with processes.main_process_first():
        if isinstance(recipe, BesideRecipe) and recipe.own_texts:
            if not 1 <= recipe.beginning < course.length:
                raise TrainingError(
                    f"beginnings of {recipe.beginning} tokens leave nothing to write in {course.length}"
                )
            begun = beginnings(documents, checkpoint.tokenizer, recipe.own_texts, recipe.beginning, course.length)
            # What the model writes is kept there.
            folder.begin(settings)
            text = written_text(
                base, begun, course, texts, to / CHECKPOINTS / "own_text.safetensors", recipe.temperature
            )
        else:
            text = given_text(documents, texts, course, checkpoint.tokenizer, processes.num_processes)
        lesson: Lesson
        if isinstance(recipe, ExitHeadRecipe):
            lesson = ExitLesson(base, recipe, text, course.seed)
        elif isinstance(recipe, HeadRecipe):
            lesson = Eagle3Lesson(base, recipe, text, course.seed)
        else:
            lesson = LayerSkipLesson(checkpoint, recipe, text.held_out)
        folder.begin(settings)
    before = lesson.measure() if processes.is_main_process else {}
    started, resumed = time.perf_counter(), resumed_step(to)
    if processes.is_main_process:
        observe(0, course.steps, before)
    log = train(lesson, course, text.train, to, str(next(lesson.model.parameters()).device), observe)
    seconds = time.perf_counter() - started
    # What is measured is what is saved.
    lesson.model.to(dtype).float()
    after = lesson.measure()
    report = {
        **settings,
        "made_with": environment(checkpoint.model.device),
        "before": before,
        "after": after,
        "resumed_at": resumed,
        "seconds_of_last_stretch": seconds,
        "doubts": doubts(before, [*log, after]),
        "log": log,
    }
    if processes.is_main_process:
        observe(course.steps, course.steps, after)
        folder.finish(lambda new: lesson.save(new, dtype, after), report)
    return report


# Nats a token that the full model may lose before it is said; a rise of the loss.
_RUINED, _RISEN = 0.3, 1.15


def doubts(before: Mapping[str, float], log: Sequence[Mapping[str, float]]) -> list[str]:
    """Return what looks wrong so far, a sentence each, from figures before the training and the log of it."""
    found = []
    losses = [point["loss"] for point in log if "loss" in point]
    if losses and losses[-1] > _RISEN * min(losses):
        found.append(f"the loss rose from {min(losses):.2f} to {losses[-1]:.2f}; lower --learning-rate")
    held_out, own = [point["held_out_loss"] for point in log if "held_out_loss" in point], before.get("held_out_loss")
    if own is not None and held_out and held_out[-1] > own + _RUINED:
        found.append(
            f"the full model's loss on held-out text rose from {own:.2f} to {held_out[-1]:.2f}: it forgets; lower "
            "--learning-rate"
        )
    return found

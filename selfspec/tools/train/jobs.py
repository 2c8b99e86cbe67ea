"""Whole trainings of a model: from a checkpoint and text to a folder with the trained checkpoint and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from selfspec.errors import TrainingError
from selfspec.model.checkpoint import Checkpoint, find_device, load_checkpoint
from selfspec.model.fingerprint import fingerprint
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import Split, packed, read_documents, shuffled, split, spread
from selfspec.tools.train.course import Course, Lesson, Observer, train
from selfspec.tools.train.curves import draw_curves
from selfspec.tools.train.folder import RunFolder
from selfspec.tools.train.layerskip import LayerSkipLesson
from selfspec.tools.train.recipe import Recipe
from selfspec.tools.train.requirements import require_packages

if TYPE_CHECKING:
    from accelerate import PartialState


@dataclass(frozen=True)
class Source:
    """Where a training takes its model and its text from.

    Attributes:
        model: folder or hub name of the base.
        text: files to learn from.
        held_out: file to measure on; None: the first blocks of the shuffled text.
        held_out_blocks: the most blocks to measure on.
        device: as in `torch.device`, or "auto".
    """

    model: str
    text: tuple[Path, ...]
    held_out: Path | None = None
    held_out_blocks: int = 32
    device: str = "auto"


def train_layerskip(source: Source, course: Course, recipe: Recipe | None, to: Path, observe: Observer) -> Any:
    """Continue a checkpoint by the LayerSkip recipe.

    Args:
        source: model and text.
        course: how long and how fast.
        recipe: how exits are taught; None: plain training, to compare with.
        to: the folder that becomes the trained checkpoint. The same call goes on with an interrupted training there.
        observe: told of every step.

    Returns:
        The report, also in `training.json`: figures on the held-out text before and after, and the log.

    Raises:
        CheckpointError, UnsupportedModelError: the base cannot be loaded.
        CorpusError: a text cannot be read or is too short.
        TrainingError: the settings do not fit, the folder is taken, or the loss became NaN.
        StorageError: the folder cannot be written to, or the disk is full; what was finished is kept.
        KeyboardInterrupt: interrupted; repeat the call to go on.
    """
    require_packages(course)
    processes = processes_on(source.device)
    folder = RunFolder(to)
    if processes.is_main_process:
        folder.check()
    checkpoint = load_base(source)
    dtype = checkpoint.dtype
    model = checkpoint.loaded.model.float()
    adapter = find_adapter(model)
    if recipe is not None:
        recipe.exits_of(len(adapter.decoder_layers(model)))
    text = read_split(source, course, checkpoint.loaded.tokenizer, processes.num_processes)
    settings = {
        "source": described(source),
        "base": fingerprint(model),
        "course": asdict(course),
        "recipe": recipe and asdict(recipe),
    }
    lesson = LayerSkipLesson(model, adapter, recipe, text.held_out)

    def save(folder: Path) -> None:
        model.to(dtype).save_pretrained(folder)
        checkpoint.loaded.tokenizer.save_pretrained(folder)

    def rounded() -> None:
        # What is measured is what is saved.
        model.to(dtype).float()

    return run_lesson(lesson, course, text, processes, folder, settings, rounded, save, observe)


def run_lesson(
    lesson: Lesson,
    course: Course,
    text: Split,
    processes: PartialState,
    folder: RunFolder,
    settings: Mapping[str, Any],
    settle: Callable[[], None],
    save: Callable[[Path], None],
    observe: Observer,
) -> dict[str, Any]:
    """Measure, train, measure, save.

    Args:
        lesson: what is learnt.
        course: how.
        text: to learn from and to measure on.
        processes: that train together.
        folder: what becomes the result.
        settings: what the report says the training was, and what must be the same to go on with it.
        settle: brings the weights into the form in which they are saved.
        save: writes the result into a folder.
        observe: told of every step.
    """
    # The other processes of a distributed training find what the first one wrote.
    with processes.main_process_first():
        folder.begin(settings)
        if folder.before is None:
            folder.keep_before(_evaluated(lesson))
    before = folder.before
    observe(0, course.steps, before or {})
    started = time.perf_counter()
    log = train(lesson, course, text.train, folder.path, str(_device_of(lesson)), observe)
    seconds = time.perf_counter() - started
    settle()
    after = _evaluated(lesson)
    observe(course.steps, course.steps, after)
    report = {**settings, "before": before, "after": after, "seconds_of_last_stretch": seconds, "log": log}

    def save_all(new: Path) -> None:
        save(new)
        draw_curves(log, new / "curves.png")

    if processes.is_main_process:
        folder.finish(save_all, report)
    return report


@dataclass(frozen=True)
class Base:
    """A checkpoint to train on.

    Attributes:
        loaded: model and tokenizer.
        dtype: what its weights are saved in.
    """

    loaded: Checkpoint
    dtype: torch.dtype


def load_base(source: Source) -> Base:
    """Load the checkpoint of a training, on its device.

    Raises:
        CheckpointError, UnsupportedModelError, UnsupportedOptionError: see `load_checkpoint`.
    """
    find_device(source.device)
    loaded = load_checkpoint(source.model, "auto", source.device)
    return Base(loaded, loaded.model.dtype)


def processes_on(device: str) -> PartialState:
    """The processes that train together, as `accelerate launch` or `torchrun` started them; mostly one."""
    # Only training needs the package, so it may be missing.
    from accelerate import PartialState

    return PartialState(cpu=device == "cpu")


def read_split(source: Source, course: Course, tokenizer: PreTrainedTokenizerBase, processes: int) -> Split:
    """The text of a training in blocks: no more of it than the course takes, and what is measured on.

    Args:
        source: names the text.
        course: how much of it is taken.
        tokenizer: of the model.
        processes: that train together.

    Raises:
        CorpusError: a file cannot be read, or there is too little text.
    """
    if not source.text:
        raise TrainingError("no text to train on; give a file")
    wanted = course.blocks * processes
    documents = shuffled([document for file in source.text for document in read_documents(file)], course.seed)
    if source.held_out is not None:
        measured = spread(packed(read_documents(source.held_out), tokenizer, course.length), source.held_out_blocks)
        return Split(packed(documents, tokenizer, course.length, wanted), measured)
    blocks = packed(documents, tokenizer, course.length, wanted + source.held_out_blocks)
    # Of a short text, a tenth.
    return split(blocks, min(source.held_out_blocks, max(1, len(blocks) // 10)))


def described(source: Source) -> dict[str, Any]:
    """What a report says of a source: names, not folders, so that a training may move."""
    return {
        "model": source.model,
        "text": [{"name": file.name, "bytes": file.stat().st_size} for file in source.text],
        "held_out": source.held_out and source.held_out.name,
        "held_out_blocks": source.held_out_blocks,
    }


def _evaluated(lesson: Lesson) -> dict[str, float]:
    lesson.model.eval()
    with torch.no_grad():
        return lesson.evaluate()


def _device_of(lesson: Lesson) -> torch.device:
    return next(lesson.model.parameters()).device

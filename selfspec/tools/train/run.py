"""One training: from a checkpoint and text to a folder with the result, its report and its curves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from selfspec.errors import TrainingError
from selfspec.model.checkpoint import Checkpoint, load_checkpoint
from selfspec.model.fingerprint import fingerprint
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import Blocks, all_documents, given_text, packed, written_text
from selfspec.tools.train.course import CHECKPOINTS, Observer, train
from selfspec.tools.train.exit_heads import ExitLesson
from selfspec.tools.train.folder import RunFolder
from selfspec.tools.train.layerskip import LayerSkipLesson
from selfspec.tools.train.lesson import Lesson
from selfspec.tools.train.recipe import ExitHeadRecipe, LayerSkipRecipe
from selfspec.tools.train.settings import Training


def run(training: Training, recipe: LayerSkipRecipe | ExitHeadRecipe | None, observe: Observer) -> dict[str, Any]:
    """Train what exits early: the model itself by the LayerSkip recipe, or heads for a base that stays as it is.

    Args:
        training: model, text, and how long and how fast. The same call resumes an interrupted training in its folder.
        recipe: how exits are taught; None: plain training of the model, to compare with.
        observe: told of every step.

    Returns:
        The report, also in `training.json`: figures on the held-out text before and after, and the log.

    Raises:
        CheckpointError, UnsupportedModelError: the base cannot be loaded.
        CorpusError: a text cannot be read or is too short.
        TrainingError: a package is missing, the settings do not fit, the folder is taken, or the loss became NaN.
        StorageError: the folder cannot be written to, or the disk is full; what was finished is kept.
        KeyboardInterrupt: interrupted; repeat the call to resume.
    """
    _require_packages(training)
    # Only training needs the package, so it may be missing.
    from accelerate import PartialState

    # As `accelerate launch` or `torchrun` started them; mostly one.
    processes = PartialState(cpu=training.device == "cpu")
    course, folder = training.course, RunFolder(training.to)
    if processes.is_main_process:
        folder.check()
    base = load_checkpoint(training.model, "auto", training.device)
    dtype, model = base.model.dtype, base.model.float()
    if recipe is not None:
        recipe.exits_of(len(find_adapter(model).decoder_layers(model)))
    documents = all_documents(training.texts, course.seed)
    settings = {
        "source": training.described(),
        "base": fingerprint(model),
        "course": asdict(course),
        "recipe": recipe and asdict(recipe),
    }
    # The other processes of a distributed training find what the first one wrote.
    with processes.main_process_first():
        lesson, text = _lesson(training, recipe, base, documents, processes.num_processes, folder, settings)
        folder.begin(settings)
        if folder.before is None:
            folder.keep_before(lesson.measure())
    before = folder.before
    observe(0, course.steps, before or {})
    started = time.perf_counter()
    log = train(lesson, course, text, folder.path, str(next(lesson.model.parameters()).device), observe)
    seconds = time.perf_counter() - started
    # What is measured is what is saved.
    lesson.model.to(dtype).float()
    after = lesson.measure()
    observe(course.steps, course.steps, after)
    report = {**settings, "before": before, "after": after, "seconds_of_last_stretch": seconds, "log": log}

    def save(new: Path) -> None:
        lesson.save(new, dtype, after)
        draw_curves(log, new / "curves.png")

    if processes.is_main_process:
        folder.finish(save, report)
    return report


def _lesson(
    training: Training,
    recipe: LayerSkipRecipe | ExitHeadRecipe | None,
    base: Checkpoint,
    documents: Sequence[str],
    processes: int,
    folder: RunFolder,
    settings: Mapping[str, Any],
) -> tuple[Lesson, Blocks]:
    """What is learnt, and the text to learn it from."""
    texts, course = training.texts, training.course
    if not isinstance(recipe, ExitHeadRecipe):
        text = given_text(documents, texts, course, base.tokenizer, processes)
        return LayerSkipLesson(base, recipe, text.held_out), text.train
    if recipe.own_texts:
        if not 1 <= recipe.beginning < course.length:
            raise TrainingError(f"beginnings of {recipe.beginning} tokens leave nothing to write in {course.length}")
        beginnings = packed(documents, base.tokenizer, recipe.beginning, recipe.own_texts)
        # What the model writes is kept there.
        folder.begin(settings)
        kept = folder.path / CHECKPOINTS / "own_text.safetensors"
        text = written_text(base.model, beginnings, course, texts, kept)
    else:
        text = given_text(documents, texts, course, base.tokenizer, processes)
    return ExitLesson(base.model, recipe, text, course.seed), text.train


def _require_packages(training: Training) -> None:
    for package in ("accelerate", "matplotlib"):
        if find_spec(package) is None:
            raise TrainingError(f"training needs {package}; pip install 'selfspec[train]'")
    if training.course.tensorboard and find_spec("tensorboard") is None:
        raise TrainingError("logs for TensorBoard need the package tensorboard; pip install tensorboard")


def draw_curves(log: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw loss by step, and agreement of each exit with the full model, as a PNG.

    Args:
        log: points of a training, each with its `step`.
        file: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot, which keeps figures for the whole process and may ask for a display.
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, exits = figure.subplots(1, 2)
    for name, label in (("loss", "training"), ("held_out_loss", "held out, full model")):
        _plot(losses, log, name, label)
    losses.set(xlabel="step", ylabel="nats a token", title="loss")
    for name in sorted({name for point in log for name in point if name.startswith("agreement_")}, key=_number):
        _plot(exits, log, name, f"exit {_number(name)}")
    exits.set(xlabel="step", ylabel="top-1 agreement", title="exits against the full model, held out")
    for axes in (losses, exits):
        if axes.lines:
            axes.legend()
    figure.savefig(file, dpi=120)


def _plot(axes: Any, log: Sequence[Mapping[str, Any]], name: str, label: str) -> None:
    points = {point["step"]: point[name] for point in log if name in point}
    if points:
        axes.plot(list(points), list(points.values()), marker="." if len(points) < 50 else "", label=label)


def _number(name: str) -> int:
    return int(name.rsplit("_", 1)[1])

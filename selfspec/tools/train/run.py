"""Run a training: from a checkpoint and text to a folder with the result, by transformers' Trainer, resumable."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from selfspec.arguments import shown
from selfspec.errors import TrainingError
from selfspec.files.json_text import read_json
from selfspec.files.writing import check_output_folder, write_json, write_sealed, writing

# Read by torch when the first CUDA product is computed.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.environment import environment
from selfspec.measure.prompts import check_reads_text
from selfspec.model.identity import fingerprint
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import Blocks, all_documents, beginnings, given_text, identified, written_text
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

CHECKPOINTS = "checkpoints"
KEPT = "what was finished is kept: make room and repeat the command to go on"
"""Advice in messages about a training whose disk is full."""

Observer = Callable[[int, int, Mapping[str, float]], None]
"""Called with the steps made, all steps, and new figures."""


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

    `model` is the folder or hub name of the base, `to` the folder that becomes the result: the same call resumes an
    interrupted training there. `observe` is called at every step, in the first process of a distributed training. The
    device is as in `torch.device`, or "auto". Returns the report, also in `training.json`: figures on the held-out text
    before and after, and the log.

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


def train(lesson: Lesson, course: Course, text: Blocks, folder: Path, device: str, observe: Observer) -> list[Any]:
    """Train, from the newest whole checkpoint in `folder` if there is one; return the log of losses and evaluations.

    An interrupted process resumes from its last checkpoint, and the weights become those of an uninterrupted run. The
    device is "auto" for what accelerate chooses, or "cpu"; `observe` is called at every step. A TrainingError: the
    loss or a weight became NaN or infinite, no checkpoint can be read, or there is no tracker; a StorageError: a
    checkpoint cannot be written, and those before it are kept.
    """
    try:
        trainer = _CourseTrainer(lesson, course, text, folder, device)
    except (RuntimeError, ValueError) as error:
        if not course.report_to:
            raise
        raise TrainingError(f"report_to={course.report_to}: {error}; install the tracker, or name another") from error
    trainer.add_callback(_Watch(observe))
    trainer.remove_callback(PrinterCallback)
    checkpoint = latest_checkpoint(folder)
    if checkpoint and (done := state_of(checkpoint)) and done.global_step >= course.steps:
        # The Trainer would make one more step.
        trainer._load_from_checkpoint(str(checkpoint))
        return list(done.log_history)
    with writing(folder, KEPT):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return list(trainer.state.log_history)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a training that was written to its end; None where there is none."""
    found = (folder / CHECKPOINTS).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    newest_first = sorted(found, key=lambda path: int(path.name.split("-")[-1]), reverse=True)
    return next((path for path in newest_first if state_of(path) is not None), None)


class _CourseTrainer(Trainer):
    def __init__(self, lesson: Lesson, course: Course, text: Blocks, folder: Path, device: str) -> None:
        super().__init__(
            model=lesson.model,
            args=_arguments(course, folder, device),
            train_dataset=cast(Any, text),
            eval_dataset=cast(Any, lesson.held_out),
        )
        self._lesson = lesson
        # The loss is a mean over tokens; the Trainer then divides it by the number of batches summed up.
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = self._lesson.loss(model, Blocks(**inputs), self.state.global_step, self.state.max_steps)
        if not loss.isfinite():
            raise TrainingError(
                f"the loss became {loss.item()} in step {self.state.global_step + 1}; nothing was written since the "
                "last checkpoint. Lower the learning rate, or check the base's weights"
            )
        return loss

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        figures = self._lesson.measure()
        self.log(figures)
        return figures

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # A finite loss may still leave a step that is not.
        wrong = [name for name, weight in self._lesson.model.named_parameters() if not weight.isfinite().all()]
        if wrong:
            raise TrainingError(
                f"{len(wrong)} weights are NaN or infinite after step {self.state.global_step} (first: {wrong[0]}); "
                "the last checkpoint stays as it was. Lower the learning rate"
            )
        try:
            super()._save_checkpoint(model, trial)
        except BaseException:
            # Half a checkpoint would take the room that the next try needs.
            half = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            shutil.rmtree(half, ignore_errors=True)
            raise


class _Watch(TrainerCallback):
    """Passes steps and figures on."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.is_world_process_zero:
            self._observe(state.global_step, state.max_steps, {})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if state.is_world_process_zero:
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, float)}
            self._observe(state.global_step, state.max_steps, numbers)


def _arguments(course: Course, folder: Path, device: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / CHECKPOINTS),
        max_steps=course.steps,
        per_device_train_batch_size=course.batch,
        gradient_accumulation_steps=course.accumulate,
        learning_rate=cast(float, course.learning_rate),
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": int(course.decay * course.steps), "decay_type": "linear"},
        warmup_steps=course.warm_up_steps,
        weight_decay=0.01,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        bf16=course.precision == "bfloat16",
        seed=course.seed,
        data_seed=course.seed,
        save_strategy="steps",
        save_steps=course.save_every,
        save_total_limit=2,
        eval_strategy="steps",
        # A short one is looked at on the way, too.
        eval_steps=min(course.evaluate_every, max(1, course.steps // 3)),
        logging_steps=10,
        logging_nan_inf_filter=False,
        report_to=course.report_to or [],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        use_cpu=device == "cpu",
        log_level_replica="passive",
    )


def resumed_step(folder: Path) -> int:
    """Return the step that a training goes on from; 0: it begins anew."""
    checkpoint = latest_checkpoint(folder)
    state = None if checkpoint is None else state_of(checkpoint)
    return 0 if state is None else state.global_step


def state_of(checkpoint: Path) -> TrainerState | None:
    """Return the Trainer's state, which it writes last; None if the checkpoint was not written to its end."""
    try:
        return TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


REPORT = "training.json"
_BEGUN = "run.json"
_NEW = "unfinished"


@dataclass(frozen=True)
class _Begun:
    """The content of `run.json`."""

    settings: dict[str, Any]


class RunFolder:
    """Keeps the settings of a training, its checkpoints and, in the end, its result; made by `begin`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Refuse, before any work, a folder that no training could begin in or go on in."""
        check_output_folder(self.path)
        if (self.path / REPORT).exists():
            raise TrainingError(f"{self.path} holds a finished training; give another folder with --to")
        if not (self.path / _BEGUN).exists() and self.path.exists() and any(self.path.iterdir()):
            raise TrainingError(f"{self.path} is not empty and holds no training; give another folder with --to")

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Begin a training, or resume the one that was begun here with the same settings, which are ready for JSON."""
        self.check()
        file, wanted = self.path / _BEGUN, _Begun(json.loads(json.dumps(settings)))
        if not file.exists():
            write_sealed(file, asdict(wanted), KEPT)
        begun = read_json(file, _Begun, TrainingError, "give another folder with --to")
        changed = _differing(begun.settings, wanted.settings)
        if changed:
            raise TrainingError(
                f"the training in {self.path} was begun with other settings ({', '.join(changed)}); repeat its "
                "command to go on with it, or give another folder with --to"
            )

    def finish(self, save: Callable[[Path], None], report: Mapping[str, Any]) -> None:
        """Put the result in place, the report last, and drop the checkpoints."""
        new = self.path / _NEW
        shutil.rmtree(new, ignore_errors=True)
        try:
            with writing(self.path, KEPT):
                new.mkdir()
                save(new)
                for file in sorted(new.iterdir()):
                    file.replace(self.path / file.name)
                write_json(self.path / REPORT, report, KEPT)
        except BaseException:
            # Half a result would take the room that the next try needs.
            shutil.rmtree(new, ignore_errors=True)
            raise
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        new.rmdir()
        (self.path / _BEGUN).unlink()


def _differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return settings that differ, nested ones too, each with both values."""
    found = []
    for name in sorted(theirs.keys() | ours.keys()):
        there, here = theirs.get(name), ours.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            found += _differing(there, here)
        elif there != here:
            found.append(f"{name} {shown(there)} there, {shown(here)} here")
    return found

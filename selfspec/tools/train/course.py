"""One course of training on transformers' Trainer, in a folder: checkpoints, resuming, NaN refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from selfspec.arguments import shown
from selfspec.errors import TrainingError
from selfspec.files.json_text import read_json
from selfspec.files.writing import check_output_folder, write_json, write_sealed, writing

# Read by torch when the first CUDA product is computed.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from selfspec.tools.train.corpus import Blocks
from selfspec.tools.train.lesson import Lesson
from selfspec.tools.train.recipe import Course

CHECKPOINTS = "checkpoints"
KEPT = "what was finished is kept: make room and repeat the command to go on"
"""Advice in messages about a training whose disk is full."""

Observer = Callable[[int, int, Mapping[str, float]], None]
"""Called with the steps made, all steps, and new figures."""


def train(lesson: Lesson, course: Course, text: Blocks, folder: Path, device: str, observe: Observer) -> list[Any]:
    """Train, from the newest whole checkpoint in `folder` if there is one; return the log of losses and evaluations.

    An interrupted process resumes from its last checkpoint, and the weights become those of an uninterrupted run. The
    device is "auto" for what accelerate chooses, or "cpu"; `observe` is called at every step.

    Raises:
        TrainingError: the loss or a weight became NaN or infinite, no checkpoint can be read, or there is no tracker.
        StorageError: a checkpoint cannot be written; those before it are kept.
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

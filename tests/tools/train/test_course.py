"""A course of training: interrupted and resumed it gives the same weights; what is not finite ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import logging

from selfspec.errors import StorageError, TrainingError
from selfspec.tools.train.corpus import Blocks
from selfspec.tools.train.course import CHECKPOINTS, RESUMED, latest_checkpoint, train
from selfspec.tools.train.lesson import Lesson
from selfspec.tools.train.recipe import Course

_COURSE = Course(steps=8, batch=2, length=8, save_every=3, evaluate_every=100, learning_rate=0.05)


class _Lesson(Lesson):
    """A model of a few numbers, with dropout so that randomness must be restored too."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Embedding(10, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.held_out = Blocks.of(torch.zeros(1, 4, dtype=torch.long))
        self.poison: int | None = None

    def loss(self, model: nn.Module, batch: Blocks, step: int, steps: int) -> Tensor:
        loss: Tensor = (model(batch.ids) ** 2).mean() + model(batch.ids).mean()
        return loss * torch.nan if step == self.poison else loss

    def evaluate(self) -> dict[str, float]:
        return {"held_out_loss": float(self.model(self.held_out.ids).mean())}

    def save(self, folder: Path, dtype: torch.dtype, figures: Mapping[str, float]) -> None:
        raise AssertionError

    def weights(self) -> Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.model.parameters()])


def _text() -> Blocks:
    return Blocks.of(torch.randint(10, (9, 4), generator=torch.Generator().manual_seed(0)))


def _ignore(step: int, steps: int, figures: Mapping[str, float]) -> None:
    pass


def _trained(folder: Path) -> Tensor:
    lesson = _Lesson()
    train(lesson, _COURSE, _text(), folder, "cpu", _ignore)
    return lesson.weights()


def _broken_off(folder: Path, last: int) -> None:
    """Train, and die as a step is made."""

    def die(step: int, steps: int, figures: Mapping[str, float]) -> None:
        if step == last:
            raise MemoryError

    with pytest.raises(MemoryError):
        train(_Lesson(), _COURSE, _text(), folder, "cpu", die)


def _newest(folder: Path) -> str | None:
    found = latest_checkpoint(folder)
    return None if found is None else found.name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """The weights of a training that nothing disturbed."""
    return _trained(tmp_path_factory.mktemp("whole"))


def test_a_seed_gives_the_same_weights_again(tmp_path: Path, uninterrupted: Tensor) -> None:
    assert torch.equal(_trained(tmp_path), uninterrupted)
    assert not torch.equal(_Lesson().weights(), uninterrupted)


def test_training_leaves_the_log_level_as_it_was(tmp_path: Path) -> None:
    before = logging.get_verbosity()
    try:
        logging.set_verbosity_info()
        _trained(tmp_path)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.tools
def test_a_signal_ends_it_with_a_checkpoint_and_it_goes_on_from_there(
    tmp_path: Path, uninterrupted: Tensor, number: signal.Signals
) -> None:
    def interrupt(step: int, steps: int, figures: Mapping[str, float]) -> None:
        if step == 4 and not figures:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        train(_Lesson(), _COURSE, _text(), tmp_path, "cpu", interrupt)
    assert _newest(tmp_path) == "checkpoint-4"
    assert torch.equal(_trained(tmp_path), uninterrupted)


@pytest.mark.parametrize("last", [1, 3, 5, 7])
@pytest.mark.tools
def test_a_killed_training_goes_on_from_its_last_checkpoint(tmp_path: Path, uninterrupted: Tensor, last: int) -> None:
    _broken_off(tmp_path, last)
    assert torch.equal(_trained(tmp_path), uninterrupted)


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path: Path, uninterrupted: Tensor) -> None:
    _broken_off(tmp_path, 7)
    state = tmp_path / CHECKPOINTS / "checkpoint-6" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    assert _newest(tmp_path) == "checkpoint-3"
    assert torch.equal(_trained(tmp_path), uninterrupted)


def test_a_finished_course_repeats_nothing(tmp_path: Path, uninterrupted: Tensor) -> None:
    _trained(tmp_path)
    steps: list[tuple[int, Mapping[str, float]]] = []
    lesson = _Lesson()
    train(lesson, _COURSE, _text(), tmp_path, "cpu", lambda step, _, figures: steps.append((step, figures)))
    assert torch.equal(lesson.weights(), uninterrupted)
    # It says where it goes on from, and nothing else.
    assert steps == [(8, {RESUMED: 8.0})]


@pytest.mark.parametrize(("parameters", "rate"), [(260_000, 5e-4), (135_000_000, 1.36e-4), (7_000_000_000, 1.9e-5)])
def test_larger_models_are_continued_by_smaller_steps(parameters: int, rate: float) -> None:
    found = Course().for_model(parameters).learning_rate
    assert found == pytest.approx(rate, rel=0.01)
    assert Course(learning_rate=1e-3).for_model(parameters).learning_rate == 1e-3


def test_short_trainings_warm_up_for_some_steps() -> None:
    assert [Course(steps=steps).warm_up_steps for steps in (4, 24, 1000)] == [1, 6, 50]


def test_a_full_disk_ends_it_and_the_same_call_goes_on(
    tmp_path: Path, uninterrupted: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.save

    def full(content: object, file: Any, **options: Any) -> None:
        if "checkpoint-6" in str(file):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 2055360 vs 2055248")
        right(content, file, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(StorageError, match="what was finished is kept"):
            _trained(tmp_path)
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["checkpoint-3"]
    assert torch.equal(_trained(tmp_path), uninterrupted)


def test_a_loss_that_is_nan_ends_it_and_leaves_the_checkpoint(tmp_path: Path) -> None:
    lesson = _Lesson()
    lesson.poison = 5
    with pytest.raises(TrainingError, match="nan in step 6"):
        train(lesson, _COURSE, _text(), tmp_path, "cpu", _ignore)
    assert _newest(tmp_path) == "checkpoint-3"


def test_weights_that_are_infinite_are_not_saved(tmp_path: Path) -> None:
    lesson = _Lesson()

    def spoil(step: int, steps: int, figures: Mapping[str, float]) -> None:
        if step == 3:
            with torch.no_grad():
                next(lesson.model.parameters())[9].fill_(torch.inf)

    # The Trainer saves after telling that the step is made.
    with pytest.raises(TrainingError, match=r"after step 3 .*0\.weight"):
        train(lesson, _COURSE, _text(), tmp_path, "cpu", spoil)
    assert _newest(tmp_path) is None


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"learning_rate": 0.0}, {"warmup": 0.8, "decay": 0.5}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(TrainingError):
        Course(**wrong)  # type: ignore[arg-type]

"""Training from a checkpoint folder and text to the folder that users draft with; interrupted, it goes on the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.integrations import integration_utils

import selfspec
from helpers import tiny
from helpers.saved_folders import PROMPTS, checkpoint_folder
from selfspec.errors import CorpusError, StorageError, TrainingError
from selfspec.model.identity import fingerprint
from selfspec.tools.train import lesson
from selfspec.tools.train.corpus import Blocks
from selfspec.tools.train.lesson import Lesson
from selfspec.tools.train.recipe import Course, ExitHeadRecipe, HeadRecipe, LayerSkipRecipe, Texts, rate_of_model
from selfspec.tools.train.run import CHECKPOINTS, Observer, latest_checkpoint, run, train

_COURSE = Course(steps=6, batch=4, length=32, save_every=2, evaluate_every=4, learning_rate=2e-3, decay=0.4)
_HEADS = ExitHeadRecipe(exits=(2, 3), rank=16)
_RECIPE = LayerSkipRecipe(exits=(2, 3), rotation=1, exit_scale=1.0, weighting="even", exit_target="model")

_PLAIN = LayerSkipRecipe(dropout=0.0, exit_scale=0.0)

_WRITTEN = {"exit_head.safetensors", "training.json"}

Recipe = LayerSkipRecipe | ExitHeadRecipe | HeadRecipe
Training = Callable[..., dict[str, Any]]


def _ignore(step: int, steps: int, figures: Mapping[str, float]) -> None:
    pass


def _dies_at(last: int) -> Observer:
    def observe(step: int, steps: int, figures: Mapping[str, float]) -> None:
        if step == last:
            raise MemoryError

    return observe


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """The weights of a training that was broken off and resumed, which are those of the whole one."""
    broken, whole = (load_file(folder / each / name) for each in ("broken", "whole"))
    assert broken.keys() == whole.keys()
    assert all(torch.equal(broken[each], whole[each]) for each in broken)
    return whole


@pytest.fixture(scope="module")
def text(
    tmp_path_factory: pytest.TempPathFactory, stories: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Path:
    """Stories that the embedded model itself tells, so that it knows their like."""
    file = tmp_path_factory.mktemp("text") / "stories.jsonl"
    ids = tokenizer(list(PROMPTS), return_tensors="pt", padding=True, padding_side="left", pad_token="<unk>")
    torch.manual_seed(0)
    told: Any = stories.generate(
        **ids, max_new_tokens=200, do_sample=True, pad_token_id=0, eos_token_id=None, num_return_sequences=8
    )
    written = tokenizer.batch_decode(told, skip_special_tokens=True)
    file.write_text("".join(json.dumps({"text": story}) + "\n" for story in written))
    return file


@pytest.fixture
def training(text: Path) -> Training:
    def train(
        recipe: Recipe,
        to: Path,
        observe: Observer = _ignore,
        course: Course = _COURSE,
        file: Path = text,
    ) -> dict[str, Any]:
        texts = Texts(text=[file], held_out_blocks=4)
        return run(str(checkpoint_folder()), texts, course, recipe, to, observe, "cpu")

    return train


def assert_drafts(stories: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, draft: str) -> None:
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    out = selfspec.wrap(stories, draft, draft_length=3).generate(ids, max_new_tokens=30)
    assert torch.equal(out.sequences, selfspec.wrap(stories).generate(ids, max_new_tokens=30).sequences)
    assert out.stats.accepted > 0


def test_exit_heads_learn_and_draft_for_their_base(
    training: Training, tmp_path: Path, stories: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    to = tmp_path / "heads"
    report = training(_HEADS, to, course=replace(_COURSE, steps=30))
    for exit_layer in _HEADS.exits:
        assert report["after"][f"alpha_{exit_layer}"] > report["before"][f"alpha_{exit_layer}"] + 0.02
    assert {file.name for file in to.iterdir()} == _WRITTEN
    kept = json.loads((to / "training.json").read_text())
    assert kept["after"] == report["after"]
    # What it was made with is told.
    assert {"selfspec", "commit", "torch", "transformers", "processor", "threads"} <= kept["made_with"].keys()
    assert kept["base"] == fingerprint(stories.float())
    assert all(len(text["sha256"]) == 64 for text in kept["source"]["text"])
    assert kept["course"]["seed"] == _COURSE.seed
    assert_drafts(stories, tokenizer, f"head:{to}@3")


@pytest.mark.tools
@pytest.mark.parametrize(
    ("recipe", "last", "file"),
    [
        (replace(_HEADS, own_texts=8, beginning=4, vocabulary=100), 3, "exit_head.safetensors"),
        (replace(_RECIPE, dropout=0.3), 5, "model.safetensors"),
    ],
)
def test_weights_are_the_same_after_an_interrupt(
    training: Training, tmp_path: Path, recipe: Recipe, last: int, file: str
) -> None:
    with pytest.raises(MemoryError):
        training(recipe, tmp_path / "broken", _dies_at(last))
    training(recipe, tmp_path / "broken")
    training(recipe, tmp_path / "whole")
    found = _tensors(tmp_path, file)
    assert len(found.get("tokens", range(100))) == 100


@pytest.mark.tools
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_draft_head_learns_and_is_the_same_after_an_interrupt(
    training: Training,
    tmp_path: Path,
    precision: Literal["float32", "bfloat16"],
    stories: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    plan = HeadRecipe(depth=3, vocabulary=200, own_texts=40, beginning=4, temperature=0.7)
    course = replace(_COURSE, steps=24, learning_rate=5e-3, precision=precision)

    with pytest.raises(MemoryError):
        training(plan, tmp_path / "broken", _dies_at(19), course)
    report = training(plan, tmp_path / "broken", course=course)
    assert report["resumed_at"] == 18
    assert training(plan, tmp_path / "whole", course=course)["after"] == report["after"]
    assert report["after"]["alpha_1"] > report["before"]["alpha_1"] + 0.1
    assert report["after"]["accepted_greedily"] > report["before"]["accepted_greedily"]
    _tensors(tmp_path, "model.safetensors")
    assert_drafts(stories, tokenizer, f"eagle:{tmp_path / 'whole'}")


def test_layerskip_gives_a_checkpoint_whose_exits_draft_better(training: Training, tmp_path: Path) -> None:
    to = tmp_path / "model"
    report = training(_RECIPE, to, course=replace(_COURSE, steps=30, learning_rate=5e-4))
    before, after = report["before"], report["after"]
    assert after["alpha_2"] > before["alpha_2"] + 0.05
    assert after["held_out_loss"] < before["held_out_loss"] + 0.5
    assert not (to / "checkpoints").exists()
    model = AutoModelForCausalLM.from_pretrained(to)
    assert model.dtype == AutoModelForCausalLM.from_pretrained(checkpoint_folder()).dtype
    AutoTokenizer.from_pretrained(to)


def test_nothing_is_overwritten(training: Training, tmp_path: Path) -> None:
    to = tmp_path / "model"
    training(_PLAIN, to, course=replace(_COURSE, steps=1))
    content = {file: file.read_bytes() for file in to.iterdir()}
    with pytest.raises(TrainingError, match="finished training"):
        training(_PLAIN, to)
    with pytest.raises(TrainingError, match="finished training"):
        training(_HEADS, to)
    assert {file: file.read_bytes() for file in to.iterdir()} == content
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(TrainingError, match="not empty"):
        training(_PLAIN, tmp_path / "other")


def test_a_begun_training_is_not_gone_on_with_under_other_settings(training: Training, tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        training(_PLAIN, tmp_path / "model", _dies_at(2))
    with pytest.raises(TrainingError, match=r"other settings \(seed 0 there, 1 here\)"):
        training(_PLAIN, tmp_path / "model", course=replace(_COURSE, seed=1))


@pytest.mark.parametrize("changed", ["text", "held_out"])
def test_a_begun_training_is_not_gone_on_with_over_a_text_that_changed(
    text: Path, tmp_path: Path, changed: str
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("text", "held_out")}
    for file in files.values():
        file.write_bytes(text.read_bytes())

    def train(observe: Observer) -> dict[str, Any]:
        texts = Texts(text=[files["text"]], held_out=files["held_out"], held_out_blocks=4)
        return run(str(checkpoint_folder()), texts, _COURSE, _PLAIN, tmp_path / "model", observe, "cpu")

    with pytest.raises(MemoryError):
        train(_dies_at(1))
    # Of the same name and size.
    files[changed].write_bytes(text.read_bytes().replace(b"a", b"o"))
    with pytest.raises(TrainingError, match=rf"other settings \({'text' if changed == 'text' else 'sha256'} "):
        train(_ignore)


def test_wrong_settings_and_texts_are_refused_before_anything_is_written(training: Training, tmp_path: Path) -> None:
    to = tmp_path / "model"
    with pytest.raises(TrainingError, match="exit 9"):
        training(LayerSkipRecipe(exits=(9,)), to)
    with pytest.raises(TrainingError, match="exit 5"):
        training(ExitHeadRecipe(exits=(5,)), to)
    with pytest.raises(CorpusError):
        training(_PLAIN, to, file=tmp_path / "none.txt")
    assert not to.exists()


@pytest.mark.tools
def test_a_crash_while_saving_loses_nothing(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, *_: object) -> None:
        file.write_bytes(b"half of it")
        raise OSError("no space left on device")

    training(_HEADS, tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr("selfspec.tools.train.lesson.write_described", full)
        with pytest.raises(StorageError, match=r"no space.*repeat the command"):
            training(_HEADS, tmp_path / "broken")
    assert not (tmp_path / "broken" / "unfinished").exists()
    assert not (tmp_path / "broken" / "exit_head.safetensors").exists()
    training(_HEADS, tmp_path / "broken")
    broken, whole = (tmp_path / name / "exit_head.safetensors" for name in ("broken", "whole"))
    assert broken.read_bytes() == whole.read_bytes()


@pytest.mark.tools
def test_two_processes_write_one_result(tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a dog who liked to play with a big red ball in the park. " * 60)
    to = tmp_path / "heads"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "selfspec", "train", "exit", str(checkpoint_folder()), "--text", str(text), "--to", str(to)]
    sizes = ["--steps", "4", "--batch", "2", "--length", "16", "--exits", "2", "--rank", "8", "--own-texts", "40"]
    ended = subprocess.run(
        [*launch, *words, *sizes, "--beginning", "4", "--device", "cpu", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    # The first process alone says what came of it.
    assert ended.stdout.count("Before and after") == 1
    assert ended.stderr.count("step 0/4") == 1
    assert {file.name for file in to.iterdir()} == _WRITTEN
    assert json.loads((to / "training.json").read_text())["log"][-1]["step"] == 4


_SMALL = Course(steps=8, batch=2, length=8, save_every=3, evaluate_every=100, learning_rate=0.05)


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


def _trained(folder: Path) -> Tensor:
    lesson = _Lesson()
    train(lesson, _SMALL, _text(), folder, "cpu", _ignore)
    return lesson.weights()


def _broken_off(folder: Path, last: int) -> None:
    with pytest.raises(MemoryError):
        train(_Lesson(), _SMALL, _text(), folder, "cpu", _dies_at(last))


def _newest(folder: Path) -> str | None:
    found = latest_checkpoint(folder)
    return None if found is None else found.name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return _trained(tmp_path_factory.mktemp("whole"))


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
    train(lesson, _SMALL, _text(), tmp_path, "cpu", lambda step, _, figures: steps.append((step, figures)))
    assert torch.equal(lesson.weights(), uninterrupted)
    assert steps == []


@pytest.mark.parametrize(("parameters", "rate"), [(260_000, 5e-4), (135_000_000, 1.36e-4), (7_000_000_000, 1.9e-5)])
def test_larger_models_are_continued_by_smaller_steps(parameters: int, rate: float) -> None:
    assert rate_of_model(parameters) == pytest.approx(rate, rel=0.01)
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


def test_figures_go_to_the_trackers_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[dict[str, float]] = []

    class Tracker(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            noted.append(logs)

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "mine", Tracker)
    train(_Lesson(), replace(_SMALL, report_to=["mine"]), _text(), tmp_path / "tracked", "cpu", _ignore)
    assert any("held_out_loss" in each for each in noted)
    with pytest.raises(TrainingError, match=r"report_to=\['nothing'\].*name another"):
        train(_Lesson(), replace(_SMALL, report_to=["nothing"]), _text(), tmp_path, "cpu", _ignore)


def test_a_loss_that_is_nan_ends_it_and_leaves_the_checkpoint(tmp_path: Path) -> None:
    lesson = _Lesson()
    lesson.poison = 5
    with pytest.raises(TrainingError, match="nan in step 6"):
        train(lesson, _SMALL, _text(), tmp_path, "cpu", _ignore)
    assert _newest(tmp_path) == "checkpoint-3"


def test_weights_that_are_infinite_are_not_saved(tmp_path: Path) -> None:
    lesson = _Lesson()

    def spoil(step: int, steps: int, figures: Mapping[str, float]) -> None:
        if step == 3:
            with torch.no_grad():
                next(lesson.model.parameters())[9].fill_(torch.inf)

    # The Trainer saves after telling that the step is made.
    with pytest.raises(TrainingError, match=r"after step 3 .*0\.weight"):
        train(lesson, _SMALL, _text(), tmp_path, "cpu", spoil)
    assert _newest(tmp_path) is None


def test_figures_of_trainings_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    full, draft = torch.randn(2, 11, tiny.VOCABULARY, generator=torch.Generator().manual_seed(0))
    whole, parts = lesson.Acceptance(), lesson.Acceptance()
    whole.add(full, draft)
    monkeypatch.setattr(lesson, "_VALUES", 3 * tiny.VOCABULARY)
    parts.add(full[:4], draft[:4])
    parts.add(full[4:], draft[4:])
    assert parts.positions == whole.positions == 11
    assert parts.alpha == pytest.approx(whole.alpha)
    assert parts.alpha == pytest.approx(float(torch.minimum(full.softmax(-1), draft.softmax(-1)).sum(-1).mean()))
    assert parts.agreement == whole.agreement

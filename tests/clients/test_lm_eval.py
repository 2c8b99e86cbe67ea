"""lm-eval through selfspec: its stop strings, which remember, leave each document as plain decoding does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers.saved_folders import installed, rounds
from helpers.stories import checkpoint_folder

pytest.importorskip("lm_eval")

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

pytestmark = [pytest.mark.clients, pytest.mark.usefixtures(installed.__name__)]

NAMES = ("Lily", "Tom", "Ben", "Anna", "Sam", "Mia", "Max", "Sue", "Tim", "Zoe")
STARTS = (
    "{} went to the park with",
    "One day, {} had a big red",
    "{} did not want to play. Then",
    "In the garden {} saw a little",
    "{} wanted to",
    "Once upon a time, {} found a box. It was",
)
DOCUMENTS = [start.format(name) for name in NAMES for start in STARTS]
STOPS = ["\n", ". He", " box.", "park"]


def task(**generation: Any) -> ConfigurableTask:
    """Sixty beginnings of stories to go on with, made here: nothing is downloaded."""
    config = {
        "task": "stories",
        "custom_dataset": lambda **ignored: {"test": Dataset.from_list([{"text": text} for text in DOCUMENTS])},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "",
        "generation_kwargs": {"until": list(STOPS), "max_gen_toks": 32, "do_sample": False, **generation},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    return ConfigurableTask(config=config)


def answers(model: PreTrainedModel | str, batch: int, **generation: Any) -> list[str]:
    """What lm-eval takes for the answer to each document."""
    tokenizer = str(checkpoint_folder())
    lm = HFLM(model, tokenizer=tokenizer, batch_size=batch, device="cpu", dtype="float32", trust_remote_code=True)
    found = evaluate(lm, {"tasks": {"stories": task(**generation)}}, bootstrap_iters=None)
    samples = sorted(found["samples"]["stories"], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0] for sample in samples]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Writes stories, and ends some of them in the middle: with the word "play"."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = [1, 2, 337]
    return model


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> Callable[[int], list[str]]:
    """Answers of `model.generate` in batches of a size."""
    return cache(lambda batch: answers(model, batch))


def through_folder(spec: selfspec.SelfSpeculative, folder: Path) -> dict[str, Any]:
    spec.save_pretrained(folder)
    return {"model": str(folder)}


def through_a_keyword(spec: selfspec.SelfSpeculative, folder: Path) -> dict[str, Any]:
    return {"model": spec.model, "custom_generate": spec}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [through_folder, through_a_keyword])
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_answers_are_those_of_plain_decoding(
    model: PreTrainedModel,
    plain: Callable[[int], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    way: Callable[[selfspec.SelfSpeculative, Path], dict[str, Any]],
) -> None:
    wanted = plain(batch)
    drafted = rounds(monkeypatch)
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(4), draft_length=3)
    assert answers(batch=batch, **way(spec, tmp_path / "model")) == wanted
    assert len(drafted) > 60 / batch
    assert max(drafted) == 3


@pytest.mark.filterwarnings("ignore")
def test_documents_end_in_many_places(plain: Callable[[int], list[str]]) -> None:
    assert len(plain(8)) == 60
    assert len({len(answer) for answer in plain(8)}) > 15

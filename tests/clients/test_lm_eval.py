"""lm-eval through selfspec, and its `local-completions` over the loopback: what it reads is the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers.http_server import NAME, Running, running
from helpers.saved_folders import checkpoint_folder, installed, rounds

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")
pytest.importorskip("aiohttp")

from datasets import Dataset
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

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
GENERATION = {"until": list(STOPS), "max_gen_toks": 32, "do_sample": False}
# Few of them, of which each is to end by itself or in one of two ways.
TEXTS = ["Tom had a", "One day, Lily", "The dog was", "She wanted to go", "In the park there was", "Ben saw a"]


def found(lm: LM, texts: Sequence[str], **config: Any) -> list[Any]:
    """Responses to beginnings of stories to go on with, in order. They are made here: nothing is downloaded."""
    given = {
        "task": "stories",
        "custom_dataset": lambda **ignored: {"test": Dataset.from_list([{"text": text} for text in texts])},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "",
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    task = ConfigurableTask(config={**given, **config})
    results = evaluate(lm, {"tasks": {"stories": task}}, bootstrap_iters=None)
    return sorted(results["samples"]["stories"], key=lambda sample: sample["doc_id"])


def generated(lm: LM, texts: Sequence[str], **generation: Any) -> list[str]:
    samples = found(lm, texts, output_type="generate_until", generation_kwargs={**GENERATION, **generation})
    return [sample["filtered_resps"][0] for sample in samples]


def direct(model: PreTrainedModel | str, batch: int = 1, dtype: str = "float32", **options: Any) -> LM:
    tokenizer = str(checkpoint_folder())
    return HFLM(
        model, tokenizer=tokenizer, batch_size=batch, device="cpu", dtype=dtype, trust_remote_code=True, **options
    )


def answers(model: PreTrainedModel | str, batch: int, **generation: Any) -> list[str]:
    return generated(direct(model, batch), DOCUMENTS, **generation)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Writes stories, and ends some of them in the middle: with the word "play"."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = [1, 2, 337]
    return model


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> Callable[[int], list[str]]:
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
    # They end in many places.
    assert len({len(answer) for answer in wanted}) > 15
    drafted = rounds(monkeypatch)
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(4), draft_length=3)
    assert answers(batch=batch, **way(spec, tmp_path / "model")) == wanted
    assert len(drafted) > 60 / batch
    assert max(drafted) == 3


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def stock() -> LM:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float64)
    return direct(model, dtype="float64", add_bos_token=True)


def served(server: Running, batch: int, **options: Any) -> LM:
    return LocalCompletionsAPI(
        base_url=f"http://127.0.0.1:{server.port}/v1/completions",
        model=NAME,
        tokenizer=str(checkpoint_folder()),
        tokenizer_backend="huggingface",
        batch_size=batch,
        max_length=512,
        add_bos_token=True,
        **options,
    )


@pytest.mark.parametrize("options", [{"batch": 1}, {"batch": 4}, {"batch": 1, "num_concurrent": 4}])
def test_texts_over_http_are_the_models_own(server: Running, stock: LM, options: dict[str, Any]) -> None:
    over_http, own = (generated(lm, TEXTS, until=[".", "\n"]) for lm in (served(server, **options), stock))
    # A served text follows its prompt; lm-eval decodes new tokens alone, which drops the blank before the first word.
    assert [text.lstrip() for text in over_http] == own

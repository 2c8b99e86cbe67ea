"""lm-eval's `local-completions` over the loopback: what it reads is what it reads of the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.http_server import NAME, Running, running
from helpers.stories import checkpoint_folder

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")
pytest.importorskip("aiohttp")

from datasets import Dataset
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

TEXTS = ["Tom had a", "One day, Lily", "The dog was", "She wanted to go", "In the park there was", "Ben saw a"]
CHOICES = [" big red ball.", " small house."]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


def task(output_type: str) -> ConfigurableTask:
    """Beginnings to go on with, or pairs of ends to choose from."""
    lines = [{"text": text, "choices": CHOICES, "label": 0} for text in TEXTS]
    config: dict[str, Any] = {
        "task": "stories",
        "custom_dataset": lambda **ignored: {"test": Dataset.from_list(lines)},
        "output_type": output_type,
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "target_delimiter": "",
    }
    if output_type == "generate_until":
        until = {"until": [".", "\n"], "max_gen_toks": 24, "do_sample": False}
        config |= {"doc_to_target": "", "generation_kwargs": until}
        config |= {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
    else:
        config |= {"doc_to_choice": "choices", "doc_to_target": "label"}
        config |= {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}
    return ConfigurableTask(config=config)


def found(lm: LM, output_type: str) -> list[Any]:
    """Responses to each document, in order."""
    results = evaluate(lm, {"tasks": {"stories": task(output_type)}}, bootstrap_iters=None)
    samples = sorted(results["samples"]["stories"], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


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


def direct() -> LM:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float64)
    return HFLM(
        model, tokenizer=str(checkpoint_folder()), batch_size=1, device="cpu", dtype="float64", add_bos_token=True
    )


@pytest.mark.parametrize("options", [{"batch": 1}, {"batch": 4}, {"batch": 1, "num_concurrent": 4}])
def test_generated_texts_are_the_models_own(server: Running, options: dict[str, Any]) -> None:
    # A served text follows its prompt; lm-eval decodes new tokens alone, which drops the blank before the first word.
    over_http, own = found(served(server, **options), "generate_until"), found(direct(), "generate_until")
    assert [[text.lstrip() for text in each] for each in over_http] == own


def test_likelihoods_are_the_models_own(server: Running) -> None:
    over_http, own = found(served(server, 2), "multiple_choice"), found(direct(), "multiple_choice")
    for one, other in zip(over_http, own, strict=True):
        assert [greedy for _, greedy in one] == [greedy for _, greedy in other]
        assert [value for value, _ in one] == pytest.approx([value for value, _ in other], abs=1e-3)

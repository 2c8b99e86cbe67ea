"""What figures belong to: a model as it is here and now, and a draft as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from helpers import tiny
from helpers.profiles import GREEDY, profile_of
from selfspec.accept import TokenLevel
from selfspec.draft import Assistant, ExitHead
from selfspec.errors import BenchError, StudyError
from selfspec.model.early_head import DraftHead
from selfspec.tools.lab.drafts import Given, content
from selfspec.tools.lab.runs import Origin, told_apart


@torch.no_grad()
def _tuned(model: PreTrainedModel) -> None:
    model.model.layers[2].mlp.up_proj.weight[3] *= 1.1


def _rounded(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16).to(torch.float64)


def _in_float32(model: PreTrainedModel) -> None:
    model.float()


def _configured(model: PreTrainedModel) -> None:
    model.config.rms_norm_eps = 1e-3


def _ending(model: PreTrainedModel) -> None:
    model.generation_config.eos_token_id = [3, 4]


def _eager(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


def _on_more_threads(_: PreTrainedModel) -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


@pytest.mark.parametrize("change", [_tuned, _rounded, _in_float32, _configured, _ending, _eager, _on_more_threads])
def test_what_figures_depend_on_makes_another(change: Callable[[PreTrainedModel], None]) -> None:
    # Its weights are values of float32.
    model, threads = tiny.llama().float().double(), torch.get_num_threads()
    before = Origin.of(model)
    try:
        change(model)
        after = Origin.of(model)
    finally:
        torch.set_num_threads(threads)
    assert after.setting != before.setting
    assert (after.base == before.base) == (change not in (_tuned, _rounded))


def test_where_a_model_lies_makes_none(tmp_path: Path) -> None:
    model = tiny.llama()
    before = Origin.of(model)
    model.save_pretrained(tmp_path / "model")
    model.generate(tiny.prompt(4), max_new_tokens=2, do_sample=False)
    assert Origin.of(model) == before
    assert Origin.of(type(model).from_pretrained(tmp_path / "model", dtype=model.dtype)) == before


def test_weights_that_are_not_there_belong_to_nothing() -> None:
    with pytest.raises(BenchError, match="not in memory: load the model whole"):
        Origin.of(tiny.llama().to("meta"))


def test_models_of_one_name_are_called_by_their_weights() -> None:
    assert told_apart([("a", "1" * 20), ("b", "2" * 20), ("a", "3" * 20), ("a", "1" * 20)]) == {
        ("a", "1" * 20): "a 11111111",
        ("b", "2" * 20): "b",
        ("a", "3" * 20): "a 33333333",
    }


class Mild(TokenLevel):
    """A rule with a setting, which its name does not say."""

    def __init__(self, by: float) -> None:
        self.by = by


def _head(by: float) -> ExitHead:
    adapter = nn.Linear(2, 2)
    nn.init.constant_(adapter.weight, by)
    nn.init.zeros_(adapter.bias)
    return ExitHead(2, DraftHead(adapter, torch.tensor([1, 2, round(10 * by)])), "base")


@pytest.mark.parametrize(
    "made",
    [
        lambda by: Assistant(tiny.llama(seed=round(10 * by))),
        _head,
        Mild,
        lambda by: profile_of(tiny.llama(), replace(GREEDY, speedup=(by, by, by))),
    ],
)
def test_drafts_and_rules_of_one_name_are_told_apart(made: Callable[[float], Any]) -> None:
    assert content(made(0.5)) == content(made(0.5)) != content(made(0.7))


def test_two_of_one_name_are_not_studied_at_once() -> None:
    drafts = [Assistant(tiny.llama(seed=seed)) for seed in range(2)]
    with pytest.raises(StudyError, match="2 of what is given are called Assistant"):
        Given.of(drafts)

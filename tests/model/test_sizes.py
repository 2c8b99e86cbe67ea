"""Bytes of keys and values that passes read, and costs behind long texts."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.cache.view import CacheView, Window
from selfspec.control.costs import Costs, CostsOfReading
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import cache_bytes_read

TOKEN = 2 * 2 * 8 * 4
"""Bytes of a token's keys and values in one layer: two heads of eight numbers each, float32."""


@pytest.mark.parametrize(
    ("path", "tokens"),
    [
        (LayerPath.full(4), 4 * 100),
        (selfspec.drafts.EarlyExit(1).path(4), 100),
        (selfspec.drafts.LayerSkip(attention=[1], mlp=[2]).path(4), 3 * 100),
        (LayerPath(4, view=CacheView(Window(20, 4))), 4 * 24),
        (LayerPath(4, view=CacheView(Window(200, 4))), 4 * 100),
        # A quarter of the numbers, and a scale and a least number for each eight.
        (LayerPath(4, view=CacheView(bits=8)), 4 * 100 * (0.25 + 0.25)),
        (LayerPath(4, view=CacheView(Window(20, 4), bits=4)), 4 * 24 * (0.125 + 0.25)),
    ],
)
def test_a_pass_reads_what_its_path_attends_to(path: LayerPath, tokens: float) -> None:
    assert cache_bytes_read(tiny.llama().config, torch.float32, path, [100]) == tokens * TOKEN


def test_sliding_layers_read_their_window() -> None:
    config = tiny.qwen2().config
    assert config.layer_types.count("sliding_attention") == 2
    read = cache_bytes_read(config, torch.float32, LayerPath.full(4), [100])
    assert read == (2 * 100 + 2 * tiny.WINDOW) * TOKEN


def test_behind_long_texts_a_step_that_reads_all_of_them_is_no_longer_cheap(llama: PreTrainedModel) -> None:
    adapter = find_adapter(llama)
    costs = CostsOfReading(Costs(0.25, verify=1.1, widening=0.04, overhead=0.06, each_row=0.08), 1000)
    assert costs.in_batch(3) == costs.costs.in_batch(3)
    target = cache_bytes_read(llama.config, llama.dtype, LayerPath.full(4), [500])
    drafts = [selfspec.wrap(llama, name).draft for name in DRAFTS]
    reads = [
        draft.cache_bytes_read(llama, adapter, [500]) for draft in drafts if isinstance(draft, selfspec.drafts.Drafter)
    ]
    assert reads == [target, target * 24 / 500, 0]
    assert costs.behind(1000, 1000) == Costs(1.25 / 2, verify=1.05, widening=0.02, overhead=0.03, each_row=0.04)
    assert costs.behind(1000, 0).draft == 0.125


DRAFTS = ("int8", "int8+window:20", "lookup")


def test_generations_are_begun_with_the_costs_behind_their_prompts(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    inner = selfspec.CostAware.begin

    def noting(control: selfspec.CostAware, costs: Costs) -> object:
        found.append(costs.in_batch(1).draft)
        return inner(control, costs)

    monkeypatch.setattr(selfspec.CostAware, "begin", noting)
    spec = selfspec.wrap(llama, "int8")
    for length in (4, 90):
        spec.generate(tiny.prompt(length), max_new_tokens=2, do_sample=False)
    assert found[0] < found[1] < 1

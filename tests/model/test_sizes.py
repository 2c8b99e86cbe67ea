"""Bytes that passes read, of keys, values and experts, and their costs."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.shrunken import shrunken
from selfspec.cache.masks import Window
from selfspec.control.costs import Costs, CostsOfReading
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import Experts, bytes_read, cache_bytes_read, experts_of, share_read, widening

TOKEN = 2 * 2 * 8 * 4
"""Bytes of a token's keys and values in one layer: two heads of eight numbers each, float32."""


@pytest.mark.parametrize(
    ("path", "tokens"),
    [
        (LayerPath.full(4), 4 * 100),
        (selfspec.drafts.EarlyExit(1).path(4), 100),
        (selfspec.drafts.LayerSkip(attention=[1], mlp=[2]).path(4), 3 * 100),
        (LayerPath(4, window=Window(20, 4)), 4 * 24),
        (LayerPath(4, window=Window(200, 4)), 4 * 100),
    ],
)
def test_a_pass_reads_what_its_path_attends_to(path: LayerPath, tokens: int) -> None:
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


MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss", "granitemoe", "ernie4_5_moe")


def found_in(model: PreTrainedModel) -> list[Experts]:
    return experts_of(model, find_adapter(model))


@pytest.mark.parametrize("family", MIXTURES)
def test_families_route_to_two_of_four_experts(family: str) -> None:
    assert {(each.number, each.active) for each in found_in(shrunken(family))} == {(4, 2)}


def test_networks_without_routers_have_none(llama: PreTrainedModel) -> None:
    assert found_in(llama) == []
    assert widening(llama, find_adapter(llama)) == 0


def test_a_step_reads_the_experts_of_one_token() -> None:
    model = shrunken("mixtral")
    adapter, experts = find_adapter(model), sum(w.nbytes for each in found_in(model) for w in each.weights)
    looked_up = model.get_input_embeddings().weight.nbytes
    others = sum(weight.nbytes for weight in model.parameters()) - experts - looked_up
    assert bytes_read(model, adapter) == others + experts // 2
    depth = len(adapter.decoder_layers(model))
    assert share_read(model, adapter, LayerPath.full(depth)) == pytest.approx(1)


def test_further_tokens_of_a_pass_read_further_experts() -> None:
    weights = (torch.zeros(8, 3, 5),)
    experts = Experts(weights, 2)
    assert experts.share() == 0.25
    assert experts.share(tokens=2) == pytest.approx(1 - 0.75**2)
    model = shrunken("mixtral")
    wider = widening(model, find_adapter(model))
    of_all = sum(w.nbytes for each in found_in(model) for w in each.weights)
    assert wider == pytest.approx(of_all * (1 - 0.5**5 - 0.5) / 4 / bytes_read(model, find_adapter(model)))
    cpu = torch.device("cpu")
    assert Costs.assumed(0.2, cpu, wider).widening == pytest.approx(Costs.assumed(0.2, cpu).widening + wider)

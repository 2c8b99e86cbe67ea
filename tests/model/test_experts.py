"""Routed experts: fewer of them run like a model that was made with so few; what passes read."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers import tiny
from helpers.shrunken import shrunken
from selfspec.control.costs import Costs
from selfspec.errors import DraftConfigError
from selfspec.model.experts import Experts, experts_of
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import bytes_read, share_read, widening
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss", "granitemoe", "ernie4_5_moe")


def found_in(model: PreTrainedModel) -> list[Experts]:
    return experts_of(model, find_adapter(model))


@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_fewer_experts_run_as_in_a_model_made_with_so_few(family: str) -> None:
    model = shrunken(family)
    assert {(each.number, each.active) for each in found_in(model)} == {(4, 2)}
    config = deepcopy(model.config)
    name = "moe_k" if family == "ernie4_5_moe" else "num_experts_per_tok"
    assert getattr(config, name) == 2
    setattr(config, name, 1)
    made = AutoModelForCausalLM.from_config(config, dtype=model.dtype, experts_implementation="eager").eval()
    made.load_state_dict(model.state_dict())
    adapter, ids = find_adapter(model), tiny.prompt(9)
    cache = adapter.shared_cache(model, 1, 32, 0)
    path = LayerPath(len(adapter.decoder_layers(model)), experts=1)
    found = ModelRunner(model, adapter, cache).run(PassRequest(path, ids)).logits
    torch.testing.assert_close(found, made(ids).logits)
    assert not torch.allclose(found, model(ids).logits)


def test_networks_without_routers_have_none(llama: PreTrainedModel) -> None:
    assert found_in(llama) == []
    assert widening(llama, find_adapter(llama)) == 0
    cache = find_adapter(llama).shared_cache(llama, 1, 32, 0)
    with pytest.raises(DraftConfigError, match="no layer of LlamaForCausalLM"):
        ModelRunner(llama, find_adapter(llama), cache).run(PassRequest(LayerPath(4, experts=1), tiny.prompt(3)))


def test_a_step_reads_the_experts_of_one_token() -> None:
    model = shrunken("mixtral")
    adapter, experts = find_adapter(model), sum(w.nbytes for each in found_in(model) for w in each.weights)
    looked_up = model.get_input_embeddings().weight.nbytes
    others = sum(weight.nbytes for weight in model.parameters()) - experts - looked_up
    assert bytes_read(model, adapter) == others + experts // 2
    depth = len(adapter.decoder_layers(model))
    assert share_read(model, adapter, LayerPath.full(depth)) == pytest.approx(1)
    one = share_read(model, adapter, LayerPath(depth, experts=1))
    assert one == pytest.approx((others + experts / 4) / (others + experts / 2))


def test_further_tokens_of_a_pass_read_further_experts() -> None:
    weights = (torch.zeros(8, 3, 5),)
    experts = Experts(weights, 2)
    assert experts.share() == 0.25
    assert experts.share(most=1) == 0.125
    assert experts.share(tokens=2) == pytest.approx(1 - 0.75**2)
    model = shrunken("mixtral")
    wider = widening(model, find_adapter(model))
    of_all = sum(w.nbytes for each in found_in(model) for w in each.weights)
    assert wider == pytest.approx(of_all * (1 - 0.5**5 - 0.5) / 4 / bytes_read(model, find_adapter(model)))
    cpu = torch.device("cpu")
    assert Costs.assumed(0.2, cpu, wider).widening == pytest.approx(Costs.assumed(0.2, cpu).widening + wider)

"""What a model is made of: nothing is left out or counted twice, and costs are what a step would read."""

from __future__ import annotations

import pytest
import torch

import selfspec
from helpers import tiny
from helpers.saved_folders import checkpoint_folder
from selfspec.adapters import ADAPTERS
from selfspec.draft.early_exit import ExitAdapter
from selfspec.kernels import native
from selfspec.measure.summary import describe, describe_config
from selfspec.model.checkpoint import read_config
from selfspec.model.early_head import DraftHead
from selfspec.model.layer_path import LayerPath
from selfspec.model.sizes import share_read


def test_embedded_model_by_hand() -> None:
    anatomy = describe_config(read_config(str(checkpoint_folder())))
    assert (anatomy.model, anatomy.model_type, anatomy.dtype) == ("LlamaForCausalLM", "llama", "float32")
    assert (anatomy.width, anatomy.vocabulary, anatomy.context, anatomy.tied) == (64, 512, 512, True)
    layer = anatomy.layers[0]
    # Queries and output are 64 x 64; keys and values have 4 of the 8 heads.
    assert layer.attention.weights.parameters == 2 * 64 * 64 + 2 * 64 * 32
    assert (layer.attention.attribute, layer.attention.module) == ("self_attn", "LlamaAttention")
    assert layer.mlp.weights.parameters == 3 * 64 * 172
    assert layer.norms.parameters == 2 * 64
    assert anatomy.head.parameters == anatomy.embedding.parameters == 512 * 64
    assert anatomy.final_norm.bytes == 4 * 64
    assert anatomy.cache.bytes_per_token == 5 * 2 * 4 * 8 * 4
    each, ends = layer.weights.bytes, 4 * (512 * 64 + 64)
    assert anatomy.target_bytes_read == 5 * each + ends
    assert [choice.layer for choice in anatomy.exits] == [1, 2, 3, 4]
    assert anatomy.exits[1].cost_ratio == (2 * each + ends) / (5 * each + ends)


@pytest.mark.parametrize("tied", [True, False])
def test_substitutes_take_what_they_are_said_to(tied: bool) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 64}
    model = tiny.llama(**sizes, dtype=torch.float32, tie_word_embeddings=tied)
    for fewer, most in zip(describe(model).substitutes, (0.27, 0.16), strict=True):
        spec = selfspec.wrap(model, selfspec.drafts.LowPrecision(fewer.bits), draft_length=2)
        stats = spec.generate(tiny.prompt(5), max_new_tokens=8).stats
        assert stats.substitute_bytes == spec.substitutes.nbytes
        # The CPU kernels hold scales of 8 bits in float32, two bytes more for each output.
        more = 2 / 66 if native.available() and fewer.bits == 8 else 0.0
        assert fewer.bytes <= stats.substitute_bytes <= fewer.bytes * (1 + more)
        assert fewer.share == fewer.bytes / describe(model).total.bytes <= most


def test_a_tied_head_is_read_at_every_step_and_counted_once() -> None:
    untied, tied = describe(tiny.llama()), describe(tiny.llama(tie_word_embeddings=True))
    assert [choice.cost_ratio for choice in tied.exits] == [choice.cost_ratio for choice in untied.exits]
    assert untied.total.parameters - tied.total.parameters == untied.head.parameters
    assert tied.tied
    assert not untied.tied


def test_position_embeddings_are_looked_up_and_not_read() -> None:
    anatomy = describe(tiny.gpt2())
    assert anatomy.embedding.parameters == (tiny.VOCABULARY + tiny.CONTEXT) * 32
    assert anatomy.final_norm.parameters == 2 * 32


def test_cache_bytes_are_what_a_generation_allocates(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    output = selfspec.wrap(model).generate(tiny.prompt(70), max_new_tokens=10, do_sample=False)
    # 80 tokens need more than the smallest room, so the room is just what the call may fill.
    assert output.stats.cache_bytes == 80 * describe(model).cache.bytes_per_token


@pytest.mark.parametrize(("name", "sliding"), [("llama", 0), ("mistral", tiny.DEPTH), ("qwen2", tiny.DEPTH - 2)])
def test_sliding_windows(name: str, sliding: int) -> None:
    anatomy = describe(tiny.BUILDERS[name]())
    assert [layer.window for layer in anatomy.layers] == [None] * (tiny.DEPTH - sliding) + [tiny.WINDOW] * sliding
    assert anatomy.cache.sliding_layers == sliding


def test_a_configuration_says_as_much_as_the_model(architecture: str) -> None:
    model = tiny.BUILDERS[architecture](dtype=torch.bfloat16)
    model.config.dtype = torch.bfloat16
    assert describe_config(model.config) == describe(model)


def test_exits_cost_what_inspect_says(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    adapter = ADAPTERS[architecture]
    for choice in describe(model).exits:
        path = selfspec.drafts.EarlyExit(choice.layer).path(tiny.DEPTH)
        assert share_read(model, adapter, path) == pytest.approx(choice.cost_ratio)
    assert share_read(model, adapter, LayerPath.full(tiny.DEPTH)) == 1.0


def test_a_skip_set_saves_what_it_leaves_out() -> None:
    model, adapter = tiny.llama(), ADAPTERS["llama"]
    anatomy = describe(model)
    saved = anatomy.layers[1].attention.weights.bytes + anatomy.layers[2].mlp.weights.bytes
    path = selfspec.drafts.LayerSkip(attention=[1], mlp=[2]).path(tiny.DEPTH)
    assert share_read(model, adapter, path) == pytest.approx(1 - saved / anatomy.target_bytes_read)


def test_a_head_counts_with_the_rows_it_reads_and_the_adapter_before_it() -> None:
    model, adapter = tiny.llama(), ADAPTERS["llama"]
    path, anatomy = selfspec.drafts.EarlyExit(2).path(tiny.DEPTH), describe(model)
    own = ExitAdapter(model.config.hidden_size, 8)
    head = DraftHead(own, torch.arange(10))
    rows = anatomy.head.bytes * 10 // anatomy.vocabulary
    weights = sum(weight.numel() for weight in own.parameters()) * model.dtype.itemsize
    wanted = share_read(model, adapter, path) + (rows - anatomy.head.bytes + weights) / anatomy.target_bytes_read
    assert share_read(model, adapter, path, head) == pytest.approx(wanted)

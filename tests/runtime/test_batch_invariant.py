"""Passes that are batch-invariant: a token has the same bits alone, in a block, in a tree and in a batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.joints import padded
from helpers.shrunken import shrunken
from selfspec.cache.tree import Tree
from selfspec.errors import UnsupportedModelError, UnsupportedOptionError
from selfspec.kernels import native
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import find_adapter
from selfspec.runtime import BatchInvariant
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# No width is a multiple of a vector's, and heads of keys are shared by more than one.
SIZES = {"hidden_size": 48, "intermediate_size": 76, "num_attention_heads": 6, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 3, "head_dim": 16, "vocab_size": 70}
TREE = Tree((-1, 0, 0, 1, 2, 4))


MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "olmoe")


@pytest.fixture(
    scope="module",
    params=[(name, dtype) for name in ("llama", *MIXTURES) for dtype in DTYPES],
    ids=lambda each: f"{each}",
)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return built(*request.param)


def built(name: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    return tiny.llama(**SIZES, dtype=dtype) if name == "llama" else shrunken(name, dtype, vocab_size=70, **options)


class Reading:
    """Rows of texts that are read into a cache, `blocks` of which follow the first ones."""

    def __init__(self, model: PreTrainedModel, begun: Sequence[Tensor]) -> None:
        adapter = find_adapter(model)
        self.cache = adapter.shared_cache(model, len(begun), 64, len(TREE))
        self.runner = ModelRunner(model, adapter, self.cache, view=BatchInvariant().viewed(model))
        self.path = LayerPath.full(len(adapter.decoder_layers(model)))
        counts = [len(each) for each in begun]
        with torch.no_grad():
            self.runner.prefill(nn.utils.rnn.pad_sequence(list(begun), batch_first=True), counts)
        self.cache.commit(counts)

    @torch.no_grad()
    def block(self, tokens: Tensor, tree: Tree | None = None) -> Tensor:
        """Logits of a block, `[rows, tokens]`, of which nothing is committed."""
        if tree is not None:
            self.cache.open(tree)
        return self.runner.run(PassRequest(self.path, tokens)).logits

    def one_by_one(self, tokens: Tensor) -> Tensor:
        """Logits of tokens of one row, each committed before the next is read."""
        found = []
        for token in tokens:
            found.append(self.block(token[None, None])[0])
            self.cache.commit([1])
        return torch.cat(found)


@pytest.mark.kernels
def test_bits_of_a_token_depend_on_nothing_that_is_read_with_it(
    model: PreTrainedModel, request: pytest.FixtureRequest
) -> None:
    texts = [tiny.prompt(length, seed=length, vocabulary=70)[0] for length in (11, 24, 17, 12)]
    begun, read = [text[:-6] for text in texts], [text[-6:] for text in texts]
    alone = [Reading(model, [one]).one_by_one(other) for one, other in zip(begun, read, strict=True)]
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(3)
    for one, other, expected in zip(begun, read, alone, strict=True):
        assert torch.equal(Reading(model, [one]).block(other[None])[0], expected)
    assert torch.equal(Reading(model, begun).block(torch.stack(read)), torch.stack(alone))
    # A node sees its ancestors, which lie apart.
    tokens = tiny.prompt(len(TREE) + 1, 1, seed=3, vocabulary=70)
    found = Reading(model, begun[:1]).block(tokens, TREE)[0]
    for node, path in enumerate(TREE.paths):
        of_path = tokens[0, [0, *(1 + each for each in path)]]
        assert torch.equal(found[node + 1], Reading(model, begun[:1]).one_by_one(of_path)[-1])


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("name", ["lookup+exit:2", "int8", "int4", "recycle"])
def test_text_with_a_draft_and_in_a_batch_is_plain_decodings_to_the_token(name: str, kind: str) -> None:
    runtime, model = BatchInvariant(), built(kind, torch.bfloat16, hidden_size=64)
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    length: Any = selfspec.FixedLength(4, nodes=9) if name == "recycle" else 4
    plain = selfspec.wrap(model, runtime=runtime)
    drafting = selfspec.wrap(model, name, draft_length=length, runtime=runtime, accept="coupled")
    prompts = [tiny.prompt(4 + seed, seed=seed, vocabulary=70) for seed in range(4)]

    def text(spec: selfspec.SelfSpeculative, ids: Tensor, mask: Tensor) -> Tensor:
        return spec.generate(ids, mask, do_sample=False, **options).sequences[:, ids.shape[1] :]

    alone = [text(plain, each, torch.ones_like(each)) for each in prompts]
    for each, expected in zip(prompts, alone, strict=True):
        assert torch.equal(text(drafting, each, torch.ones_like(each)), expected)
    ids, mask = padded(prompts)
    assert torch.equal(text(drafting, ids, mask), torch.cat(alone))
    drawn = (each.generate(ids, mask, seed=3, accept="coupled", **options).sequences for each in (plain, drafting))
    assert torch.equal(*drawn)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: tiny.llama(), "is in torch.float64; load it with dtype float32, bfloat16 or float16"),
        (lambda: tiny.llama(dtype=torch.float32, attention="eager"), "attn_implementation='sdpa'"),
        (lambda: tiny.gpt2(dtype=torch.float32), "is no plain linear layer"),
        (lambda: shrunken("mamba2", torch.float32), "layers with states"),
        (lambda: shrunken("gpt_oss", torch.float32), "is no plain linear layer"),
    ],
)
def test_a_model_that_is_not_known_to_keep_bits_is_refused(made: Callable[[], PreTrainedModel], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"BatchInvariant cannot run .*{re.escape(reason)}"):
        selfspec.wrap(made(), runtime=BatchInvariant())


@pytest.mark.kernels
def test_a_model_that_was_changed_is_refused_by_the_next_call() -> None:
    spec = selfspec.wrap(tiny.llama(dtype=torch.float32), runtime=BatchInvariant())
    spec.model.to(torch.float64)
    with pytest.raises(UnsupportedModelError, match="float64"):
        spec.generate(tiny.prompt(3), max_new_tokens=2)


def test_without_kernels_it_says_how_they_are_built(llama: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedOptionError, match="BatchInvariant needs"):
        selfspec.wrap(llama, runtime=BatchInvariant())


@pytest.mark.kernels
@pytest.mark.parametrize("width", [1, 7, 4000, 40000])
def test_functions_of_single_numbers_are_the_modules_own(width: int) -> None:
    states, module = torch.randn(2, 5, width), nn.SiLU()
    view = BatchInvariant().viewed(nn.Sequential(module))
    torch.testing.assert_close(view(states), module(states))


@pytest.mark.kernels
@pytest.mark.parametrize("sizes", [(6, 2, 20, 24), (50, 2, 7, 7), (3, 3, 64, 80)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_torchs(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    heads, shared, width, of_values = sizes
    queries, keys = torch.randn(2, heads, 5, width).to(dtype), torch.randn(2, shared, 11, width).to(dtype)
    values, mask = torch.randn(2, shared, 11, of_values).to(dtype), torch.rand(2, 1, 5, 11) < 0.7
    mask[..., 0] = True
    attend = native.attend_alone
    for sees in (mask, None):
        found = attend(queries, keys, values, sees, False, 0.3)
        exact = scaled_dot_product_attention(
            queries.double(), keys.double(), values.double(), sees, scale=0.3, enable_gqa=True
        )
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
        torch.testing.assert_close(found, exact.transpose(1, 2).to(dtype), rtol=tolerance, atol=tolerance)
    causal = attend(queries, keys[:, :, :5], values[:, :, :5], None, True, 0.3)
    below = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    assert torch.equal(causal, attend(queries, keys[:, :, :5], values[:, :, :5], below, False, 0.3))


@pytest.mark.kernels
def test_what_it_cannot_attend_to_is_refused() -> None:
    model = tiny.llama(dtype=torch.float32)
    attention = BatchInvariant().viewed(model).model.layers[0].self_attn
    states, tables = torch.randn(1, 2, 32), (torch.ones(1, 2, 8), torch.zeros(1, 2, 8))
    with pytest.raises(UnsupportedModelError, match="a mask that is added"):
        attention(states, tables, torch.zeros(1, 1, 2, 2))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedOptionError, match="leave autocast out"):
        attention(states, tables, None)

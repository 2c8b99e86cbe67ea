"""On a CUDA device: the same text as `model.generate` there, repeatable, in batches, and the model as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from device.stages import waits_of_rounds
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.captures import ticking
from selfspec.draft import Drafter
from selfspec.runtime.graph_cache import GraphCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEW = 40
DRAFTS = [
    None,
    selfspec.drafts.EarlyExit(2),
    selfspec.drafts.LayerSkip(attention=[1], mlp=[2]),
    selfspec.drafts.LowPrecision(),
    selfspec.drafts.LowPrecision(layers=[2, 3]),
    selfspec.drafts.PromptLookup(),
    selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(), selfspec.drafts.EarlyExit(2)),
]


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    # TF32 is off unless someone turns it on.
    assert torch.get_float32_matmul_precision() == "highest"
    return tiny.llama(dtype=request.param).to("cuda")


@pytest.mark.parametrize(
    "runtime", [selfspec.runtime.Eager(), selfspec.runtime.CudaGraphs(after=0, bucket=16)], ids=str
)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_greedy_text_is_the_models_own(
    model: PreTrainedModel, draft: Drafter | None, rows: int, runtime: selfspec.runtime.Runtime
) -> None:
    spec = selfspec.wrap(model, draft, draft_length=3, runtime=runtime)
    # Timed by the clock of the wall a graph could lose on a busy device.
    spec.programs = GraphCache(spec.runtime, ticking())
    for seed in range(3):
        prompts = tiny.prompt(7, seed=seed, batch=rows).to("cuda")
        expected = model.generate(prompts, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(spec.generate(prompts, max_new_tokens=NEW, do_sample=False).sequences, expected)
    assert spec.programs.proved or isinstance(runtime, selfspec.runtime.Eager)
    assert not spec.programs.refusals


def test_threads_on_streams_of_their_own_share_graphs(model: PreTrainedModel) -> None:
    spec = selfspec.wrap(
        model, selfspec.drafts.EarlyExit(2), draft_length=3, runtime=selfspec.runtime.CudaGraphs(after=0, bucket=16)
    )
    prompts = [tiny.prompt(7, seed=seed).to("cuda") for seed in range(4)]
    expected = [model.generate(prompt, max_new_tokens=NEW, do_sample=False).tolist() for prompt in prompts]

    def generated(prompt: Tensor) -> list[list[int]]:
        with torch.cuda.stream(torch.cuda.Stream()):
            tokens: list[list[int]] = spec.generate(prompt, max_new_tokens=NEW, do_sample=False).sequences.tolist()
        return tokens

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(generated, prompts)) == expected


@pytest.mark.parametrize(
    "runtime",
    [selfspec.runtime.Eager(), selfspec.runtime.Native(after=0), selfspec.runtime.CudaGraphs(after=0)],
    ids=str,
)
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_round_waits_for_the_device_when_it_commits_and_not_before(
    model: PreTrainedModel, do_sample: bool, runtime: selfspec.runtime.Runtime
) -> None:
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3, runtime=runtime)
    prompts = tiny.prompt(7).to("cuda")
    for _ in range(3):
        # Until programs are proved: to prove one means to wait.
        spec.generate(prompts, max_new_tokens=NEW, do_sample=do_sample, seed=1)
    begun = partial(spec.stream, prompts, max_new_tokens=NEW, do_sample=do_sample, seed=1)
    assert waits_of_rounds(begun, 1).value == 1.0


@pytest.mark.parametrize("draft", DRAFTS[1:], ids=str)
def test_coupled_drafts_change_no_token(model: PreTrainedModel, draft: Drafter) -> None:
    prompts = tiny.prompt(7, batch=2).to("cuda")
    plain, drafted = (
        selfspec.wrap(model, each, accept="coupled").generate(prompts, max_new_tokens=NEW, do_sample=True, seed=5)
        for each in (None, draft)
    )
    assert torch.equal(plain.sequences, drafted.sequences)


@pytest.mark.parametrize("runtime", [selfspec.runtime.Eager(), selfspec.runtime.CudaGraphs(after=0)], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_drafts_in_fewer_bits_change_no_token_and_are_accepted(bits: int, runtime: selfspec.runtime.Runtime) -> None:
    # Of sizes that the kernels take.
    large = tiny.llama(dtype=torch.float32, hidden_size=128, intermediate_size=256, vocab_size=64).to("cuda")
    spec = selfspec.wrap(large, selfspec.drafts.LowPrecision(bits), draft_length=3, runtime=runtime)
    spec.programs = GraphCache(spec.runtime, ticking())
    prompts = tiny.prompt(7).to("cuda")
    expected = large.generate(prompts, max_new_tokens=NEW, do_sample=False)
    for _ in range(3):
        out = spec.generate(prompts, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out.sequences, expected)
    assert spec.substitutes.nbytes > 0
    assert out.stats.acceptance_rate > 0.2
    assert not spec.programs.refusals


def test_a_model_on_one_device_runs_by_graphs_unless_something_else_is_asked_for(model: PreTrainedModel) -> None:
    spec, native = selfspec.wrap(model), selfspec.wrap(model, runtime=selfspec.runtime.Native())
    assert isinstance(spec.runtime, selfspec.runtime.CudaGraphs)
    prompts = tiny.prompt(7)
    expected = model.generate(prompts.to("cuda"), max_new_tokens=NEW, do_sample=False)
    # Moved by itself, and by its wrapper.
    model.to("cpu")
    assert torch.equal(spec.generate(prompts, max_new_tokens=NEW, do_sample=False).sequences, expected.cpu())
    assert isinstance(spec.runtime, selfspec.runtime.Native)
    assert isinstance(spec.to("cuda").runtime, selfspec.runtime.CudaGraphs)
    assert isinstance(native.runtime, selfspec.runtime.Native)
    assert torch.equal(spec.generate(prompts.to("cuda"), max_new_tokens=NEW, do_sample=False).sequences, expected)


def test_no_pass_meets_attention_that_plans_for_every_length(model: PreTrainedModel) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    seen: set[bool] = set()
    layer = model.model.layers[0]
    handle = layer.register_forward_pre_hook(lambda *_: seen.add(torch.backends.cuda.cudnn_sdp_enabled()))
    selfspec.wrap(model, selfspec.drafts.EarlyExit(2)).generate(tiny.prompt(7).to("cuda"), max_new_tokens=NEW)
    handle.remove()
    assert seen == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()

"""Measured costs against planted ones, by a clock that the model alone moves on; what a model is made of and reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.saved_folders import checkpoint_folder
from selfspec.adapters import ADAPTERS
from selfspec.control.costs import Costs
from selfspec.decode import loop
from selfspec.decode.batch import Batch
from selfspec.decode.judge import judge
from selfspec.draft import Draft, EarlyExit, LayerSkip
from selfspec.draft.early_exit import ExitAdapter
from selfspec.errors import DraftConfigError
from selfspec.kernels import native
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.estimate import Estimate
from selfspec.measure.summary import describe, describe_config
from selfspec.model.checkpoint import read_config
from selfspec.model.early_head import DraftHead
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import share_read

LAYER, HEAD, TOKEN = 1.0, 0.5, 0.25
"""Planted seconds: of a layer's or the head's pass over one token, and what a further token adds to it, relatively."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def planted(clock: Clock) -> PreTrainedModel:
    """A model whose layers and head take time by the clock."""
    model = tiny.llama()

    def takes(seconds: float) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
            states: Tensor = args[0] if args else kwargs["hidden_states"]
            clock.now += seconds * (1 + TOKEN * (states.shape[1] - 1))

        return hook

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(takes(LAYER), with_kwargs=True)
    model.lm_head.register_forward_hook(takes(HEAD), with_kwargs=True)
    return model


def _measured(model: PreTrainedModel, clock: Clock, **options: Any) -> MeasuredCosts:
    drafters = [EarlyExit(1), EarlyExit(3), LayerSkip(layers=[2])]
    return measure_costs(model, find_adapter(model), drafters, context=20, repeats=2, warm_up=1, clock=clock, **options)


def test_what_was_planted_is_measured(planted: PreTrainedModel, clock: Clock) -> None:
    costs = _measured(planted, clock)
    step = 4 * LAYER + HEAD
    # A single row is always in step.
    assert costs.out_of_step is costs.to_dict()["out_of_step"] is None
    assert costs.of("none").out_of_step == Costs(0.0).out_of_step
    assert costs.step_seconds.value == pytest.approx(step)
    assert {name: each.value for name, each in costs.draft.items()} == pytest.approx(
        {
            "none": 0.0,
            "exit:1": (LAYER + HEAD) / step,
            "exit:3": (3 * LAYER + HEAD) / step,
            "skip:layers=2": (3 * LAYER + HEAD) / step,
        }
    )
    assert {width: each.value for width, each in costs.verify["none"].items()} == pytest.approx(
        {width: 1 + TOKEN * (width - 1) for width in (1, 2, 3, 4, 5, 6, 8)}
    )
    # The last draft token alone goes up to the exit; the rest of the network reads the whole block.
    for name, layers in (("exit:1", 1), ("exit:3", 3), ("skip:layers=2", 2)):
        assert {width: each.value for width, each in costs.verify[name].items()} == pytest.approx(
            {
                width: (layers * LAYER + ((4 - layers) * LAYER + HEAD) * (1 + TOKEN * (width - 1))) / step
                for width in (2, 4, 8)
            }
        )


@pytest.mark.parametrize("slower", [1.5, 0.8])
def test_rows_at_different_places_are_timed_beside_rows_that_stand_alike(
    planted: PreTrainedModel, clock: Clock, slower: float
) -> None:
    def takes(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        if kwargs["attention_mask"] is not None and kwargs["input_ids"].shape == (4, 1):
            clock.now += (slower - 1) * (4 * LAYER + HEAD)

    planted.model.register_forward_hook(takes, with_kwargs=True)
    costs: Any = _measured(planted, clock, batch=4)
    assert costs.out_of_step.value == pytest.approx(slower)
    assert costs.of("exit:1").out_of_step == pytest.approx(max(slower, 1.0))
    assert costs.to_dict()["out_of_step"]["value"] == pytest.approx(slower)


def test_what_a_round_does_beside_passes_is_the_overhead(
    planted: PreTrainedModel, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    judging = {True: 0.7, False: 0.3}

    def slow(batch: Batch, draft: Draft, *others: Any) -> Any:
        clock.now += judging[draft.length > 0]
        return judge(batch, draft, *others)

    monkeypatch.setattr(loop, "judge", slow)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=clock))
    costs = _measured(planted, clock, lengths=(2,)).of("exit:1")
    step = 4 * LAYER + HEAD + judging[False]
    # What the formula makes of a round is what the round takes.
    passes = LAYER + (3 * LAYER + HEAD) * (1 + TOKEN * 2)
    assert costs.of_round(2, 2) * step == pytest.approx(2 * (LAYER + HEAD) + passes + judging[True])


@pytest.mark.tools
def test_the_text_and_the_model_are_left_alone(planted: PreTrainedModel, clock: Clock) -> None:
    before = planted.generation_config.to_dict()
    ids = tiny.prompt(8)
    expected = planted(input_ids=ids).logits
    state = torch.get_rng_state()
    _measured(planted, clock)
    assert torch.equal(torch.get_rng_state(), state)
    assert planted.generation_config.to_dict() == before
    assert torch.equal(planted(input_ids=ids).logits, expected)


def test_a_padding_token_in_the_prompt_is_a_token(planted: PreTrainedModel, clock: Clock) -> None:
    tokens = torch.randint(tiny.VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(0))
    planted.generation_config.pad_token_id = int(tokens[0, 10])
    assert _measured(planted, clock).context == 20
    # Of a longer context there is what the model has.
    costs = measure_costs(planted, find_adapter(planted), [EarlyExit(1)], context=4096, repeats=1, clock=clock)
    assert 1 <= costs.context < tiny.CONTEXT


def test_what_cannot_be_measured_is_refused() -> None:
    model = tiny.llama()
    with pytest.raises(DraftConfigError, match="no room to measure in"):
        measure_costs(model, find_adapter(model), [EarlyExit(1)], repeats=500)
    with pytest.raises(DraftConfigError, match="one name"):
        measure_costs(model, find_adapter(model), [EarlyExit(1), EarlyExit(1)])


@pytest.mark.parametrize(
    ("passes", "verify", "widening"),
    [({2: 1.25, 4: 1.05}, 1.15, 0.0), ({2: 1.0, 3: 1.0, 4: 1.0, 5: 4.0, 6: 4.0}, 0.5, 0.9)],
    ids=["noise does not make wide passes cheap", "a steep line does not make one token cheaper than nothing"],
)
def test_lines_through_noise_and_steps(passes: dict[int, float], verify: float, widening: float) -> None:
    estimates = {width: Estimate.of_median([value]) for width, value in passes.items()}
    one = Estimate.of_median([1.0])
    costs = MeasuredCosts(one, {"x": one}, {"x": estimates}, {"x": Estimate.of_median([-0.125])}, 1, 1, (1, 3)).of("x")
    assert costs == Costs(1.0, verify, costs.widening, -0.125)
    assert costs.widening == pytest.approx(widening)


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
    # Position embeddings are looked up, and not read.
    anatomy = describe(tiny.gpt2())
    assert anatomy.embedding.parameters == (tiny.VOCABULARY + tiny.CONTEXT) * 32
    assert anatomy.final_norm.parameters == 2 * 32


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
    # A head counts with the rows it reads and the adapter before it.
    path = selfspec.drafts.EarlyExit(2).path(tiny.DEPTH)
    own = ExitAdapter(model.config.hidden_size, 8)
    head = DraftHead(own, torch.arange(10))
    rows = anatomy.head.bytes * 10 // anatomy.vocabulary
    weights = sum(weight.numel() for weight in own.parameters()) * model.dtype.itemsize
    wanted = share_read(model, adapter, path) + (rows - anatomy.head.bytes + weights) / anatomy.target_bytes_read
    assert share_read(model, adapter, path, head) == pytest.approx(wanted)

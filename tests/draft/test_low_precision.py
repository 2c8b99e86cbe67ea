"""Drafts with less of the weights: in fewer bits, with fewer experts, and with fewer rows of the head."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import selfspec
from helpers import tiny
from helpers.captures import Again, StandIn, ticking
from helpers.drafting import assert_alike, rounds_of
from helpers.saved_folders import checkpoint_folder
from helpers.shrunken import shrunken
from selfspec.cache.shared_cache import SharedCache
from selfspec.control.profile import uncalibrated_draft
from selfspec.draft import EarlyExit, ExitHead, LayerSkip, LowPrecision, ReducedVocabulary
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError, UnsupportedOptionError
from selfspec.formats.format import Format
from selfspec.formats.int4 import Int4, Int4Linear
from selfspec.formats.int8 import Int8, Int8Linear
from selfspec.formats.packed import PackedExperts, PackedLinear
from selfspec.kernels import native
from selfspec.measure.teacher_forced import DraftPath
from selfspec.model.identity import fingerprint
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.registry import find_adapter
from selfspec.model.substitutes import Substitutes
from selfspec.runtime import Runtime
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner
from selfspec.tools.train.corpus import count_vocabulary, most_frequent
from selfspec.tools.train.lesson import ExitHeads

EIGHT, FOUR = Int8(), Int4()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Large enough for the kernels."""
    return tiny.llama(num_hidden_layers=5, hidden_size=64, intermediate_size=128, dtype=torch.float32)


def other_layers(model: PreTrainedModel) -> None:
    for child in model.model.layers.modules():
        if type(child) is nn.Linear:
            child.__class__ = Other


def quantised(model: PreTrainedModel) -> None:
    other_layers(model)
    model.config.quantization_config = {"quant_method": "gptq"}


def elsewhere(model: PreTrainedModel) -> None:
    model.__class__ = type("Elsewhere", (type(model),), {"device": torch.device("mps")})


@pytest.mark.parametrize(
    ("draft", "change", "match"),
    [
        ("int4", other_layers, r"no layer .* in 4 bits.*draft with"),
        ("lookup+int8", other_layers, r"no layer .* in 8 bits.*draft with"),
        (selfspec.drafts.LowPrecision(format=Int4(256)), None, r"groups of 256 divide.*group_size=32"),
        ("int8", quantised, r"quantised already.*draft with PromptLookup\(\) or an exit"),
        ("int8+exit:2", quantised, "quantised already"),
        ("int8", elsewhere, "no kernels for low-precision drafts on mps; use cpu or cuda"),
    ],
)
def test_models_that_cannot_be_in_fewer_bits_are_refused(
    model: PreTrainedModel, draft: Any, change: Any, match: str
) -> None:
    """When they are wrapped, before any pass; `auto` uses plain decoding."""
    own = copy.deepcopy(model)
    if change is not None:
        change(own)
    own.forward = None
    with pytest.raises(DraftConfigError, match=match):
        selfspec.wrap(own, draft, draft_length=3)
    if change is not None:
        assert uncalibrated_draft(own) is None


def test_layers_that_change_their_kind_later_are_refused(model: PreTrainedModel) -> None:
    own = copy.deepcopy(model)
    spec = selfspec.wrap(own, selfspec.drafts.LowPrecision(4), draft_length=3)
    other_layers(own)
    with pytest.raises(DraftConfigError, match=r"no layer .* in 4 bits.*draft with"):
        spec.generate(tiny.prompt(9), max_new_tokens=8)


class Other(nn.Linear):
    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states.round(decimals=1), self.weight, self.bias)


class Own(nn.Linear):
    """A layer that multiplies in words of its own."""

    def forward(self, states: Tensor) -> Tensor:
        product = states @ self.weight.T
        return product if self.bias is None else product + self.bias


class Scaled(Own):
    """A layer that reads more than its weight and its bias."""

    def forward(self, states: Tensor) -> Tensor:
        factor: float = vars(self)["factor"]
        return super().forward(states) * factor


@pytest.mark.parametrize(("kind", "known"), [(Own, True), (Other, False), (Scaled, False)])
@pytest.mark.parametrize("bits", [8, 4])
def test_linear_layers_of_a_models_own_are_known_by_what_they_compute(
    model: PreTrainedModel, kind: type[nn.Linear], known: bool, bits: int
) -> None:
    own: Any = copy.deepcopy(model)
    for child in own.model.layers.modules():
        if type(child) is nn.Linear:
            child.__class__ = kind
            child.__dict__["factor"] = 2.0
    if not known:
        with pytest.raises(DraftConfigError, match="no layer"):
            selfspec.wrap(own, selfspec.drafts.LowPrecision(bits, head=False), draft_length=3)
        return
    ids = tiny.prompt(9)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    found, wanted = (
        selfspec.wrap(each, f"int{bits}", draft_length=3).generate(ids, **options) for each in (own, model)
    )
    assert torch.equal(found.sequences, wanted.sequences)
    assert found.stats.substitute_bytes == wanted.stats.substitute_bytes > 0


def test_what_was_quantised_in_its_file_alone_has_fewer_bits(model: PreTrainedModel) -> None:
    """As a GGUF file that is read is: the config says what the file was, and the layers are in floating point."""
    own = copy.deepcopy(model)
    own.config.quantization_config = {"quant_method": "gguf"}
    for draft in ("int8", "int4", "lookup+int8"):
        assert selfspec.wrap(own, draft, draft_length=3).generate(tiny.prompt(9), max_new_tokens=8).stats.drafted


KINDS = pytest.mark.parametrize(
    ("kind", "format", "off", "share"), [(Int8Linear, Int8(), 0.02, 0.27), (Int4Linear, Int4(), 0.15, 0.19)]
)


@KINDS
@pytest.mark.parametrize("biased", [True, False])
def test_products_are_near_the_layers_own(kind: Any, format: Any, off: float, share: float, biased: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 96, bias=biased)
    low = kind(format.pack(layer.weight), layer.bias, layer.weight.dtype)
    states = torch.randn(2, 3, 256)
    error = (low(states) - layer(states)).abs().mean() / layer(states).abs().mean()
    assert low(states).shape == (2, 3, 96)
    assert 0 < error < off
    assert low.nbytes < layer.weight.nbytes * share


@KINDS
@torch.no_grad()
def test_each_output_and_each_group_has_a_scale_of_its_own(kind: Any, format: Any, off: float, share: float) -> None:
    """Weights far from zero, some outputs and inputs much larger than others."""
    weight = (torch.rand(96, 64) + 1.0) * torch.logspace(0, 2, 96)[:, None]
    if kind is Int4Linear:
        weight[:, 32:] *= 50.0
    states = torch.eye(64)
    error = (kind(format.pack(weight), None, weight.dtype)(states) - states @ weight.t()).abs() / weight.t()
    assert error.max() < off


def test_substitutes_are_made_once_and_of_another_weight_again(model: PreTrainedModel) -> None:
    substitutes, layer = Substitutes(), nn.Linear(64, 96)
    first = substitutes.within(layer, "up", EIGHT)
    assert substitutes.within(layer, "up", EIGHT) is first
    assert substitutes.within(layer, "up", FOUR) is not first
    assert substitutes.nbytes > 0
    layer.weight.data = layer.weight.data.clone()
    second = substitutes.within(layer, "up", EIGHT)
    assert second is not first
    layer.bias = nn.Parameter(torch.ones(96))
    third = substitutes.within(layer, "up", EIGHT)
    assert third is not second
    torch.testing.assert_close(third(torch.zeros(1, 64)), torch.ones(1, 96))


@pytest.mark.parametrize("format", [EIGHT, FOUR])
def test_a_head_is_rounded_as_it_is_and_layers_by_the_size_of_their_columns(format: Format) -> None:
    torch.manual_seed(0)
    sizes = torch.randn(64).exp()
    layer, states = nn.Linear(64, 96, bias=False), torch.randn(3, 64) / sizes
    layer.weight.data *= sizes
    substitutes = Substitutes(head="head")
    up, head = (substitutes.within(layer, name, format) for name in ("up", "head"))
    assert isinstance(up, PackedLinear)
    assert isinstance(head, PackedLinear)
    torch.testing.assert_close(up.factors, layer.weight.norm(dim=0) / layer.weight.norm(dim=0).mean())
    assert isinstance(head.factors, torch.Tensor)
    assert (head.factors == 1).all()
    wanted = layer(states)
    assert (up(states) - wanted).norm() < 0.5 * (head(states) - wanted).norm()
    torch.testing.assert_close(up(states), states @ up.weight.t(), rtol=0.05, atol=0.05)


@torch.no_grad()
def counted(layer: nn.Linear) -> None:
    layer.weight.mul_(2.0)


def uncounted(layer: nn.Linear) -> None:
    """As PEFT merges an adapter, and as older training loops write."""
    layer.weight.data.mul_(2.0)


@pytest.mark.parametrize("change", [counted, uncounted])
@pytest.mark.parametrize(
    "make", [nn.Linear, lambda inputs, outputs: Conv1D(outputs, inputs)], ids=["linear", "columns"]
)
@pytest.mark.parametrize("format", [EIGHT, FOUR])
def test_a_substitute_follows_a_weight_that_changes_where_it_is(format: Format, make: Any, change: Any) -> None:
    substitutes, layer = Substitutes(), make(64, 96)
    first = substitutes.within(layer, "up", format)
    states, bias = torch.randn(3, 64), layer.bias.detach().clone()
    torch.testing.assert_close(first(states), layer(states), rtol=0.2, atol=0.1)
    before = first(states) - bias
    assert substitutes.unchanged([(layer, "up")], format) == {"up"}
    change(layer)
    assert not substitutes.unchanged([(layer, "up")], format)
    assert substitutes.within(layer, "up", format) is first
    torch.testing.assert_close(first(states) - bias, 2 * before)
    assert torch.equal(layer.bias, bias)


@torch.no_grad()
def test_a_substitute_follows_a_single_value() -> None:
    substitutes, layer = Substitutes(), nn.Linear(64, 96)
    first = substitutes.within(layer, "up", EIGHT)
    layer.weight[3, 40] += 1.0
    assert substitutes.within(layer, "up", EIGHT) is first
    torch.testing.assert_close(first(torch.eye(64))[40, 3], layer.weight[3, 40] + layer.bias[3], rtol=0, atol=0.02)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "change", "runtime"),
    [("int8", uncounted, Again()), ("int4", counted, StandIn(0, bucket=8))],
    ids=["again", "graphs"],
)
def test_recorded_drafts_follow_weights_that_change_where_they_are(name: str, change: Any, runtime: Runtime) -> None:
    """Programs of draft steps, proved before a change, draft as well after it."""
    stock, prompts = tiny.llama(dtype=torch.float32), tiny.prompt(9)
    spec = selfspec.wrap(stock, name, draft_length=3, runtime=runtime)
    spec.programs = GraphCache(spec.runtime, ticking())
    spec.generate(prompts, max_new_tokens=32, do_sample=False)
    drafting = [kind for kind in spec.programs.proved if kind.path.format is not None]
    assert drafting
    for layer in stock.modules():
        if type(layer) is nn.Linear:
            change(layer)
    output = spec.generate(prompts, max_new_tokens=32, do_sample=False)
    assert set(drafting) <= set(spec.programs.proved)
    assert torch.equal(output.sequences, stock.generate(prompts, max_new_tokens=32, do_sample=False))
    anew = selfspec.wrap(stock, name, draft_length=3).generate(prompts, max_new_tokens=32, do_sample=False)
    assert output.stats.accepted_per_depth == anew.stats.accepted_per_depth


@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode_may_come_and_go(inside: bool) -> None:
    substitutes, layer = Substitutes(), nn.Linear(64, 96)
    with torch.inference_mode(inside):
        first = substitutes.within(layer, "up", EIGHT)
    counted(layer)
    with torch.inference_mode(not inside):
        assert substitutes.within(layer, "up", EIGHT) is first


def test_a_model_made_in_inference_mode_drafts() -> None:
    with torch.inference_mode():
        stock, prompts = tiny.llama(dtype=torch.float32), tiny.prompt(9)
    spec = selfspec.wrap(stock, selfspec.drafts.LowPrecision(), draft_length=3)
    assert_alike(spec, inputs=prompts, max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("format", [EIGHT, FOUR])
def test_modules_that_look_at_a_weight_see_the_rounded_one(format: Format) -> None:
    layer = nn.Linear(64, 96)
    substitute = Substitutes().within(layer, "read", format)
    weight = substitute.weight
    assert isinstance(weight, torch.Tensor)
    assert (weight.shape, weight.dtype, weight.device) == (layer.weight.shape, layer.weight.dtype, layer.weight.device)
    assert not torch.equal(weight, layer.weight)
    torch.testing.assert_close(weight.clone(), layer.weight, rtol=0, atol=0.02)
    sizes: Any = (substitute.in_features, substitute.out_features)
    assert sizes == (64, 96)


def test_a_module_that_asks_for_a_dtype_has_no_weight_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's MLP compares the dtype of its states with that of a weight at every call."""
    substitute = Substitutes().within(nn.Linear(64, 96), "asked", EIGHT)
    monkeypatch.setattr(type(substitute), "join", lambda _: pytest.fail("the weight was made"))
    weight = substitute.weight
    assert isinstance(weight, torch.Tensor)
    assert weight.dtype == torch.float32


EXPERTS = {"mixtral": "mlp.experts", "gpt_oss": "mlp.experts", "nemotron_h": "mixer.experts"}


@pytest.mark.parametrize("format", [EIGHT, FOUR])
@pytest.mark.parametrize("model_type", EXPERTS)
@torch.no_grad()
def test_experts_give_what_they_gave(model_type: str, format: Format) -> None:
    """Gated ones, ones with biases whose weights lie by columns, ones without a gate."""
    stock = shrunken(model_type, torch.float32, intermediate_size=64, moe_intermediate_size=64)
    experts = next(module for name, module in stock.named_modules() if name.endswith(EXPERTS[model_type]))
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.2)
    substitute = Substitutes().within(experts, "experts", format)
    assert isinstance(substitute, PackedExperts)
    shares = torch.rand(7, 4).softmax(-1)
    given = torch.randn(7, 32), shares.topk(2).indices, shares.topk(2).values
    wanted, found = experts(*given), substitute(*given)
    assert 0 < (found - wanted).norm() / wanted.norm() < (0.03 if format is EIGHT else 0.25)
    assert substitute.nbytes < 0.3 * sum(weight.nbytes for weight in experts.parameters())
    # Nothing holds the weights themselves.
    assert not {id(weight) for weight in substitute.parameters()} & {id(weight) for weight in experts.parameters()}
    assert not any("proj" in name for name in dict(substitute.named_parameters()))


def test_a_mixture_is_priced_by_what_runs_in_fewer_bits() -> None:
    costs = {}
    for model_type in ("mixtral", "llama4_text"):
        stock = shrunken(model_type, torch.float32)
        costs[model_type] = selfspec.drafts.LowPrecision().cost(stock, selfspec.wrap(stock).adapter)
    assert costs["mixtral"] < 0.3
    # Experts of its own kind, half of which a step reads, run exactly.
    assert costs["llama4_text"] > 0.6


def test_what_no_kernel_takes_runs_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    odd = nn.Linear(7, 5)
    assert Substitutes().within(odd, "odd", FOUR) is odd
    # With 172 inputs ATen's kernel for 8 bits ends the process, with 24 it is wrong.
    for inputs in (172, 24):
        odd = nn.Linear(inputs, 8)
        assert Substitutes().within(odd, "odd", EIGHT) is odd


@torch.no_grad()
def test_the_target_keeps_its_weights(model: PreTrainedModel) -> None:
    """The same bits from the full model after draft steps in fewer bits, its head among them."""
    depth, block = len(model.model.layers), tiny.prompt(4, seed=1)

    def last_logits(*paths: LayerPath) -> torch.Tensor:
        cache = SharedCache(depth, 1, limit=20, slack=4, device=torch.device("cpu"))
        runner = ModelRunner(model, find_adapter(model), cache)
        return [runner.run(PassRequest(path, block)).logits for path in paths][-1]

    low, full = selfspec.drafts.LowPrecision().path(depth), LayerPath.full(depth)
    assert not torch.equal(last_logits(low), last_logits(full))
    assert torch.equal(last_logits(low, full), last_logits(full))


def test_verification_resumes_where_substitutes_begin() -> None:
    path = selfspec.drafts.LowPrecision(8, layers=[2, 4]).path(5)
    assert path.resume_point == Sublayer(2, Part.ATTENTION)
    assert selfspec.drafts.LowPrecision().path(5).resume_point is None
    assert min(selfspec.drafts.LowPrecision(fewer=EarlyExit(3)).path(5).skipped) == Sublayer(3, Part.ATTENTION)
    assert path.runs(Sublayer(3, Part.MLP))
    assert LayerPath.full(5).format is None


def test_its_cost_is_that_of_the_bytes_it_reads(model: PreTrainedModel) -> None:
    adapter = selfspec.wrap(model).adapter
    eight, four = (selfspec.drafts.LowPrecision(bits).cost(model, adapter) for bits in (8, 4))
    assert eight == pytest.approx(0.25, abs=0.02)
    assert four == pytest.approx(0.125, abs=0.02)
    assert selfspec.drafts.LowPrecision(fewer=EarlyExit(2)).cost(model, adapter) < eight


def test_it_cannot_be_teacher_forced() -> None:
    with pytest.raises(UnsupportedOptionError, match="fewer bits"):
        DraftPath(selfspec.drafts.LowPrecision().path(5))


_KEPT = tuple(range(1, 50, 3))


@pytest.mark.parametrize("inner", [EarlyExit(2), LayerSkip(attention=[1], mlp=[2])])
def test_greedy_text_is_the_models_own_and_drafts_stay_inside(architecture: str, inner: LayerPathDrafter) -> None:
    model = tiny.BUILDERS[architecture]()
    ids = tiny.prompt(7)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    spec = selfspec.wrap(model, draft=ReducedVocabulary(inner, _KEPT), draft_length=4)
    rounds = rounds_of(spec, ids, 20)
    assert [token for row in rounds for token in row.tokens] == expected[0, 7:].tolist()
    assert {token for row in rounds for token in row.draft} <= set(_KEPT)


def test_the_whole_vocabulary_in_another_order_changes_nothing() -> None:
    drafters = (EarlyExit(2), ReducedVocabulary(EarlyExit(2), tuple(reversed(range(tiny.VOCABULARY)))))
    specs = (selfspec.wrap(tiny.gpt2(), draft=drafter, draft_length=4) for drafter in drafters)
    one, other = (rounds_of(spec, tiny.prompt(5), 15) for spec in specs)
    assert one == other


def test_an_exit_head_may_have_fewer_rows_too(tmp_path: Path) -> None:
    model = tiny.llama()
    ExitHeads(32, 8, (2,)).save(tmp_path, torch.float32, fingerprint(model), 2, {})
    drafter = ReducedVocabulary(ExitHead.from_pretrained(tmp_path), _KEPT)
    rounds = rounds_of(selfspec.wrap(model, draft=drafter, draft_length=4), tiny.prompt(5), 9)
    assert {token for row in rounds for token in row.draft} <= set(_KEPT)
    with pytest.raises(selfspec.errors.ExitHeadError):
        selfspec.wrap(tiny.llama(seed=1), draft=drafter, draft_length=4)


def test_the_most_frequent_tokens_are_counted() -> None:
    assert most_frequent(torch.tensor([[3, 3, 3, 7], [7, 1, 0, 3]]), 2, 10).tolist() == [3, 7]
    with pytest.raises(selfspec.errors.TrainingError, match="out of range"):
        most_frequent(torch.zeros(1, 1, dtype=torch.long), 11, 10)


def test_a_vocabulary_comes_back_from_its_file(tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "v.json"
    text.write_text("Once upon a time there was a little girl. She was happy and she was little.\n" * 9)
    coverage = count_vocabulary(str(checkpoint_folder()), [text], 8, file)
    tokens = ReducedVocabulary.from_file(EarlyExit(1), file).tokens
    ids = AutoTokenizer.from_pretrained(checkpoint_folder())(text.read_text()).input_ids
    assert len(tokens) == 8
    assert coverage == pytest.approx(sum(map(ids.count, tokens)) / len(ids))
    assert coverage == json.loads(file.read_text())["coverage"]
    with pytest.raises(selfspec.errors.TrainingError, match="exists"):
        count_vocabulary(str(checkpoint_folder()), [text], 8, file)


@pytest.mark.parametrize(
    "content", ["{", "[1]", *(json.dumps({"tokens": tokens}) for tokens in (3, ["a"], [1, 10**30]))]
)
def test_a_file_that_is_no_vocabulary_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "v.json").write_text(content)
    with pytest.raises(DraftConfigError):
        ReducedVocabulary.from_file(EarlyExit(1), tmp_path / "v.json")


def test_rows_in_fewer_bits_are_kept_and_follow_the_head() -> None:
    model, ids = tiny.llama(dtype=torch.float32), tiny.prompt(7)
    spec = selfspec.wrap(model, draft=ReducedVocabulary(LowPrecision(), _KEPT))
    whole = selfspec.wrap(model, draft=LowPrecision())

    def drafted() -> set[int]:
        rounds = rounds_of(spec, ids, 20)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert [token for row in rounds for token in row.tokens] == expected[0, 7:].tolist()
        return {token for row in rounds for token in row.draft}

    assert drafted() <= set(_KEPT)
    kept = spec.generate(ids, max_new_tokens=4, do_sample=False).stats.substitute_bytes
    assert kept == spec.generate(ids, max_new_tokens=4, do_sample=False).stats.substitute_bytes
    assert kept < whole.generate(ids, max_new_tokens=4, do_sample=False).stats.substitute_bytes
    with torch.no_grad():
        model.lm_head.weight[:] = 0
        model.lm_head.weight[4] = model.model.norm.weight
    # All else has the same logit, and no draft is of another token.
    assert drafted() <= {1, 4}

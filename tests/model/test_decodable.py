"""Models are decoded by the adapter of their language model, or refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from helpers.shrunken import pictured, shrunken
from selfspec import api
from selfspec.adapters import ADAPTERS
from selfspec.architecture import Adapter
from selfspec.cache.masks import unknown_layer_types
from selfspec.errors import UnsupportedModelError
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.summary import describe, describe_config
from selfspec.model.decodable import check_decodable
from selfspec.model.gated_view import FeatureTap
from selfspec.model.registry import find_adapter


def test_layers_on_several_devices_are_refused(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands for a weight on a device that this machine lacks.
    elsewhere = SimpleNamespace(device=torch.device("cuda:1"))
    monkeypatch.setitem(llama.model.norm._parameters, "weight", elsewhere)
    with pytest.raises(UnsupportedModelError, match=r"lie on cpu and cuda:1.*tp_plan"):
        check_decodable(llama, find_adapter(llama))


@pytest.mark.parametrize("draft", [None, "int8"])
@pytest.mark.parametrize("kept", [None, torch.int8], ids=["packed", "integers"])
def test_what_a_library_makes_before_the_first_pass_is_made(
    llama: PreTrainedModel, kept: torch.dtype | None, draft: str | None
) -> None:
    expected = llama.generate(tiny.prompt(5), max_new_tokens=8, do_sample=False)
    dense = {module: module._parameters["weight"] for module in llama.model.modules() if type(module) is nn.Linear}
    for module in dense:
        weight = None if kept is None else nn.Parameter(module.weight.to(kept), requires_grad=False)
        module._parameters["weight"] = weight

    def make(*_: object) -> None:
        made.remove()
        for module, weight in dense.items():
            module._parameters["weight"] = weight

    made = llama.register_forward_pre_hook(make)
    output = selfspec.wrap(llama, draft).generate(tiny.prompt(5), max_new_tokens=8, do_sample=False)
    assert torch.equal(output.sequences, expected)


def _layers(model: PreTrainedModel) -> Any:
    return model.get_submodule(".".join(find_adapter(model).path(model)))


def _cut(model: PreTrainedModel) -> None:
    del _layers(model)[3:]


def _cut_and_said(model: PreTrainedModel) -> None:
    _cut(model)
    model.config.num_hidden_layers = 3


def _without_one(model: PreTrainedModel) -> None:
    del _layers(model)[1]


def _numbered_anew(model: PreTrainedModel) -> None:
    _without_one(model)
    for place, layer in enumerate(_layers(model)):
        for module in layer.modules():
            for name in {"layer_idx", "layer_id"} & vars(module).keys():
                setattr(module, name, place)
    model.config.num_hidden_layers = 3


def _in_another_order(model: PreTrainedModel) -> None:
    # Masks go by the place: only layers of one kind can change places, in the stock model as well.
    layers = _layers(model)
    layers[0], layers[1] = layers[1], layers[0]


@pytest.mark.parametrize("draft", [None, "exit:1", "int8", "lookup"])
@pytest.mark.parametrize("wrapped", ["before", "after"])
@pytest.mark.parametrize("prune", [_cut, _cut_and_said, _numbered_anew, _in_another_order])
def test_models_pruned_in_memory_decode_as_they_are(
    architecture: str, prune: Callable[[PreTrainedModel], None], wrapped: str, draft: str | None
) -> None:
    model = tiny.BUILDERS[architecture]()
    spec = selfspec.wrap(model, draft, draft_length=3) if wrapped == "before" else None
    if spec is not None:
        spec.generate(tiny.prompt(9), max_new_tokens=4)
    prune(model)
    spec = spec or selfspec.wrap(model, draft, draft_length=3)
    assert_alike(spec, inputs=tiny.prompt(9), max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("wrapped", ["before", "after"])
@pytest.mark.parametrize(
    ("prune", "said"),
    [
        (_without_one, "layer_idx=.*there are 3 layers"),
        (lambda model: operator.setitem(_layers(model), 2, _layers(model)[1]), r"layer_idx=.*as [\w.]+\.1;"),
        (lambda model: setattr(model.config, "num_hidden_layers", 2), r"num_hidden_layers=2, and [\w.]+ has 4 layers"),
    ],
)
def test_layers_without_a_place_in_the_cache_are_refused(
    architecture: str, prune: Callable[[PreTrainedModel], None], said: str, wrapped: str
) -> None:
    model = tiny.BUILDERS[architecture]()
    spec = selfspec.wrap(model, "exit:1") if wrapped == "before" else None
    prune(model)
    with pytest.raises(UnsupportedModelError, match=said):
        (spec or selfspec.wrap(model, "exit:1")).generate(tiny.prompt(9), max_new_tokens=4)


PROMPT = 7
OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


def test_a_compiled_model_is_wrapped_by_what_is_inside(llama: PreTrainedModel) -> None:
    wanted = llama.generate(tiny.prompt(PROMPT), **OPTIONS)
    compiled: Any = torch.compile(llama, backend="eager")
    spec = selfspec.wrap(compiled, selfspec.drafts.EarlyExit(2), draft_length=3)
    assert spec.model is llama
    assert torch.equal(spec.generate(tiny.prompt(PROMPT), **OPTIONS).sequences, wanted)
    assert torch.equal(compiled.generate(tiny.prompt(PROMPT), custom_generate=spec, **OPTIONS), wanted)


def quantised(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=dtype)


def test_dynamic_quantisation_to_8_bits_is_refused() -> None:
    model = tiny.llama(dtype=torch.float32)
    early = selfspec.wrap(model, selfspec.drafts.EarlyExit(2))
    with pytest.raises(UnsupportedModelError, match=r"q_proj is a .*dynamic.*by the largest of all"):
        selfspec.wrap(quantised(model, torch.qint8), selfspec.drafts.EarlyExit(2))
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
    with pytest.raises(UnsupportedModelError, match=r"quantise the weights alone"):
        early.generate(tiny.prompt(PROMPT), **OPTIONS)


class Rounding(nn.Linear):
    """Rounds its inputs to 8 bits as libraries of quantised layers do, with one scale for these dimensions."""

    over: tuple[int, ...] = (-1,)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(self.over, keepdim=True) / 127
        return super().forward((x / scale).round() * scale)


@pytest.mark.parametrize(("over", "refused"), [((-1,), False), ((-1, -2), True), ((-1, -2, -3), True)])
def test_layers_of_any_library_that_round_by_other_tokens_are_refused(over: tuple[int, ...], refused: bool) -> None:
    model = tiny.llama(dtype=torch.float32)
    linear = model.model.layers[1].mlp.down_proj
    linear.__class__, linear.over = Rounding, over
    if refused:
        with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.down_proj is a .*Rounding.*of all"):
            selfspec.wrap(model)
    else:
        assert_alike(selfspec.wrap(model, "exit:2", draft_length=3), inputs=tiny.prompt(PROMPT), **OPTIONS)


class Outliers(nn.Linear):
    """Rounds its inputs to 8 bits, but those at places where some token is large, as LLM.int8() does."""

    def forward(self, x: Tensor) -> Tensor:
        large = (x.abs() > 6).flatten(0, -2).any(0)
        scale = x.masked_fill(large, 0).abs().amax(-1, keepdim=True) / 127
        return super().forward(torch.where(large, x, (x / scale).round() * scale))


def test_layers_that_round_less_beside_large_tokens_are_refused() -> None:
    model = tiny.llama(dtype=torch.float32)
    model.model.layers[1].mlp.down_proj.__class__ = Outliers
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.down_proj is a .*Outliers.*changes with"):
        selfspec.wrap(model)


def test_dynamic_quantisation_to_16_bits_is_decoded() -> None:
    model = quantised(tiny.llama(dtype=torch.float32), torch.float16)
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    assert_alike(spec, inputs=tiny.prompt(PROMPT, 2), **OPTIONS)
    assert spec.generate(tiny.prompt(PROMPT, 2), **OPTIONS).stats.drafted > 0


SHORT: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize(
    ("model_type", "inside", "layers"),
    [
        ("llava", "llama", "model.language_model.layers"),
        ("idefics3", "llama", "model.text_model.layers"),
        # Its language model is inside with its head.
        ("llama4", "llama4_text", "language_model.model.layers"),
        ("fuyu", "persimmon", "model.language_model.layers"),
        ("qwen3_5", "qwen3_5_text", "model.language_model.layers"),
    ],
)
def test_the_adapter_of_the_language_model_inside_is_used(model_type: str, inside: str, layers: str) -> None:
    model = shrunken(model_type, torch.float32, auto=AutoModelForMultimodalLM)
    found = find_adapter(model)
    assert (found.attention, found.mlp, found.layers) == (ADAPTERS[inside].attention, ADAPTERS[inside].mlp, layers)
    found.check(model)
    base = model.get_submodule(found.base(model))
    assert all(module is not model.get_output_embeddings() for module in base.modules())


def _stock(model: PreTrainedModel, prompts: Tensor, **inputs: Tensor) -> Tensor:
    """The stock model's text; the test is skipped where its own `generate` is broken."""
    try:
        text: Tensor = model.generate(prompts, **inputs, **SHORT)
    except AttributeError as error:
        pytest.skip(f"{type(model).__name__}.generate of this transformers fails: {error}")
    return text


def test_a_head_inside_the_language_model_drafts_in_fewer_words_and_bits() -> None:
    model = shrunken("llama4", torch.float32, auto=AutoModelForMultimodalLM)
    prompt = torch.tensor([[5, 7, 9, 11]])
    wanted, head = _stock(model, prompt), model.get_output_embeddings()
    for draft in (
        selfspec.drafts.ReducedVocabulary(selfspec.drafts.EarlyExit(2), tuple(range(40))),
        selfspec.drafts.LowPrecision(),
    ):
        out = selfspec.wrap(model, draft, draft_length=3).generate(prompt, **SHORT)
        assert torch.equal(out.sequences, wanted)
        assert out.stats.drafted
    assert model.get_output_embeddings() is head


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModelForMultimodalLM])
def test_models_that_read_in_both_directions_are_refused(auto: type[Any]) -> None:
    options: dict[str, Any] = {"use_bidirectional_attention": True} if auto is AutoModelForCausalLM else {}
    model = shrunken("gemma" if options else "paligemma", auto=auto, **options)
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="both directions"):
        selfspec.wrap(model)


def test_layers_whose_tokens_see_something_unknown_are_refused() -> None:
    model = tiny.llama()
    model.config.layer_types = ["full_attention", "reference_sliding_attention"] * 2
    assert unknown_layer_types(model.config) == ["reference_sliding_attention"]
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="reference_sliding_attention"):
        selfspec.wrap(model)


def test_the_attention_kernel_is_that_of_the_language_model() -> None:
    model = shrunken("llava", auto=AutoModelForMultimodalLM)
    model.config.text_config._attn_implementation = "flash_attention_2"
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="flash_attention_2"):
        selfspec.wrap(model)


@pytest.mark.parametrize("model_type", ["llama4", "qwen2_vl", "qwen3_5"])
def test_a_checkpoint_of_text_and_more_is_loaded_and_described(model_type: str, tmp_path: Path) -> None:
    model = shrunken(model_type, torch.float32, auto=AutoModelForMultimodalLM)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    prompts, mask = torch.randint(3, 40, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    wanted = _stock(model, prompts, attention_mask=mask)
    loaded = load_checkpoint(str(tmp_path)).model
    for spec in (selfspec.wrap(loaded, "exit:2"), selfspec.load(tmp_path, "4GiB", device="cpu")):
        assert torch.equal(spec.generate(prompts, mask, **SHORT).sequences, wanted)
    assert describe_config(model.config).total == describe(loaded).total


def test_an_image_within_a_budget_is_refused_by_name(tmp_path: Path) -> None:
    example = pictured("gemma3")
    example.model.save_pretrained(tmp_path)
    spec = selfspec.load(tmp_path, "4GiB", device="cpu")
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="within a budget"):
        spec.generate(**example.inputs, **SHORT)


def _dropping(model: PreTrainedModel) -> None:
    model.train()
    model.config.attention_dropout = model.model.layers[1].self_attn.attention_dropout = 0.1


CHANGES: dict[str, Callable[[Any], object]] = {
    "dropping": _dropping,
    "numbered as the first": lambda model: setattr(model.model.layers[1].self_attn, "layer_idx", 0),
    "with another kernel": lambda model: setattr(model.config, "_attn_implementation_internal", "flex_attention"),
    "with a loop of its own": lambda model: model.__dict__.update(_sample=print),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_checks_a_model_again_once_it_has_changed(
    change: Callable[[PreTrainedModel], None], llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = selfspec.wrap(llama, runtime=selfspec.runtime.Native())
    checked: list[PreTrainedModel] = []

    def noting(model: PreTrainedModel, adapter: Adapter) -> None:
        checked.append(model)
        check_decodable(model, adapter)

    monkeypatch.setattr(api, "check_decodable", noting)
    for _ in range(4):
        spec.generate(tiny.prompt(3), max_new_tokens=1)
    # The state is taken after the first check, and known to be that of the second.
    assert len(checked) == 2
    change(llama)
    with pytest.raises(UnsupportedModelError):
        spec.generate(tiny.prompt(3), max_new_tokens=1)


class Flat(LlamaForCausalLM):
    """Has its layers beside the head, and gives all logits whatever it is asked for."""

    def __init__(self, whole: PreTrainedModel) -> None:
        super().__init__(whole.config)
        inside, self.lm_head = whole.model, whole.lm_head
        self.words, self.blocks, self.norm, self.rotary = (
            inside.embed_tokens, inside.layers, inside.norm, inside.rotary_emb
        )  # fmt: skip
        del self.model

    def get_input_embeddings(self) -> Any:
        return self.words

    def get_decoder(self) -> nn.Module:
        return self

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> Any:
        states = self.words(input_ids)
        if position_ids is None:
            first = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(first, first + states.shape[1])[None]
        mask = create_causal_mask(self.config, states, attention_mask, cache, position_ids)
        turns = self.rotary(states, position_ids)
        for block in self.blocks:
            states = block(
                states, attention_mask=mask, position_ids=position_ids, cache=cache, position_embeddings=turns
            )
        return CausalLMOutputWithPast(logits=self.lm_head(self.norm(states)), cache=cache)


@pytest.mark.parametrize("draft", [None, "exit:2", "skip:attn=1", "int8"])
def test_layers_may_lie_beside_the_head(llama: PreTrainedModel, draft: str | None) -> None:
    wanted = llama.generate(tiny.prompt(PROMPT), **OPTIONS)
    spec = selfspec.wrap(
        Flat(llama).double().eval(),
        draft,
        draft_length=2 if draft else None,
        adapter=Adapter(("llama",), layers="blocks"),
    )
    assert torch.equal(spec.generate(tiny.prompt(PROMPT), **OPTIONS).sequences, wanted)


def test_states_after_a_norm_beside_the_head_are_refused(llama: PreTrainedModel) -> None:
    adapter = Adapter(("llama",), layers="blocks")
    with pytest.raises(UnsupportedModelError, match=r"states after the final norm.*beside the head"):
        FeatureTap(Flat(llama), adapter, adapter.base(Flat(llama)), ("normed",))

"""Models that do something of their own before, behind or around their layers: honoured, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from helpers.encoder_decoders import encoder_decoder_subject
from selfspec.errors import UnsupportedModelError, UnsupportedOptionError
from selfspec.serve.engine import Engine
from selfspec.serve.row_request import RowRequest

NEW = 16
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


class Scaled(LlamaForCausalLM):
    """Scales embeddings, as remote code of several families does."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **others: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=3 * embedded, **others)


class Passed(LlamaForCausalLM):
    def forward(self, *args: Any, **others: Any) -> Any:
        return super().forward(*args, **others)


class PassedGPT2(GPT2LMHeadModel):
    def forward(self, *args: Any, **others: Any) -> Any:
        return super().forward(*args, **others)


class Called(LlamaForCausalLM):
    def __call__(self, *args: Any, **others: Any) -> Any:
        return super().__call__(*args, **_embedded(self, others))


def _embedded(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a call with embeddings three times as large."""
    embedded = model.get_input_embeddings()(inputs["input_ids"])
    return {**inputs, "input_ids": None, "inputs_embeds": 3 * embedded}


def _of(kind: type[PreTrainedModel]) -> Callable[[PreTrainedModel], PreTrainedModel]:
    def extended(model: PreTrainedModel) -> PreTrainedModel:
        other = kind(model.config).to(model.dtype).eval()
        other.load_state_dict(model.state_dict())
        other.generation_config = model.generation_config
        return other

    return extended


def _overriding(name: str) -> Callable[[PreTrainedModel], PreTrainedModel]:
    """Make the model one of a class that has a method of its own."""
    own = getattr(LlamaForCausalLM, name)
    return _of(type("Own", (LlamaForCausalLM,), {name: lambda model, *args, **others: own(model, *args, **others)}))


def _changed(change: Callable[[Any], object]) -> Callable[[PreTrainedModel], PreTrainedModel]:
    def changed(model: PreTrainedModel) -> PreTrainedModel:
        change(model)
        return model

    return changed


def _before(model: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
    return args, _embedded(model, inputs)


def _later(module: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
    return args, {**inputs, "position_ids": inputs["position_ids"] * 2}


def _tilted(module: nn.Module, args: Any, output: Any) -> None:
    output.logits = output.logits.roll(1, -1)


def _louder(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 3


def _layer_before(module: nn.Module, args: Any) -> Any:
    return (args[0] * -2, *args[1:])


def _scaling(model: PreTrainedModel, *args: Any, **inputs: Any) -> Any:
    return type(model).forward(model, *args, **_embedded(model, inputs))


def _shadow_by_closure(model: Any) -> None:
    own = model.forward
    model.forward = lambda *args, **inputs: own(*args, **_embedded(model, inputs))


def _compile(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


# What is done to a model, and whether its text is another than before.
HONOURED: dict[str, tuple[Callable[[PreTrainedModel], PreTrainedModel], bool]] = {
    "forward scales embeddings": (_of(Scaled), True),
    "__call__ scales embeddings": (_of(Called), True),
    "forward(*args, **others)": (_of(Passed), False),
    "hook before the model": (_changed(lambda m: m.register_forward_pre_hook(_before, with_kwargs=True)), True),
    "hook of positions": (_changed(lambda m: m.register_forward_pre_hook(_later, with_kwargs=True)), True),
    "hook behind the model": (_changed(lambda m: m.register_forward_hook(_tilted)), True),
    "hook before the base": (_changed(lambda m: m.model.register_forward_pre_hook(_later, with_kwargs=True)), True),
    "hook before a layer": (_changed(lambda m: m.model.layers[1].register_forward_pre_hook(_layer_before)), True),
    "hook behind the embeddings": (_changed(lambda m: m.model.embed_tokens.register_forward_hook(_louder)), True),
    "hook behind the head": (_changed(lambda m: m.lm_head.register_forward_hook(_louder)), False),
    "forward of the instance": (_changed(lambda m: setattr(m, "forward", MethodType(_scaling, m))), True),
    "compiled forward": (_changed(_compile), False),
    "compiled forward of the base": (_changed(lambda m: _compile(m.model)), False),
}
# Methods that a class may not have of its own, and what the refusal says to do.
METHODS = {
    "prepare_inputs_for_generation": "forward or",
    "_update_model_kwargs_for_generation": "",
    "_sample": "model.generate",
    "generate": "",
}
REFUSED: dict[str, tuple[Callable[[PreTrainedModel], PreTrainedModel], str]] = {
    **{name: (_overriding(name), f"Own has a {name} of its own.*{undo}") for name, undo in METHODS.items()},
    "a loop of the instance": (
        _changed(lambda m: setattr(m, "_sample", lambda *args, **others: None)),
        "LlamaForCausalLM has a _sample of its own",
    ),
    "forward by a closure": (_changed(_shadow_by_closure), "the forward of LlamaForCausalLM was replaced.*undo"),
}
DRAFTS = (
    None, "exit:2", "skip:layers=1", "int8", "int4", "lookup", "suffix", "recycle",
    "lookup+int8",
)  # fmt: skip


@pytest.mark.parametrize("name", HONOURED)
def test_what_runs_around_the_layers_counts(name: str) -> None:
    change, other = HONOURED[name]
    ids = tiny.prompt(9, 2)
    model = change(tiny.llama())
    wanted = model.generate(ids, **GREEDY)
    assert torch.equal(wanted, tiny.llama().generate(ids, **GREEDY)) != other
    for draft in DRAFTS:
        spec = selfspec.wrap(model, draft, draft_length=3)
        assert torch.equal(spec.generate(ids, **GREEDY).sequences, wanted), draft
    assert torch.equal(model.generate(ids, custom_generate=spec, **GREEDY), wanted)
    pieces = model.generate(ids, prefill_chunk_size=4, **GREEDY)
    assert torch.equal(spec.generate(ids, prefill_chunk_size=4, **GREEDY).sequences, pieces)


def test_what_comes_later_counts_at_the_next_call(llama: PreTrainedModel) -> None:
    """Recorded passes and an engine's runner are of the model as it was."""
    ids = tiny.prompt(9)
    plain = llama.generate(ids, **GREEDY)
    spec = selfspec.wrap(llama, "exit:2", draft_length=3, runtime=selfspec.runtime.Native(after=0))
    request = RowRequest(tuple(ids[0].tolist()), NEW, {"do_sample": False})
    with Engine(spec) as engine:
        for hooked in (False, True, False):
            handle = llama.register_forward_pre_hook(_before, with_kwargs=True) if hooked else None
            wanted = llama.generate(ids, **GREEDY)
            assert torch.equal(wanted, plain) != hooked
            assert torch.equal(spec.generate(ids, **GREEDY).sequences, wanted)
            assert engine.submit(request).tokens(60) == wanted[0, 9:].tolist()
            if handle is not None:
                handle.remove()


def test_a_forward_that_a_library_put_into_the_class_counts(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of `transformers` are recorded, and this one is among them."""
    ids, own = tiny.prompt(9), LlamaForCausalLM.forward
    plain = llama.generate(ids, **GREEDY)

    @wraps(own)
    def scaled(model: Any, *args: Any, **inputs: Any) -> Any:
        return own(model, *args, **_embedded(model, inputs))

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    wanted = llama.generate(ids, **GREEDY)
    assert not torch.equal(wanted, plain)
    for draft in (None, "skip:layers=1", "lookup+exit:2"):
        spec = selfspec.wrap(llama, draft, draft_length=3, runtime=selfspec.runtime.Native(after=0))
        for _ in range(2):
            assert torch.equal(spec.generate(ids, **GREEDY).sequences, wanted), draft
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda model, *args, **inputs: own(model, *args, **inputs))
    with pytest.raises(UnsupportedModelError, match="forward of LlamaForCausalLM names no cache"):
        selfspec.wrap(llama)


def test_a_hook_before_a_model_with_an_encoder_counts() -> None:
    subject = encoder_decoder_subject("t5")
    read, begun = subject.rows(0, 1), tiny.prompt(7, vocabulary=10)
    options = {**read, "decoder_input_ids": begun, **GREEDY}
    plain = subject.model.generate(**options)

    def other(module: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
        return args, {**inputs, "decoder_input_ids": inputs["decoder_input_ids"] * 5 % 7 + 3}

    subject.model.register_forward_pre_hook(other, with_kwargs=True)
    wanted = subject.model.generate(**options)
    assert not torch.equal(wanted, plain)
    for draft in (None, "exit:1", "lookup"):
        spec = selfspec.wrap(subject.model, draft, draft_length=3)
        assert torch.equal(spec.generate(**options).sequences, wanted), draft


def test_padding_before_a_forward_that_names_no_positions() -> None:
    """`transformers` hands none to it, so that padding shifts a text where positions are learned."""
    model = _of(PassedGPT2)(tiny.gpt2())
    options: dict[str, Any] = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}
    spec = selfspec.wrap(model, "exit:2", draft_length=3)
    with pytest.raises(UnsupportedOptionError, match="padded rows: the forward of PassedGPT2 names no position_ids"):
        spec.generate(tiny.prompt(6, 2), **options, **GREEDY)
    assert_alike(spec, inputs=tiny.prompt(6, 2), **GREEDY)
    # Rotated ones count by their differences.
    spec = selfspec.wrap(_of(Passed)(tiny.llama()), "exit:2", draft_length=3)
    assert_alike(spec, inputs=tiny.prompt(6, 2), **options, **GREEDY)
    with pytest.raises(UnsupportedOptionError, match=r"position_id is no option.*'position_ids'"):
        spec.generate(tiny.prompt(6), position_id=tiny.prompt(6), **GREEDY)


@pytest.mark.parametrize("length", [1, 5])
def test_inputs_that_the_instance_prepares_without_a_soft_prompt_are_refused(llama: Any, length: int) -> None:
    own = llama.prepare_inputs_for_generation

    def later(*args: Any, **others: Any) -> Any:
        inputs = own(*args, **others)
        return {**inputs, "position_ids": inputs["position_ids"] * 2}

    llama.prepare_inputs_for_generation = later
    spec = selfspec.wrap(llama, "exit:2")
    for call in (spec.generate, partial(llama.generate, custom_generate=spec)):
        with pytest.raises(UnsupportedModelError, match=r"prepare_inputs_for_generation.*adds no soft prompt.*forward"):
            call(tiny.prompt(length), **GREEDY)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_called_is_refused_by_name(name: str) -> None:
    change, match = REFUSED[name]
    ids, model = tiny.prompt(5), tiny.llama()
    spec = selfspec.wrap(model, "exit:2")
    changed: Any = change(model)
    changed.model.embed_tokens.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    with pytest.raises(UnsupportedModelError, match=match):
        selfspec.wrap(changed)
    if changed is model:
        for call in (spec.generate, spec.stream, partial(model.generate, custom_generate=spec)):
            with pytest.raises(UnsupportedModelError, match=match):
                call(ids, **GREEDY)
        with pytest.raises(UnsupportedModelError, match=match):
            Engine(spec)

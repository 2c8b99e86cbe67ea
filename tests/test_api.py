"""Wrapping: a model that drafts for itself stays what it was, at every moment, for everyone else who uses it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation import TextStreamer

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from helpers.reference import layers_of, sublayer_module
from helpers.snapshot import Snapshot
from helpers.tiny import in_turns
from selfspec.errors import ClosedError, DraftConfigError, UnsupportedModelError, UnsupportedOptionError
from selfspec.model.layer_path import Part, Sublayer

PROMPT = 7
DRAFTS: dict[str, selfspec.drafts.Drafter] = {
    "exit": selfspec.drafts.EarlyExit(2),
    "sublayers": selfspec.drafts.LayerSkip(attention=[1], mlp=[2]),
    "layers": selfspec.drafts.LayerSkip(layers=[0, 3]),
    "first mlp": selfspec.drafts.LayerSkip(mlp=[0]),
}


CASES = [*((name, "sublayers") for name in sorted(tiny.BUILDERS)), *(("llama", name) for name in DRAFTS)]
"""Every architecture once, and every draft once on llama."""


@pytest.fixture(params=list(DRAFTS))
def draft(request: pytest.FixtureRequest) -> selfspec.drafts.Drafter:
    return DRAFTS[request.param]


@pytest.fixture(params=sorted(set(CASES)), ids=" ".join)
def case(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, selfspec.drafts.Drafter]:
    architecture, draft = request.param
    return tiny.BUILDERS[architecture](), DRAFTS[draft]


def greedy(model: Any, new: int = 12, rows: int = 1) -> Tensor:
    written = model.generate(tiny.prompt(PROMPT, rows), max_new_tokens=new, do_sample=False)
    sequences: Tensor = getattr(written, "sequences", written)
    return sequences


@contextmanager
def _in_a_stream(model: PreTrainedModel, draft: selfspec.drafts.Drafter) -> Iterator[None]:
    """Half-way through, with the stream's own result checked once everyone else had their turn."""
    wanted = greedy(model, 20)[0, PROMPT:].tolist()
    stream = selfspec.wrap(model, draft, draft_length=4).stream(tiny.prompt(PROMPT), max_new_tokens=20, do_sample=False)
    found = [*next(stream).tokens, *next(stream).tokens]
    yield
    for chunk in stream:
        found += chunk.tokens
    assert found == wanted


def moments(model: PreTrainedModel, draft: selfspec.drafts.Drafter) -> Iterator[str]:
    """The moments of a wrapped model's life at which it must be what it was, one after the other."""
    spec = selfspec.wrap(model, draft, draft_length=4)
    yield "wrapped"
    with _in_a_stream(model, draft):
        yield "in a stream"
    next(spec.stream(tiny.prompt(PROMPT), max_new_tokens=20))
    yield "with an abandoned stream"
    spec.generate(tiny.prompt(PROMPT, 2), max_new_tokens=12)
    yield "after it generated"
    model.generate(tiny.prompt(PROMPT, 2), custom_generate=spec, max_new_tokens=12)
    yield "after it generated through transformers"
    assert spec.unwrap() is model
    yield "unwrapped"


def test_nothing_of_the_model_changes(case: tuple[PreTrainedModel, selfspec.drafts.Drafter]) -> None:
    model, draft = case
    before = Snapshot(model)
    for _ in moments(model, draft):
        before.assert_same(model)


def _outputs(model: PreTrainedModel) -> list[Tensor]:
    tokens = tiny.prompt(11, 2, seed=4)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with torch.no_grad():
        plain = model(tokens).logits
        padded = model(tokens, attention_mask=mask).logits[mask.bool()]
        whole = model(tokens, output_hidden_states=True, output_attentions=True)
    assert len(whole.hidden_states) == tiny.DEPTH + 1
    assert len(whole.attentions) == tiny.DEPTH
    return [plain, padded, *whole.hidden_states, *whole.attentions]


def test_hidden_states_first_asked_for_during_a_stream_are_all_there(architecture: str) -> None:
    wanted = _outputs(tiny.BUILDERS[architecture](attention="eager", dtype=torch.float32))
    model = tiny.BUILDERS[architecture](attention="eager", dtype=torch.float32)
    with _in_a_stream(model, DRAFTS["sublayers"]):
        torch.testing.assert_close(_outputs(model), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions"])
def test_a_model_that_records_by_its_config_still_drafts_and_records(flag: str, draft: selfspec.drafts.Drafter) -> None:
    model = tiny.llama(attention="eager")
    wanted = greedy(model).tolist()
    setattr(model.config, flag, True)
    spec = selfspec.wrap(model, draft, draft_length=4)
    assert greedy(spec).tolist() == wanted
    with torch.no_grad():
        recorded = getattr(model(tiny.prompt(3)), flag.removeprefix("output_"))
    assert len(recorded) == (tiny.DEPTH + 1 if flag == "output_hidden_states" else tiny.DEPTH)


def test_a_copy_can_be_wrapped_on_its_own(llama: PreTrainedModel, draft: selfspec.drafts.Drafter) -> None:
    with _in_a_stream(llama, draft):
        copied = copy.deepcopy(llama)
        copied.lm_head.weight.data.neg_()
        wanted = greedy(copied, 9)
        assert torch.equal(greedy(selfspec.wrap(copied, draft, draft_length=4), 9), wanted)


# Copies of a wrapper.


def test_a_copy_of_a_wrapper_wraps_the_same_model(llama: PreTrainedModel, draft: selfspec.drafts.Drafter) -> None:
    spec = selfspec.wrap(llama, draft, draft_length=3)
    other = copy.copy(spec)
    assert other is not spec
    assert other.model is llama
    assert other.unwrap() is llama
    wanted = greedy(llama)
    assert torch.equal(greedy(spec), wanted)
    assert spec.programs.proved == copy.copy(spec).programs.proved


def test_options_that_are_copied_deeply_name_the_same_wrapper(
    llama: PreTrainedModel, draft: selfspec.drafts.Drafter
) -> None:
    spec = selfspec.wrap(llama, draft, draft_length=3)
    options = {"custom_generate": spec, "max_new_tokens": 12, "do_sample": False}
    copied = copy.deepcopy(options)
    assert copied == options
    wanted = greedy(llama)
    assert torch.equal(llama.generate(tiny.prompt(PROMPT), **copied), wanted)


def test_a_pickled_wrapper_decodes_with_its_own_model(llama: PreTrainedModel, draft: selfspec.drafts.Drafter) -> None:
    spec = selfspec.wrap(llama, draft, draft_length=3, accept="token", runtime=selfspec.runtime.Native(after=0))
    wanted = greedy(llama, 24)
    greedy(spec, 24)
    other = pickle.loads(pickle.dumps(spec))
    assert other.model is not llama
    assert (other.draft, other.control, other.rule, other.runtime) == (draft, spec.control, spec.rule, spec.runtime)
    assert not other.programs.proved
    llama.lm_head.weight.data.neg_()
    assert torch.equal(greedy(other, 24), wanted)


def test_a_wrapper_says_what_it_is(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=3, accept="block")
    assert repr(spec).startswith("SelfSpeculative(LlamaForCausalLM, draft='exit:2', control=FixedLength(")
    assert "unwrapped" not in repr(spec)
    spec.unwrap()
    assert repr(spec).endswith(", unwrapped)")


def test_no_draft_is_written_as_load_has_it(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, draft=False)
    assert spec.draft is None
    assert spec.drafting("exit:2").drafting(False).draft is None


def test_a_wrapper_answers_as_its_model_does(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama)
    assert spec.config is llama.config
    assert spec.generation_config is llama.generation_config
    assert (spec.device, spec.dtype) == (torch.device("cpu"), torch.float64)
    with pytest.raises(AttributeError, match="'SelfSpeculative' object has no attribute 'hf_device_mop'"):
        spec.hf_device_mop  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(spec, "hf_device_map")
    assert not hasattr(spec, "forward")
    assert spec.to("cpu") is spec


def test_a_model_that_moves_runs_by_the_default_of_its_new_place(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("selfspec.api._default_runtime", lambda _: selfspec.runtime.Eager())
        spec, chosen = selfspec.wrap(llama), selfspec.wrap(llama, runtime=selfspec.runtime.Eager())
    expected = llama.generate(tiny.prompt(5), max_new_tokens=6, do_sample=False)
    for each in (spec, chosen):
        # As if the model had been elsewhere.
        each._prepared_on = torch.device("meta")
        other = each.drafting("exit:2")
        assert (other.runtime, other.programs) == (each.runtime, each.programs)
        assert torch.equal(each.generate(tiny.prompt(5), max_new_tokens=6, do_sample=False).sequences, expected)
    assert isinstance(spec.runtime, selfspec.runtime.Native)
    assert isinstance(chosen.runtime, selfspec.runtime.Eager)


# Hooks of the user's own.


def test_hooks_that_steer_the_model_steer_its_generations_too(
    case: tuple[PreTrainedModel, selfspec.drafts.Drafter],
) -> None:
    model, draft = case
    plain = greedy(model, 16)

    def steer(module: object, args: object, output: Any) -> Any:
        return (output[0] * -2.0, *output[1:]) if isinstance(output, tuple) else output * -2.0

    for sublayer in (Sublayer(1, Part.ATTENTION), Sublayer(0, Part.MLP), Sublayer(2, Part.ATTENTION)):
        sublayer_module(model, sublayer).register_forward_hook(steer)
    layers_of(model)[2].register_forward_hook(steer)
    model.get_output_embeddings().register_forward_hook(steer)
    wanted = greedy(model, 16)
    assert not torch.equal(wanted, plain)
    spec = selfspec.wrap(model, draft, draft_length=3)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 1, "seed": 0}):
        found = spec.generate(tiny.prompt(PROMPT), max_new_tokens=16, **options).sequences
        assert torch.equal(found, wanted)


# accelerate's hooks, which shadow `forward` on the modules they are put on.


def _accelerate_everywhere(model: PreTrainedModel) -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList):
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=not name))


def _accelerate_offload(model: PreTrainedModel) -> None:
    """All weights off the device but while their module runs."""
    pytest.importorskip("accelerate", reason="accelerate is not installed").cpu_offload(
        model, execution_device=torch.device("cpu")
    )


def _accelerate_dispatch(model: PreTrainedModel) -> None:
    """Some layers stay, some are loaded for each forward, as `device_map="auto"` leaves a model too large."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    away = [name for name, module in model.named_modules() if module in (layers_of(model)[1], layers_of(model)[3])]
    hooks.attach_align_device_hook_on_blocks(
        model,
        execution_device={"": "cpu", **dict.fromkeys(away, "cpu")},
        offload={"": False, **dict.fromkeys(away, True)},
        weights_map={name: weight.detach().clone() for name, weight in model.state_dict().items()},
    )


# transformers before some 5.x says this of every model whose weights are all offloaded, plain or wrapped.
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on a device type different")
@pytest.mark.parametrize(
    ("architecture", "draft", "hook"),
    in_turns(("llama", "gpt2"), tuple(DRAFTS), (_accelerate_everywhere, _accelerate_offload, _accelerate_dispatch)),
)
def test_accelerate_hooks_keep_working_and_stay(
    architecture: str, draft: str, hook: Callable[[PreTrainedModel], None]
) -> None:
    model, drafter = tiny.BUILDERS[architecture](), DRAFTS[draft]
    wanted = greedy(model, 12, 2).tolist()
    hook(model)
    assert greedy(model, 12, 2).tolist() == wanted
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    bare = tiny.BUILDERS[architecture]()
    out, alone = (
        selfspec.wrap(each, drafter, draft_length=4).generate(
            tiny.prompt(PROMPT, 2), max_new_tokens=12, do_sample=False
        )
        for each in (model, bare)
    )
    assert out.sequences.tolist() == wanted
    assert out.stats.accepted_per_depth == alone.stats.accepted_per_depth, "the draft was another"
    for name, module in model.named_modules():
        assert module.__dict__.get("forward") is before[name].get("forward"), name
        assert module.__dict__.get("_hf_hook") is before[name].get("_hf_hook"), name
        assert module.__dict__.get("_old_forward") is before[name].get("_old_forward"), name
    assert greedy(model, 12, 2).tolist() == wanted


@pytest.mark.parametrize("draft", [None, "exit:2", "lookup", "recycle"])
def test_a_model_that_accelerate_keeps_on_the_disk_gives_its_own_tokens(tmp_path: Path, draft: str | None) -> None:
    model = _on_the_disk(tmp_path)
    wanted = greedy(tiny.llama(), 12, 2).tolist()
    assert greedy(selfspec.wrap(model, draft), 12, 2).tolist() == wanted


@pytest.mark.parametrize("draft", ["int8", "lookup+int4", "int8+exit:3"])
def test_copies_in_fewer_bits_of_what_accelerate_keeps_elsewhere_are_refused(tmp_path: Path, draft: str) -> None:
    with pytest.raises(DraftConfigError, match=r"selfspec.load\(path, memory="):
        selfspec.wrap(_on_the_disk(tmp_path), draft)


def _on_the_disk(folder: Path) -> PreTrainedModel:
    """A model that `device_map` dispatched: layers 1 and 3 and the head are on the disk."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    tiny.llama().save_pretrained(folder / "model")
    places: dict[str, str] = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{number}": "disk" if number % 2 else "cpu" for number in range(4)} | {"lm_head": "disk"}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=places, offload_folder=str(folder / "away")
    )
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    return model.eval()


def test_a_skipped_layer_is_not_loaded_by_accelerate(llama: PreTrainedModel) -> None:
    _accelerate_dispatch(llama)
    loads = 0
    hook = llama.model.layers[3].mlp.up_proj._hf_hook
    load = hook.pre_forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal loads
        loads += 1
        return load(*args, **kwargs)

    hook.pre_forward = counted
    stream = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=4).stream(
        tiny.prompt(PROMPT), max_new_tokens=30
    )
    next(stream)
    assert loads == 2, "once in prefill, once in verification"
    next(stream)
    assert loads == 3


# What cannot be wrapped.


def _no_forward(model: torch.nn.Module) -> None:
    def ran(module: torch.nn.Module, args: object) -> None:
        pytest.fail(f"{type(module).__name__} ran")

    for module in model.modules():
        module.register_forward_pre_hook(ran)


def _cacheless() -> PreTrainedModel:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()


def _configured(name: str, value: str) -> PreTrainedModel:
    model = tiny.llama()
    setattr(model.config, name, value)
    return model


def _unknown() -> PreTrainedModel:
    return _configured("model_type", "made_up")


def _classifier() -> PreTrainedModel:
    from transformers import LlamaForSequenceClassification

    return LlamaForSequenceClassification(tiny.llama().config).eval()


def _training_with_checkpointing() -> PreTrainedModel:
    """`transformers` takes the cache away from layers that checkpoint activations."""
    model = tiny.llama().train()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
    return model


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (_cacheless, "'openai-gpt' is not supported: it has no key-value cache"),
        (_unknown, r"no adapter for architecture 'made_up'; .*selfspec\.Adapter"),
        (_classifier, "no language-model head; load it with AutoModelForCausalLM"),
        (lambda: tiny.gpt2(add_cross_attention=True), "attends to what it has no encoder for"),
        (
            lambda: _configured("_attn_implementation", "flex_attention"),
            "'flex_attention' is not supported; load the model with attn_implementation='sdpa'",
        ),
        (lambda: tiny.gpt2(resid_pdrop=0.1).train(), r"training mode.*model\.eval\(\)"),
        # Llama drops attention out by a function, not by a module.
        (lambda: tiny.llama(attention_dropout=0.1).train(), r"training mode.*model\.eval\(\)"),
        (_training_with_checkpointing, r"model\.eval\(\)"),
        (lambda: torch.nn.Linear(2, 2), "not a transformers model; load it with AutoModelForCausalLM"),
    ],
)
def test_a_model_that_cannot_draft_for_itself_is_refused(build: Callable[[], Any], match: str) -> None:
    model = build()
    if isinstance(model, torch.nn.Module):
        _no_forward(model)
    for draft in (None, selfspec.drafts.EarlyExit(1)):
        with pytest.raises(UnsupportedModelError, match=match):
            selfspec.wrap(model, draft, draft_length=4)
    if build is not _unknown:
        # An adapter does not make a causal model of another.
        with pytest.raises(UnsupportedModelError):
            selfspec.wrap(model, draft, adapter=selfspec.Adapter(("llama",), layers="layers"), draft_length=4)


def test_training_mode_without_dropout_is_fine(architecture: str) -> None:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if architecture == "gpt2" else {}
    model = tiny.BUILDERS[architecture](**off).train()
    spec = selfspec.wrap(model, DRAFTS["exit"], draft_length=4)
    assert_alike(spec, inputs=tiny.prompt(5), max_new_tokens=9, do_sample=False)


def test_a_model_put_into_training_after_wrapping_is_refused_before_it_runs() -> None:
    model = tiny.gpt2()
    spec = selfspec.wrap(model, DRAFTS["exit"], draft_length=4)
    _no_forward(model)
    model.train()
    for call in (spec.generate, spec.stream, partial(model.generate, custom_generate=spec)):
        with pytest.raises(UnsupportedModelError, match=r"model\.eval\(\)"):
            call(tiny.prompt(5), max_new_tokens=3)


def test_after_unwrap_everything_is_refused_and_says_what_to_do(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, DRAFTS["exit"], draft_length=4)
    waiting = spec.stream(tiny.prompt(5), max_new_tokens=3)
    assert spec.unwrap() is llama
    del waiting
    _no_forward(llama)
    for use in (
        lambda: spec.generate(tiny.prompt(5), max_new_tokens=3),
        lambda: spec.stream(tiny.prompt(5), max_new_tokens=3),
        lambda: llama.generate(tiny.prompt(5), max_new_tokens=3, custom_generate=spec),
        spec.unwrap,
    ):
        with pytest.raises(ClosedError, match=r"selfspec\.wrap\(model\) again"):
            use()


def test_a_stream_begun_before_unwrap_ends_well(llama: PreTrainedModel) -> None:
    wanted = llama.generate(tiny.prompt(5), max_new_tokens=12, do_sample=False)[0, 5:].tolist()
    spec = selfspec.wrap(llama, DRAFTS["exit"], draft_length=4)
    stream = spec.stream(tiny.prompt(5), max_new_tokens=12, do_sample=False)
    found = list(next(stream).tokens)
    spec.unwrap()
    for chunk in stream:
        found += chunk.tokens
    assert found == wanted


# Streams.


def test_a_streams_rounds_make_up_what_generate_gives(case: tuple[PreTrainedModel, selfspec.drafts.Drafter]) -> None:
    model, draft = case
    prompts = tiny.prompt(PROMPT, 3)
    mask = torch.ones_like(prompts)
    mask[0, :5] = mask[1, :2] = 0
    eos = int(model.generate(prompts[2:], max_new_tokens=9, do_sample=False)[0, -1])
    greedy: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    for options in (greedy, {**greedy, "do_sample": True, "temperature": 0.8, "seed": 5}):
        spec = selfspec.wrap(model, draft, draft_length=3)
        out = spec.generate(prompts, mask, **options)
        rows: list[list[int]] = [[], [], []]
        rounds = 0
        for chunk in spec.stream(prompts, mask, **options):
            rounds += 1
            assert any(row.tokens for row in chunk.rows)
            for row, part in zip(rows, chunk.rows, strict=True):
                assert part.accepted <= len(part.draft) <= 3
                assert part.tokens[: part.accepted] == part.draft[: part.accepted]
                assert len(part.tokens) - part.accepted in (0, 1)
                row += part.tokens
        assert rounds == out.stats.rounds
        assert tuple(map(len, rows)) == out.lengths
        for row, sequence in zip(rows, out.sequences.tolist(), strict=True):
            assert sequence[PROMPT:] == row + [0] * (max(map(len, rows)) - len(row))


def test_a_stream_does_nothing_before_it_is_asked(llama: PreTrainedModel) -> None:
    _no_forward(llama)
    selfspec.wrap(llama, DRAFTS["exit"], draft_length=4).stream(tiny.prompt(5), max_new_tokens=3)


def test_rounds_of_a_stream_may_run_in_any_thread(llama: PreTrainedModel) -> None:
    wanted = greedy(llama, 15)[0, PROMPT:].tolist()
    spec = selfspec.wrap(llama, DRAFTS["sublayers"], draft_length=4)
    stream = spec.stream(tiny.prompt(PROMPT), max_new_tokens=15, do_sample=False)
    found = list(next(stream).tokens)
    with ThreadPoolExecutor(1) as other_thread:
        found += other_thread.submit(next, stream).result().tokens
    assert [*found, *(token for chunk in stream for token in chunk.tokens)] == wanted


def test_a_seed_leaves_torchs_own_generator_alone(llama: PreTrainedModel, draft: selfspec.drafts.Drafter) -> None:
    before = torch.get_rng_state()
    selfspec.wrap(llama, draft, draft_length=4).generate(tiny.prompt(5), max_new_tokens=9, do_sample=True, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


# Through `model.generate(custom_generate=spec)`.


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "seed": 4},
        {"do_sample": True, "seed": 4, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "draft_length": 2},
        {"do_sample": True, "seed": 4, "num_return_sequences": 3},
        {"do_sample": False, "eos_token_id": [3, 7, 20], "pad_token_id": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_custom_generate_gives_what_the_wrapper_gives(architecture: str, options: dict[str, Any]) -> None:
    model, draft = tiny.BUILDERS[architecture](), DRAFTS["sublayers"]
    spec = selfspec.wrap(model, draft, draft_length=4)
    prompts = tiny.prompt(PROMPT, 2)
    mask = torch.ones_like(prompts)
    mask[0, :4] = 0
    options = {"max_new_tokens": 10, "attention_mask": mask, **options}
    wanted = spec.generate(prompts, **options)
    found = model.generate(prompts, custom_generate=spec, **options)
    assert isinstance(found, Tensor)
    assert torch.equal(found, wanted.sequences)
    whole = model.generate(prompts, custom_generate=spec, return_dict_in_generate=True, **options)
    assert torch.equal(whole.sequences, wanted.sequences)
    assert whole.lengths == wanted.lengths
    assert whole.stats.accepted_per_depth == wanted.stats.accepted_per_depth
    if not options["do_sample"]:
        plain = {name: value for name, value in options.items() if name not in ("seed", "draft_length")}
        assert torch.equal(found, model.generate(prompts, **plain))


def test_custom_generate_of_another_model_is_refused(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, DRAFTS["exit"], draft_length=4)
    other = tiny.llama(seed=1)
    _no_forward(other)
    _no_forward(llama)
    with pytest.raises(UnsupportedModelError, match="another model"):
        other.generate(tiny.prompt(5), custom_generate=spec, max_new_tokens=3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "num_beams.*model.generate for beam search"),
        ({"streamer": TextStreamer(None, skip_prompt=True)}, "streamer is dropped by transformers"),
        ({"assistant_model": tiny.gpt2()}, "assistant_model is dropped by transformers"),
        ({"synced_gpus": True}, "synced_gpus is dropped by transformers"),
    ],
)
def test_custom_generate_refuses_what_the_wrapper_refuses_and_what_transformers_drops(
    options: dict[str, Any], match: str
) -> None:
    model = tiny.gpt2()
    spec = selfspec.wrap(model, DRAFTS["exit"], draft_length=4)
    _no_forward(model)
    with pytest.raises(UnsupportedOptionError, match=match):
        model.generate(tiny.prompt(5), custom_generate=spec, max_new_tokens=3, **options)


def test_a_drafter_that_cannot_be_a_key_drafts(llama: PreTrainedModel) -> None:
    class Own(selfspec.drafts.EarlyExit):
        __hash__ = None  # type: ignore[assignment]

    assert_alike(selfspec.wrap(llama, Own(2)), inputs=tiny.prompt(5), max_new_tokens=8, do_sample=False)

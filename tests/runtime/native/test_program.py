"""Native programs: the stock model's tokens, the same bits for any rows and threads, and nothing run unproved."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import captures, tiny
from helpers.captures import assert_stock, ragged_samples, ticking, wrapped
from helpers.encoder_decoders import FRAMES, MELS, encoder_decoder
from helpers.reference import begun
from helpers.snapshot import Snapshot
from helpers.tiny import in_turns
from selfspec.cache.tree import Tree
from selfspec.kernels.native import Kind
from selfspec.model.layer_path import LayerPath
from selfspec.runtime import Eager, Native, runtime
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.native import program
from selfspec.runtime.native.instructions import Operation, Place, Storage
from selfspec.runtime.native.program import planned, with_waits
from selfspec.runtime.noting import noted
from selfspec.runtime.pass_function import PassKind
from selfspec.runtime.request import PassRequest

pytestmark = pytest.mark.kernels

PROMPT, NEW = 7, 30
HALVES = (torch.bfloat16, torch.float16)
DRAFTS = {
    **captures.DRAFTS,
    "int4": selfspec.drafts.LowPrecision(bits=4),
    "window": selfspec.drafts.CacheWindow(selfspec.drafts.LowPrecision(), 8, 2),
}
GROUPED = {"num_key_value_heads": 2}
FAMILIES = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 8},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "gemma2": {**GROUPED, "head_dim": 16, "sliding_window": 8},
    "gemma3_text": {**GROUPED, "head_dim": 16, "sliding_window": 8},
    "phi3": GROUPED,
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "gpt_neox": {},
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets small models run by several threads too."""
    monkeypatch.setattr(program, "_WORTH_A_THREAD", 0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def built(family: str, dtype: torch.dtype = torch.float32, context: int = 128) -> PreTrainedModel:
    options = {"vocab_size": 64, "max_position_embeddings": context, **dict.fromkeys(_SPECIAL), **FAMILIES[family]}
    if family != "gpt2":
        options |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).eval().to(dtype)
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    return model


_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.parametrize(("family", "draft"), in_turns(sorted(FAMILIES), tuple(DRAFTS)))
def test_greedy_text_is_the_stock_models(family: str, draft: str) -> None:
    model = built(family)
    before = Snapshot(model)
    spec, prompt = wrapped(model, Native(after=0), DRAFTS[draft]), tiny.prompt(PROMPT, vocabulary=64)
    assert_stock(spec, prompt, NEW)
    assert spec.programs.proved
    assert not spec.programs.refusals
    before.assert_same(model)


@pytest.mark.parametrize("draft", DRAFTS)
def test_samples_of_a_ragged_batch_are_those_of_the_stock_modules(draft: str) -> None:
    model = tiny.BUILDERS["llama"]().float()
    stock = ragged_samples(wrapped(model, Eager(), DRAFTS[draft]), PROMPT, NEW)
    spec = wrapped(model, Native(after=0), DRAFTS[draft])
    assert ragged_samples(spec, PROMPT, NEW) == stock
    assert not spec.programs.refusals
    assert any(not kind.uniform for kind in spec.programs.proved)


def proved_of(model: PreTrainedModel, draft: selfspec.drafts.Drafter | None = None) -> set[PassKind]:
    """The kinds of passes that a generation made programs of, none of which was refused."""
    spec = wrapped(model, Native(after=0), draft)
    spec.generate(tiny.prompt(PROMPT, vocabulary=64), max_new_tokens=NEW, do_sample=False)
    assert not spec.programs.refusals
    return set(spec.programs.proved)


@pytest.mark.parametrize(("family", "draft", "dtype"), in_turns(("llama", "gemma3_text"), tuple(DRAFTS), HALVES))
@torch.no_grad()
def test_greedy_text_in_16_bits_is_the_stock_models_up_to_near_ties(
    family: str, draft: str, dtype: torch.dtype
) -> None:
    model = built(family, dtype)
    spec = wrapped(model, Native(after=0), DRAFTS[draft])
    text = spec.generate(tiny.prompt(PROMPT, vocabulary=64), max_new_tokens=NEW, do_sample=False).sequences
    assert spec.programs.proved
    assert not spec.programs.refusals
    logits = model(text).logits[0, PROMPT - 1 : -1].float()
    best, chosen = logits.amax(1), logits.gather(1, text[0, PROMPT:, None])[:, 0]
    assert (best - chosen).max() <= 8 * torch.finfo(dtype).eps * logits.abs().max()


@pytest.mark.parametrize("dtype", HALVES)
@torch.no_grad()
def test_programs_in_16_bits_read_more_tokens_than_kernels_multiply_alone(dtype: torch.dtype) -> None:
    bench, tokens = Bench(built("llama", dtype)), tiny.prompt(24, vocabulary=64)
    for _ in range(6):
        bench.logits(tokens)
    assert bench.served
    assert not bench.programs.refusals


def test_other_dtypes_run_on_the_stock_modules() -> None:
    assert not proved_of(built("llama", torch.float64))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_programs_are_made_in_any_mode(mode: type[torch.inference_mode]) -> None:
    model = built("llama")
    with mode():
        assert proved_of(model, selfspec.drafts.EarlyExit(1))


def test_models_run_beside_each_other(threads: None) -> None:
    prompt = tiny.prompt(PROMPT, vocabulary=64)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    specs = [wrapped(built(family), Native(after=0), selfspec.drafts.EarlyExit(1)) for family in ("llama", "qwen3")]
    expected = [spec.model.generate(prompt, **options) for spec in specs]
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(specs[place % 2].generate, prompt, **options) for place in range(40)]
    assert all(torch.equal(each.result().sequences, expected[place % 2]) for place, each in enumerate(found))
    assert all(spec.programs.proved for spec in specs)


def test_a_forked_process_of_one_thread_runs_programs() -> None:
    # With more threads torch's own products wait for ever there, too: OpenMP's threads are not copied.
    prompt = tiny.prompt(PROMPT, vocabulary=64)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    spec = wrapped(built("llama"), Native(after=0))
    expected = spec.generate(prompt, **options).sequences
    assert spec.programs.proved

    def child() -> None:
        torch.set_num_threads(1)
        os._exit(0 if torch.equal(spec.generate(prompt, **options).sequences, expected) else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    process.kill()
    process.join()
    assert process.exitcode == 0


class Bench:
    """A model whose cache holds a prompt, and passes over what comes next."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.programs = GraphCache(Native(after=0), ticking())
        self.runner = begun(model, tiny.prompt(PROMPT, vocabulary=64), [PROMPT], self.programs)

    @property
    def served(self) -> bool:
        return any(
            each.lengths.count(each.lengths[0]) > 2 for each in self.programs._candidates.values() if each.lengths
        )

    def logits(self, tokens: torch.Tensor, tree: Tree | None = None) -> torch.Tensor:
        if tree is not None:
            self.runner.cache.open(tree)
        logits = self.runner.run(PassRequest(LayerPath.full(self.runner.depth), tokens)).logits
        self.runner.cache.commit([0])
        return logits


@torch.no_grad()
def test_a_token_has_the_same_bits_alone_and_with_others(threads: None) -> None:
    bench, tokens = Bench(built("llama")), tiny.prompt(8, vocabulary=64, seed=3)
    by_threads = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        # Comparisons come first; another number of threads has programs of its own.
        passes = {width: [bench.logits(tokens[:, :width]) for _ in range(6)][-1] for width in (1, 3, 8)}
        assert torch.equal(passes[1], passes[8][:, :1])
        assert torch.equal(passes[3], passes[8][:, :3])
        by_threads.append(passes[8])
    assert all(torch.equal(each, by_threads[0]) for each in by_threads)
    assert not bench.programs.refusals


@torch.no_grad()
def test_a_branch_of_a_tree_gives_what_a_chain_gives() -> None:
    bench, tokens = Bench(built("gemma3_text")), tiny.prompt(4, vocabulary=64, seed=3)
    chain = [bench.logits(tokens[:, [0, 1, 3]]) for _ in range(6)][-1]
    tree = [bench.logits(tokens, Tree((-1, -1, 1))) for _ in range(6)][-1]
    other = [bench.logits(tokens[:, [0, 2, 3]]) for _ in range(6)][-1]
    assert torch.equal(tree[:, :2], chain[:, :2])
    torch.testing.assert_close(tree[:, 2:], other[:, 1:])
    assert not bench.programs.refusals


def test_trees_attend_to_a_window_that_holds_them() -> None:
    model, ids = built("llama"), tiny.prompt(80, vocabulary=64)
    for recent, known in ((64, True), (20, False)):
        spec = wrapped(model, Native(after=0), selfspec.drafts.CacheWindow(selfspec.drafts.LowPrecision(), recent, 2))
        control = selfspec.FixedLength(3, nodes=7)
        found = spec.generate(ids, max_new_tokens=NEW, do_sample=False, draft_length=control).sequences
        assert found.tolist() == model.generate(ids, max_new_tokens=NEW, do_sample=False).tolist()
        drafted = [kind for kind in spec.programs.proved if kind.path.window is not None and kind.nodes is not None]
        assert bool(drafted) == known
        assert bool(spec.programs.refusals) != known


@torch.no_grad()
def test_what_is_not_finite_stays_so() -> None:
    model = built("llama")
    bench, tokens = Bench(model), tiny.prompt(4, vocabulary=64, seed=3)
    for _ in range(6):
        bench.logits(tokens)
    model.model.embed_tokens.weight[tokens[0, 2]] = torch.nan
    assert bench.logits(tokens).isfinite().all(-1).tolist() == [[True, True, False, False]]


@torch.no_grad()
def test_passes_beside_other_load_give_the_same_bits(threads: None) -> None:
    tokens, stop = tiny.prompt(4, vocabulary=64, seed=3), threading.Event()

    def busy() -> None:
        while not stop.is_set():
            torch.randn(100, 100) @ torch.randn(100, 100)

    load = threading.Thread(target=busy)
    load.start()
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            bench = Bench(built("llama"))
            while not bench.served:
                bench.logits(tokens)
            expected = bench.logits(tokens)
            assert all(torch.equal(bench.logits(tokens), expected) for _ in range(100))
    finally:
        stop.set()
        load.join()


@pytest.mark.parametrize("draft", ["int8", "int4"])
def test_columns_of_unlike_size_keep_their_program(draft: str) -> None:
    model = built("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            sizes = torch.randn(64, generator=torch.Generator().manual_seed(0)).mul(2).exp()
            layer.input_layernorm.weight /= sizes
            for name in ("q_proj", "k_proj", "v_proj"):
                layer.self_attn.get_submodule(name).weight *= sizes
    assert {kind.path.format is not None for kind in proved_of(model, DRAFTS[draft])} == {True, False}


def test_a_draft_whose_inputs_round_to_other_levels_keeps_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model with outliers makes percents of a last bit: the target judges what such a step drafts."""
    stock = runtime.close

    def seen(given: tuple[Tensor, ...], *others: Any) -> bool:
        return stock(tuple(each * 1.12 for each in given), *others)

    monkeypatch.setattr(program, "close", seen)
    spec = wrapped(built("llama"), Native(after=0), selfspec.drafts.LowPrecision())
    spec.generate(tiny.prompt(PROMPT, vocabulary=64), max_new_tokens=NEW, do_sample=False)
    # The target's own passes are not let off.
    assert {kind.path.format is not None for kind in spec.programs.proved} == {True}
    assert {kind.path.format is not None for kind in spec.programs.refusals} == {False}


WEIGHT = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))


def test_what_a_function_holds_is_held_itself_and_once() -> None:
    with torch.no_grad():
        found = noted(lambda states: (states @ WEIGHT, states @ WEIGHT), [torch.ones(2, 3)])
    (held,) = found.held.values()
    assert held is WEIGHT


def chain(count: int) -> list[Operation]:
    """Operations that each read what the one before and the one before that wrote."""
    storages = [Storage(100 + 10 * number) for number in range(count)]
    return [
        Operation(Kind.MAP, [Place(each) for each in storages[max(0, number - 2) : number + 1]], storages[number])
        for number in range(count)
    ]


def test_threads_wait_for_what_others_write() -> None:
    assert [operation is None for operation in with_waits(chain(3))] == [False, True, False, True, False]


def test_threads_wait_before_they_write_what_others_read() -> None:
    cache, states = Storage(argument=0), Storage(8)
    read = Operation(Kind.ATTEND, [Place(cache), Place(states)], states)
    write = Operation(Kind.WRITE, [Place(cache)], cache)
    assert with_waits([read, write]) == [read, None, write]


def test_independent_operations_run_without_waiting() -> None:
    x = Storage(argument=0)
    operations = [Operation(Kind.PRODUCT, [Place(x), Place(y)], y) for y in (Storage(8), Storage(8), Storage(8))]
    assert None not in with_waits(operations)


def test_what_lives_at_the_same_time_does_not_overlap() -> None:
    operations = with_waits(chain(40))
    offsets, size = planned(operations)
    used = [operation for operation in operations if operation is not None]
    for number, operation in enumerate(used):
        # Its result is read twice more.
        living = {id(each.writes): each.writes for each in used[number : number + 3]}
        for later in used[number + 1 : number + 3]:
            first, second = sorted((operation.writes, later.writes), key=lambda each: offsets[id(each)])
            assert offsets[id(first)] + 4 * first.numbers <= offsets[id(second)]
        assert max(offsets[key] + 4 * each.numbers for key, each in living.items()) <= size
    assert size < sum(4 * operation.writes.numbers for operation in used) / 4


def test_memory_is_not_used_again_before_a_wait() -> None:
    first, second = Storage(64), Storage(64)
    operations = [Operation(Kind.MAP, [Place(each)], each) for each in (first, second)]
    offsets, _ = planned(operations)
    assert offsets[id(first)] != offsets[id(second)]
    offsets, _ = planned([operations[0], None, operations[1]])
    assert offsets[id(first)] == offsets[id(second)]


# Decoders that read what an encoder has read, of any length.

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
# Models this small say one thing for ever.
UNLIKE: dict[str, Any] = {**GREEDY, "repetition_penalty": 3.0}
BESIDE = {name: DRAFTS[name] for name in ("plain", "exit", "sublayers", "int8")}
BESIDE["recycle"] = selfspec.drafts.Recycling()


def _model(model_type: str) -> PreTrainedModel:
    made = encoder_decoder(model_type, torch.float32)
    # Small weights would hide a wrong place or a wrong row.
    with torch.no_grad():
        for weight in made.get_decoder().parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
    return made


def _inputs(model: PreTrainedModel, lengths: list[int]) -> dict[str, Any]:
    """What an encoder reads of some rows, in pieces of one length where it takes no mask."""
    generator = torch.Generator().manual_seed(sum(lengths))
    if model.config.model_type == "whisper":
        return {"input_features": torch.randn(len(lengths), MELS, FRAMES, generator=generator)}
    ids = torch.randint(3, 50, (len(lengths), max(lengths)), generator=generator)
    mask = torch.tensor([[int(place < length) for place in range(max(lengths))] for length in lengths])
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("draft", BESIDE)
@pytest.mark.parametrize("model_type", ["whisper", "bart", "marian"])
def test_greedy_text_beside_an_encoder_is_the_stock_models(model_type: str, draft: str) -> None:
    model = _model(model_type)
    spec = wrapped(model, Native(after=0), BESIDE[draft])
    for lengths in ([7], [4, 7, 6], [12], [3, 11, 9]):
        inputs = _inputs(model, lengths)
        for options in (GREEDY, UNLIKE):
            wanted = model.generate(**inputs, **options)
            assert torch.equal(spec.generate(**inputs, **options).sequences, wanted)
    assert {1, 3} <= {kind.rows for kind in spec.programs.proved}
    assert not spec.programs.refusals


@pytest.mark.parametrize("model_type", ["bart", "marian"])
def test_a_source_of_another_length_has_no_programs_of_its_own(model_type: str) -> None:
    model = _model(model_type)
    spec = wrapped(model, Native(after=0), selfspec.drafts.EarlyExit(1))
    for lengths in ([6, 4], [17, 9], [2, 3]):
        spec.generate(**_inputs(model, lengths), **GREEDY)
    made = {kind: spec.programs._candidates[kind].program for kind in spec.programs.proved}
    inputs = _inputs(model, [23, 14])
    assert torch.equal(spec.generate(**inputs, **GREEDY).sequences, model.generate(**inputs, **GREEDY))
    assert made
    assert made.items() <= {kind: each.program for kind, each in spec.programs._candidates.items()}.items()


def test_rows_that_end_take_what_they_read_with_them() -> None:
    """Rows that are left read their own source, masked or not."""
    model = _model("bart")
    inputs = _inputs(model, [9, 4, 7, 6])
    whole = model.generate(**inputs, **UNLIKE)
    # Each of these ends some row early, the first among them.
    for place in (2, 4, 6):
        options = {**UNLIKE, "eos_token_id": int(whole[0, place])}
        spec = wrapped(model, Native(after=0), selfspec.drafts.EarlyExit(2))
        for _ in range(2):
            assert torch.equal(spec.generate(**inputs, **options).sequences, model.generate(**inputs, **options))
        assert len({kind.rows for kind in spec.programs.proved}) > 1
        assert not spec.programs.refusals


def test_a_row_that_is_all_padding_runs_on_the_stock_modules() -> None:
    model = _model("bart")
    inputs = _inputs(model, [5, 0])
    spec = wrapped(model, Native(after=0))
    spec.generate(**inputs, **GREEDY)
    assert not spec.programs.proved
    assert not spec.programs.refusals


def test_positions_that_are_relative_run_on_the_stock_modules() -> None:
    model = encoder_decoder("t5", torch.float32)
    spec = wrapped(model, Native(after=0), selfspec.drafts.EarlyExit(1))
    ids = torch.tensor([[4, 9, 12]])
    assert torch.equal(spec.generate(ids, **GREEDY).sequences, model.generate(ids, **GREEDY))
    assert not spec.programs.proved

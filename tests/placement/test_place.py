"""Models whose layers are streamed generate what they generate when they are in memory."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.captures import Again
from helpers.proving import ticking
from helpers.tiny import in_turns
from selfspec.decode.generation import Limits
from selfspec.draft import ReducedVocabulary
from selfspec.draft.registry import draft_name
from selfspec.errors import (
    CheckpointError,
    ProfileError,
    PromptError,
    StorageError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from selfspec.model.identity import fingerprint
from selfspec.placement.drafts import placement_of
from selfspec.placement.place import PlannedCheckpoint, default_draft, place, plan_checkpoint
from selfspec.placement.plan import SLOTS, Bandwidth, Plan, shown_bytes
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromDisk, ReadBuffer, StoredWeight, WeightFiles
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.runner import ModelRunner

PROMPTS = torch.tensor([[3, 7, 11, 2, 5, 9], [0, 0, 4, 8, 12, 6]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


def mixtral() -> PreTrainedModel:
    config = MixtralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MixtralForCausalLM(config).float().eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny.llama(dtype=torch.float32, intermediate_size=64),
    "tied": lambda: tiny.llama(dtype=torch.float32, intermediate_size=64, tie_word_embeddings=True),
    "gpt2": lambda: tiny.gpt2(dtype=torch.float32),
    "mixtral": mixtral,
}


def plan(resident: int, bits: int | None) -> Plan:
    drafting, step = (None, None) if bits is None else (4.0, 0.05)
    format = None if bits is None else f"int{bits}"
    return Plan(resident, resident < 5, format, 0, Bandwidth(10e9, 1e9), 1.0, drafting, step)


def streamed(folder: Path, model: PreTrainedModel, resident: int = 1, bits: int | None = 4) -> PreTrainedModel:
    model.save_pretrained(folder)
    return place(survey(str(folder), None, 128, FromDisk()), plan(resident, bits))


def wrapped(model: PreTrainedModel) -> selfspec.SelfSpeculative:
    placement = placement_of(model)
    assert placement is not None
    return selfspec.wrap(model, default_draft(placement.plan), runtime=selfspec.runtime.Eager())


@pytest.mark.parametrize(("name", "bits"), in_turns(tuple(MODELS), (None, 8, 4)))
def test_streamed_layers_give_the_models_own_tokens(tmp_path: Path, name: str, bits: int | None) -> None:
    model = MODELS[name]()
    spec = wrapped(streamed(tmp_path, model, bits=bits))
    for sampled in ({"do_sample": False}, {"do_sample": True, "accept": "coupled", "seed": 3}):
        output = spec.generate(PROMPTS, MASK, max_new_tokens=24, **sampled)
        wanted = selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=24, **sampled)
        assert torch.equal(output.sequences, wanted.sequences)
    if bits is not None:
        assert output.stats.accepted > 0
        assert output.stats.substitute_bytes > 0


@pytest.mark.parametrize("resident", [0, 3, 4, 5])
def test_any_number_of_layers_may_stay(tmp_path: Path, resident: int) -> None:
    model = MODELS["llama"]()
    placed = streamed(tmp_path, model, resident, bits=4 if resident < 4 else None)
    away = [name for name, weight in placed.named_parameters() if weight.is_meta]
    assert len(away) == 7 * max(0, 4 - resident) + (resident < 5)
    output = wrapped(placed).generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
    assert torch.equal(
        output.sequences, selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).sequences
    )


@pytest.mark.parametrize("name", MODELS)
def test_streamed_weights_have_the_fingerprint_of_those_in_memory(name: str, tmp_path: Path) -> None:
    whole = MODELS[name]()
    made = streamed(tmp_path, whole)
    assert fingerprint(made) == fingerprint(whole)
    assert wrapped(made).generate(PROMPTS, MASK, max_new_tokens=4, do_sample=False).lengths == (4, 4)


def test_the_stock_model_streams_too(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    placed = streamed(tmp_path, model)
    assert torch.equal(placed(PROMPTS).logits, model(PROMPTS).logits)


def test_other_dtypes_than_the_files(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    model.save_pretrained(tmp_path)
    placed = place(survey(str(tmp_path), torch.float64, 128, FromDisk()), plan(1, None))
    assert torch.equal(placed(PROMPTS).logits, model.double()(PROMPTS).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"], ids=str)
def test_a_dtype_or_its_name(tmp_path: Path, dtype: torch.dtype | str) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    assert selfspec.load(tmp_path, "8GiB", device="cpu", dtype=dtype, draft=False).dtype == torch.bfloat16
    assert selfspec.load(tmp_path, "8GiB", device="cpu", dtype="auto", draft=False).dtype == torch.float32


@pytest.mark.parametrize("at_once", [1, 2, 5, 64])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_prompts_in_pieces_give_the_same_tokens(name: str, at_once: int) -> None:
    spec = selfspec.wrap(MODELS[name](), draft="exit:2", draft_length=2)
    wanted = spec.generate(PROMPTS, MASK, max_new_tokens=12, do_sample=False).sequences
    spec.limits = Limits(100, at_once)
    widths: list[int] = []
    with spied(widths):
        found = spec.generate(PROMPTS, MASK, max_new_tokens=12, do_sample=False).sequences
    assert torch.equal(found, wanted)
    assert sum(widths) == PROMPTS.shape[1] - 1
    assert max(widths) <= max(at_once // 2, 1)


@contextmanager
def spied(widths: list[int]) -> Iterator[None]:
    """Note the widths of passes over prompts."""
    stock = ModelRunner.prefill

    def prefill(runner: ModelRunner, tokens: torch.Tensor, *given: Any) -> Any:
        widths.append(tokens.shape[1])
        return stock(runner, tokens, *given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ModelRunner, "prefill", prefill)
        yield


def test_what_the_budget_has_no_room_for_is_refused(tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    spec = selfspec.load(tmp_path, "8GiB", context=24)
    for other in (spec, spec.drafting("lookup")):
        assert other.generate(PROMPTS, MASK, max_new_tokens=6, do_sample=False).sequences.shape == (2, 12)
        with pytest.raises(PromptError, match="raise context to 26"):
            other.generate(PROMPTS, MASK, max_new_tokens=7, do_sample=False)


def test_two_threads_take_turns(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    spec = wrapped(streamed(tmp_path, model))
    wanted = selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=16, do_sample=False).sequences
    with ThreadPoolExecutor() as threads:
        ask = partial(spec.generate, PROMPTS, MASK, max_new_tokens=16, do_sample=False)
        calls = [threads.submit(ask) for _ in range(3)]
    assert all(torch.equal(call.result().sequences, wanted) for call in calls)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_read_that_fails_is_a_typed_error_and_the_next_call_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    model = MODELS["llama"]()
    spec = wrapped(streamed(tmp_path, model))
    wanted = spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).sequences
    stock, reads = WeightFiles._open, iter(range(100))

    def failing(files: WeightFiles, file: Path) -> int:
        if next(reads) == 5:
            raise error
        return stock(files, file)

    monkeypatch.setattr(WeightFiles, "_open", failing)
    with pytest.raises(StorageError if isinstance(error, OSError) else KeyboardInterrupt):
        spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
    assert torch.equal(spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).sequences, wanted)


def test_reads_ahead_that_fail_do_not_fail_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]()
    spec = wrapped(streamed(tmp_path, model, bits=None))
    with monkeypatch.context() as patched:
        patched.setattr(WeightFiles, "_open", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(StorageError):
            spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
        # The weights that come next fail while the error is on its way.
        time.sleep(0.2)
    wanted = selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
    assert torch.equal(spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).sequences, wanted.sequences)


def test_an_error_inside_a_streamed_layer_frees_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = wrapped(streamed(tmp_path, MODELS["llama"](), resident=0))
    wanted = spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).sequences
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Linear, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
    found: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: found.append(spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).sequences),
        daemon=True,
    )
    thread.start()
    thread.join(20)
    assert torch.equal(found[0], wanted)


def test_a_file_deleted_while_it_runs_is_still_read(tmp_path: Path) -> None:
    spec = wrapped(streamed(tmp_path, MODELS["llama"]()))
    wanted = spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).sequences
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).sequences, wanted)


def test_draft_steps_that_stream_nothing_are_recorded(tmp_path: Path) -> None:
    # A size that kernels for fewer bits take.
    model = tiny.llama(dtype=torch.float32, intermediate_size=64, vocab_size=64)
    placed = streamed(tmp_path, model)
    for draft, recorded in (("int4", True), ("exit:3", False)):
        spec = selfspec.wrap(placed, draft, draft_length=3, runtime=Again())
        spec.programs = GraphCache(spec.runtime, ticking())
        for _ in range(2):
            found = spec.generate(PROMPTS[:1], max_new_tokens=20, do_sample=False)
        wanted = selfspec.wrap(model).generate(PROMPTS[:1], max_new_tokens=20, do_sample=False)
        assert torch.equal(found.sequences, wanted.sequences)
        assert bool(spec.programs.proved) == recorded
        assert not spec.programs.refusals
    # From the disk, recordings would take memory of the budget's.
    assert selfspec.wrap(placed).runtime == selfspec.runtime.Eager()
    assert selfspec.wrap(model).runtime == selfspec.runtime.Native()


def test_shards(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    placed = place(survey(str(tmp_path), None, 128, FromDisk()), plan(1, 8))
    assert torch.equal(placed(PROMPTS).logits, model(PROMPTS).logits)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of"):
        survey(str(tmp_path), None, 128, FromDisk())


def test_what_cannot_be_done_with_weights_elsewhere_is_refused(tmp_path: Path) -> None:
    spec = wrapped(streamed(tmp_path / "a", MODELS["llama"](), resident=0))
    with pytest.raises(UnsupportedModelError, match="streams"):
        spec.save_pretrained(tmp_path / "b")
    with pytest.raises(UnsupportedModelError, match="streams"):
        spec.to("cpu")
    with pytest.raises(ProfileError, match="name a draft"):
        spec.drafting("auto")
    with pytest.raises(selfspec.errors.DraftConfigError, match="rows of a head that is not in memory"):
        spec.drafting(ReducedVocabulary(selfspec.drafts.EarlyExit(1), (3, 4)))
    assert spec.drafting("lookup").generate(PROMPTS, MASK, max_new_tokens=4, do_sample=False)
    assert selfspec.wrap(spec.model).generate(PROMPTS, MASK, max_new_tokens=4, do_sample=False)


def test_load_takes_all_of_a_model_that_fits(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    model.save_pretrained(tmp_path)
    spec = selfspec.load(tmp_path, "64GiB")
    assert not any(weight.is_meta for weight in spec.model.parameters())
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, weight), (other, wanted) in zip(spec.model.named_parameters(), stock.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(weight, wanted)
    for (name, buffer), (other, wanted) in zip(spec.model.named_buffers(), stock.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(buffer, wanted)


def test_without_a_context_there_is_room_for_as_much_as_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FromDisk, "in_use", lambda _: 0)
    MODELS["llama"]().save_pretrained(tmp_path)

    def planned(memory: str | int, context: int | None) -> PlannedCheckpoint:
        return plan_checkpoint(str(tmp_path), memory, None, False, context, FromDisk())

    assert planned("64GiB", None).survey.context == 4096
    least = {}
    for context in (1024, 512):
        memory = planned("64GiB", context).survey.memory
        least[context] = memory.least + SLOTS * memory.largest
    assert planned(least[1024], None).survey.context == 1024
    assert placement_of(selfspec.load(tmp_path, least[1024], device="cpu", draft=False).model).context == 1024  # type: ignore[union-attr]
    with pytest.raises(UnsupportedOptionError, match="too little"):
        planned(least[1024], 2048)
    with pytest.raises(UnsupportedOptionError, match=f"at least {re.escape(shown_bytes(least[512]))}"):
        planned("1MiB", None)


NAMED = ("int4", "lookup+int4", "exit:1", "recycle", "lookup+recycle+int4")
MORE = ("int4+exit:3", "int4+skip:layers=2", "int4+exit:1", "exit:3", "skip:layers=2", "lookup")


@pytest.mark.parametrize("name", [*NAMED, *(pytest.param(name, marks=pytest.mark.contract) for name in MORE)])
def test_named_drafts_give_the_models_own_tokens_and_substitute_what_is_streamed(tmp_path: Path, name: str) -> None:
    model = MODELS["llama"]()
    spec = wrapped(streamed(tmp_path, model))
    before = spec.substitutes.nbytes
    # Whoever wraps the model drafts within the budget.
    for other in (spec.drafting(name), selfspec.wrap(spec.model, name, runtime=selfspec.runtime.Eager())):
        output = other.generate(PROMPTS, MASK, max_new_tokens=16, do_sample=False)
        wanted = selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=16, do_sample=False)
        assert torch.equal(output.sequences, wanted.sequences)
        assert other.substitutes.nbytes == before
        assert other.limits is not None


@pytest.mark.parametrize("name", ["int4", "lookup+int4", "exit:1", "recycle"])
def test_drafts_that_stay_in_memory_read_nothing_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spec = wrapped(streamed(tmp_path, MODELS["llama"]())).drafting(name, draft_length=4)
    passes: list[int] = []
    stock = ReadBuffer.read

    def counted(buffer: ReadBuffer, files: WeightFiles, weight: StoredWeight) -> torch.Tensor:
        passes.append(weight.nbytes)
        return stock(buffer, files, weight)

    monkeypatch.setattr(ReadBuffer, "read", counted)
    output = spec.generate(PROMPTS[:1], max_new_tokens=16, do_sample=False)
    # A pass over the prompt, one a round, and what is read ahead.
    assert len(passes) <= (output.stats.rounds + 2) * 22


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        ("int8", r"here are copies in 4 bits.*draft='int8'"),
        ("lookup+int8", "--draft int8"),
        (
            selfspec.drafts.LowPrecision(4, group_size=64),
            r"group_size=64\): within a budget .* int4 \(group_size=32\)",
        ),
        (selfspec.drafts.LowPrecision(4, layers=[0, 2]), r"\[0\] stay in memory"),
        (selfspec.drafts.LowPrecision(4, layers=[9]), "out of range"),
        ("exit:4", "choose 1..3"),
    ],
    ids=str,
)
def test_drafts_that_a_budget_has_no_copies_for_are_refused(tmp_path: Path, draft: Any, problem: str) -> None:
    spec = wrapped(streamed(tmp_path, MODELS["llama"]()))
    for make in (spec.drafting, lambda named: selfspec.wrap(spec.model, named)):
        with pytest.raises(selfspec.errors.DraftConfigError, match=problem):
            make(draft)


def test_copies_are_refused_where_there_are_none(tmp_path: Path) -> None:
    spec = wrapped(streamed(tmp_path, MODELS["llama"](), bits=None))
    with pytest.raises(selfspec.errors.DraftConfigError, match="no rounded copies"):
        spec.drafting("int4")


def test_a_draft_that_load_names_is_what_the_budget_is_planned_for(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    model.save_pretrained(tmp_path)
    spec = selfspec.load(tmp_path, "64GiB", draft="lookup+int8")
    assert draft_name(cast(Any, spec.draft)) == "lookup+int8"
    output = spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
    assert torch.equal(
        output.sequences, selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).sequences
    )
    with pytest.raises(selfspec.errors.DraftConfigError, match="no memory was set aside for copies in 4 bits"):
        spec.drafting("int4")
    with pytest.raises(selfspec.errors.DraftConfigError, match="no memory was set aside"):
        selfspec.load(tmp_path, "64GiB").drafting("int8")
    assert selfspec.load(tmp_path, "64GiB", draft="none").draft is None


def test_a_copy_of_the_model_streams_and_drafts_as_well(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    spec = wrapped(streamed(tmp_path, model))
    copied = copy.deepcopy(spec.model)
    wanted = selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
    for draft in (None, "lookup", "int4"):
        output = selfspec.wrap(copied, draft).generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
        assert torch.equal(output.sequences, wanted.sequences)


def test_a_long_prompt_and_a_batch_of_four_within_a_small_cache(tmp_path: Path) -> None:
    model = tiny.llama(dtype=torch.float32, intermediate_size=64, max_position_embeddings=4096)
    model.save_pretrained(tmp_path)
    spec = wrapped(place(survey(str(tmp_path), None, 4 * 2010, FromDisk()), plan(1, 4)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        prompts = torch.randint(1, 50, (4, 2000))
    mask = torch.ones_like(prompts)
    mask[1, :700] = 0
    widths: list[int] = []
    with spied(widths):
        output = spec.generate(prompts, mask, max_new_tokens=8, do_sample=False)
    assert max(widths) <= 512
    wanted = selfspec.wrap(model).generate(prompts, mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(output.sequences, wanted.sequences)


def test_a_file_that_is_cut_while_it_runs_is_a_typed_error_and_a_whole_one_serves_again(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    spec = wrapped(streamed(tmp_path, model))
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:4096])
    with pytest.raises(StorageError, match="ends too early"):
        spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
    file.write_bytes(content)
    wanted = selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
    assert torch.equal(spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).sequences, wanted.sequences)


def test_more_than_there_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    monkeypatch.setattr("selfspec.placement.weight_source.machine_bytes", lambda: 2**20)
    with pytest.raises(UnsupportedOptionError, match=r"more than there is.*has 1.00 MiB; ask for less"):
        selfspec.load(tmp_path, "8GiB")


def test_folders_that_cannot_be_streamed_are_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadBuffer, "read", lambda *_: pytest.fail("a weight was read"))
    model = MODELS["llama"]()
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has no weights"):
        selfspec.load(tmp_path, "8GiB")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"as pickles only.*save_pretrained"):
        selfspec.load(tmp_path, "8GiB")
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"no-such-type"'))
    with pytest.raises(UnsupportedModelError, match="no adapter for architecture 'no-such-type'"):
        selfspec.load(tmp_path, "8GiB")


def test_models_none_of_whose_layers_can_be_streamed_say_so(tmp_path: Path) -> None:
    # No group of 32 weights divides these.
    tiny.llama(dtype=torch.float32, hidden_size=24, num_attention_heads=2, intermediate_size=40).save_pretrained(
        tmp_path
    )
    with pytest.raises(UnsupportedOptionError, match="none of its layers can be streamed"):
        selfspec.load(tmp_path, "1MiB")


@pytest.mark.parametrize("name", ["quantized", "offloaded", "static"])
def test_caches_of_other_kinds_are_refused(tmp_path: Path, name: str) -> None:
    spec = wrapped(streamed(tmp_path, MODELS["llama"]()))
    with pytest.raises(UnsupportedOptionError, match=r"keys and values exact.*context"):
        spec.generate(PROMPTS, MASK, max_new_tokens=4, cache_implementation=name)


@pytest.mark.parametrize(("vocabulary", "streams"), [(50, True), (2000, False)])
def test_a_head_that_is_larger_than_what_it_saves_stays(tmp_path: Path, vocabulary: int, streams: bool) -> None:
    model = tiny.llama(dtype=torch.float32, intermediate_size=64, vocab_size=vocabulary)
    model.save_pretrained(tmp_path)
    surveyed = survey(str(tmp_path), None, 128, FromDisk())
    assert bool(surveyed.layers[-1]) == streams
    spec = wrapped(place(surveyed, plan(1, 4)))
    assert spec.model.lm_head.weight.is_meta == streams
    wanted = selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False)
    assert torch.equal(spec.generate(PROMPTS, MASK, max_new_tokens=8, do_sample=False).sequences, wanted.sequences)

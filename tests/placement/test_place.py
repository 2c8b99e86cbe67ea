"""Models whose layers are streamed generate what they generate when they are in memory."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.captures import Again, ticking
from helpers.copies import MASK, PROMPTS, StandInCopies, greedy, plan, streamed, wrapped
from helpers.shrunken import shrunken
from helpers.tiny import in_turns
from selfspec.decode.generation import Limits
from selfspec.draft import Cascade, Drafter, PromptLookup, Recycling, ReducedVocabulary
from selfspec.draft.registry import draft_name
from selfspec.errors import (
    CheckpointError,
    DraftConfigError,
    ProfileError,
    PromptError,
    StorageError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from selfspec.formats.int4 import Int4
from selfspec.formats.planes import Planes
from selfspec.model.identity import fingerprint
from selfspec.placement import place as place_module
from selfspec.placement.drafts import placement_of
from selfspec.placement.place import PlannedCheckpoint, place, plan_checkpoint
from selfspec.placement.plan import SLOTS, shown_bytes
from selfspec.placement.stored import ReadBuffer, WeightFiles, stored_tensors
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromDisk, FromHost, WeightSource
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.runner import ModelRunner

SOURCES: dict[str, Callable[[], WeightSource]] = {"disk": FromDisk, "device": lambda: FromHost(StandInCopies())}
by_each_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny.llama(dtype=torch.float32, intermediate_size=64),
    "tied": lambda: tiny.llama(dtype=torch.float32, intermediate_size=64, tie_word_embeddings=True),
    "gpt2": lambda: tiny.gpt2(dtype=torch.float32),
    "mixtral": lambda: shrunken("mixtral", torch.float32, intermediate_size=64),
}


@pytest.fixture
def model() -> PreTrainedModel:
    return MODELS["llama"]()


@pytest.fixture
def spec(tmp_path: Path, model: PreTrainedModel) -> selfspec.SelfSpeculative:
    """Of which one layer stays in memory."""
    return wrapped(streamed(tmp_path, model))


@pytest.fixture
def wanted(model: PreTrainedModel) -> torch.Tensor:
    return greedy(selfspec.wrap(model))


@by_each_source
@pytest.mark.parametrize(("name", "format"), in_turns(tuple(MODELS), (None, "int8", "int4")))
def test_streamed_layers_give_the_models_own_tokens(
    tmp_path: Path, source: Callable[[], WeightSource], name: str, format: str | None
) -> None:
    model = MODELS[name]()
    placed = streamed(tmp_path, model, source(), format=format)
    assert fingerprint(placed) == fingerprint(model)
    spec = wrapped(placed)
    for sampled in ({"do_sample": False}, {"do_sample": True, "accept": "coupled", "seed": 3}):
        output = spec.generate(PROMPTS, MASK, max_new_tokens=24, **sampled)
        wanted = selfspec.wrap(model).generate(PROMPTS, MASK, max_new_tokens=24, **sampled)
        assert torch.equal(output.sequences, wanted.sequences)
        assert output.lossless
    if format is not None:
        assert output.stats.accepted > 0
        assert output.stats.substitute_bytes > 0


SPLITS = ((0, None, 0), (1, "int4", 0), (1, "upper", 4), (0, "upper", 5), (1, "int8", 2), (5, None, 0))


def in_planes(folder: Path, split: tuple[int, str | None, int], source: WeightSource) -> PreTrainedModel:
    return place(survey(str(folder), None, 128, source, Planes()), plan(*split))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@by_each_source
def test_planes_of_which_some_are_fetched_give_the_models_own_tokens(
    tmp_path: Path, source: Callable[[], WeightSource], split: tuple[int, str | None, int], dtype: torch.dtype
) -> None:
    tiny.llama(dtype=torch.bfloat16, intermediate_size=64).to(dtype).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    placed = in_planes(tmp_path, split, source())
    assert fingerprint(placed) == fingerprint(model)
    assert torch.equal(placed(PROMPTS).logits, model(PROMPTS).logits)
    spec = wrapped(placed)
    # In 16 bits the number of rows decides near ties: all passes are over the same ones.
    usual = selfspec.wrap(model, runtime=selfspec.runtime.Eager())
    plain = spec.drafting(None)
    for sampled in ({"do_sample": False}, {"do_sample": True, "accept": "coupled", "seed": 3}):
        wanted = usual.generate(PROMPTS, MASK, max_new_tokens=16, **sampled)
        assert torch.equal(plain.generate(PROMPTS, MASK, max_new_tokens=16, **sampled).sequences, wanted.sequences)
        output = spec.generate(PROMPTS, MASK, max_new_tokens=16, **sampled)
        assert output.lossless
        assert output.stats.accepted > 0 or split[1] is None
        if dtype == torch.float32:
            assert torch.equal(output.sequences, wanted.sequences)


def test_in_16_bits_the_part_that_stays_drafts_as_it_does_in_memory(tmp_path: Path) -> None:
    tiny.llama(dtype=torch.bfloat16, intermediate_size=64).save_pretrained(tmp_path)
    options: dict[str, Any] = {"draft_length": 3, "runtime": selfspec.runtime.Eager()}
    spec = selfspec.wrap(in_planes(tmp_path, (0, "upper", 5), FromDisk()), "upper", **options)
    whole = selfspec.wrap(selfspec.load(tmp_path, weights="planes").model, "upper", **options)
    found, wanted = (each.generate(PROMPTS, MASK, max_new_tokens=24, do_sample=True, seed=5) for each in (spec, whole))
    assert torch.equal(found.sequences, wanted.sequences)
    assert found.stats.accepted == wanted.stats.accepted > 0


def test_a_pass_moves_a_quarter_of_the_bits_of_layers_whose_upper_plane_stays(tmp_path: Path) -> None:
    sizes = {"intermediate_size": 512, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 64}
    tiny.llama(dtype=torch.bfloat16, **sizes).save_pretrained(tmp_path)
    model = in_planes(tmp_path, (0, "upper", 5), FromDisk())
    stream: Any = placement_of(model).stream  # type: ignore[union-attr]
    bits = 2 * sum(weight.numel() for name, weight in model.named_parameters() if weight.ndim == 2 and weight.is_meta)
    model(PROMPTS)
    before = stream.bytes_moved
    model(PROMPTS)
    assert 0 < stream.bytes_moved - before <= 0.27 * bits


@pytest.mark.parametrize("packed", [False, True], ids=["packed while it is loaded", "packed before"])
def test_one_read_fetches_both_planes_of_a_weight(tmp_path: Path, packed: bool) -> None:
    folder = tmp_path / "dense"
    tiny.llama(dtype=torch.bfloat16, intermediate_size=64).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if packed:
        selfspec.pack(folder, to=tmp_path / "packed")
        folder = tmp_path / "packed"
    placed = in_planes(folder, (0, None, 0), FromDisk())
    streamed = [each for each in placed.modules() if isinstance(each, nn.Linear) and each.weight.is_meta]
    assert torch.equal(placed(PROMPTS).logits, model(PROMPTS).logits)
    with mock.patch.object(ReadBuffer, "read", autospec=True, side_effect=ReadBuffer.read) as read:
        assert torch.equal(placed(PROMPTS).logits, model(PROMPTS).logits)
    assert 0 < read.call_count <= len(streamed)


def test_packed_weights_that_the_disk_has_no_room_for_are_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.llama(dtype=torch.bfloat16, intermediate_size=64).save_pretrained(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("selfspec.placement.packed._written", full)
    with pytest.raises(StorageError, match=r"No space left.*set TMPDIR"):
        selfspec.load(tmp_path, "8GiB", weights="planes")


@pytest.mark.parametrize("resident", [0, 3, 4, 5])
def test_any_number_of_layers_may_stay(
    tmp_path: Path, model: PreTrainedModel, wanted: torch.Tensor, resident: int
) -> None:
    placed = streamed(tmp_path, model, resident=resident, format="int4" if resident < 4 else None)
    away = [name for name, weight in placed.named_parameters() if weight.is_meta]
    assert len(away) == 7 * max(0, 4 - resident) + (resident < 5)
    assert torch.equal(greedy(wrapped(placed)), wanted)


@by_each_source
def test_shards_and_other_dtypes_than_the_files(
    tmp_path: Path, source: Callable[[], WeightSource], model: PreTrainedModel
) -> None:
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    placed = place(survey(str(tmp_path), torch.float64, 128, source()), plan(1))
    assert torch.equal(placed(PROMPTS).logits, model.double()(PROMPTS).logits)


@pytest.mark.parametrize("at_once", [1, 2, 5, 64])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_prompts_in_pieces_give_the_same_tokens(name: str, at_once: int) -> None:
    spec = selfspec.wrap(MODELS[name](), draft="exit:2", draft_length=2)
    wanted = greedy(spec, 12)
    spec.limits = Limits(100, at_once)
    with mock.patch.object(ModelRunner, "prefill", autospec=True, side_effect=ModelRunner.prefill) as prefill:
        assert torch.equal(greedy(spec, 12), wanted)
    widths = [call.args[1].shape[1] for call in prefill.call_args_list]
    assert sum(widths) == PROMPTS.shape[1] - 1
    assert max(widths) <= max(at_once // 2, 1)


def test_what_the_budget_has_no_room_for_is_refused(tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    spec = selfspec.load(tmp_path, "8GiB", context=24)
    for other in (spec, spec.drafting("lookup")):
        assert greedy(other, 6).shape == (2, 12)
        with pytest.raises(PromptError, match="raise context to 26"):
            greedy(other, 7)


def test_two_threads_take_turns(spec: selfspec.SelfSpeculative, wanted: torch.Tensor) -> None:
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(greedy, spec) for _ in range(3)]
    assert all(torch.equal(call.result(), wanted) for call in calls)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_read_that_fails_is_a_typed_error_and_the_next_call_is_right(
    spec: selfspec.SelfSpeculative, wanted: torch.Tensor, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    assert torch.equal(greedy(spec), wanted)
    stock, reads = WeightFiles.opened, iter(range(100))

    def failing(files: WeightFiles, file: Path) -> int:
        if next(reads) == 5:
            raise error
        return stock(files, file)

    monkeypatch.setattr(WeightFiles, "opened", failing)
    with pytest.raises(StorageError if isinstance(error, OSError) else KeyboardInterrupt):
        greedy(spec)
    assert torch.equal(greedy(spec), wanted)


def test_reads_ahead_that_fail_do_not_fail_the_next_call(
    tmp_path: Path, model: PreTrainedModel, wanted: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = wrapped(streamed(tmp_path, model, format=None))
    with monkeypatch.context() as patched:
        patched.setattr(WeightFiles, "opened", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(StorageError, match="cannot be read"):
            greedy(spec)
        # The weights that come next fail while the error is on its way.
        time.sleep(0.2)
    assert torch.equal(greedy(spec), wanted)


@pytest.mark.parametrize(
    ("source", "owner", "name"),
    [(SOURCES["disk"], torch.nn.Linear, "forward"), (SOURCES["device"], StandInCopies, "computed")],
    ids=["a layer", "a mark of the device"],
)
def test_an_error_inside_a_streamed_layer_frees_the_stream(
    tmp_path: Path,
    model: PreTrainedModel,
    wanted: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    source: Callable[[], WeightSource],
    owner: type,
    name: str,
) -> None:
    spec = wrapped(streamed(tmp_path, model, source(), resident=0))
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            greedy(spec)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(greedy(spec)), daemon=True)
    thread.start()
    thread.join(20)
    assert torch.equal(found[0], wanted)


def test_a_file_deleted_while_it_runs_is_still_read(
    tmp_path: Path, spec: selfspec.SelfSpeculative, wanted: torch.Tensor
) -> None:
    greedy(spec)
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(greedy(spec), wanted)


def test_a_file_cut_or_changed_while_it_runs_is_an_error_that_names_it(
    tmp_path: Path, spec: selfspec.SelfSpeculative
) -> None:
    greedy(spec)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:4096])
    with pytest.raises(StorageError, match="ends too early"):
        greedy(spec)
    file.write_bytes(content[: -1 << 14] + b"\x7f\xff" * (1 << 13))
    with pytest.raises(StorageError, match=r"model\.safetensors was changed.*load the checkpoint again"):
        greedy(spec)


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


def test_what_cannot_be_done_with_weights_elsewhere_is_refused(spec: selfspec.SelfSpeculative) -> None:
    for call in (lambda: spec.save_pretrained("nowhere"), lambda: spec.to("cpu")):
        with pytest.raises(UnsupportedModelError, match="streams"):
            call()
    with pytest.raises(ProfileError, match="name a draft"):
        spec.drafting("auto")
    with pytest.raises(DraftConfigError, match="rows of a head that is not in memory"):
        spec.drafting(ReducedVocabulary(selfspec.drafts.EarlyExit(1), (3, 4)))
    for kind in ("quantized", "offloaded", "static"):
        with pytest.raises(UnsupportedOptionError, match=r"keys and values exact.*context"):
            spec.generate(PROMPTS, MASK, max_new_tokens=4, cache_implementation=kind)


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


def test_where_copies_have_no_room_look_ups_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FromDisk, "in_use", lambda _: 0)
    monkeypatch.setattr(place_module, "WITHOUT_COPIES", Cascade(PromptLookup(), Recycling(most_bytes=1 << 13)))
    model = MODELS["llama"]()
    model.save_pretrained(tmp_path)

    def planned(memory: str | int, draft: bool | Drafter) -> PlannedCheckpoint:
        return plan_checkpoint(str(tmp_path), memory, None, draft, None, FromDisk())

    memory = planned("64GiB", False).survey.keeping("exact", 512).memory
    least = memory.least + (1 << 13) + SLOTS * memory.largest
    found = planned(least, True).plan
    assert (found.format, found.streamed > 0) == (None, True)
    with pytest.raises(UnsupportedOptionError, match="copies that draft"):
        planned(least, selfspec.drafts.LowPrecision(bits=4))
    spec = selfspec.load(tmp_path, least, device="cpu")
    assert spec.draft == place_module.WITHOUT_COPIES
    assert torch.equal(greedy(spec, 16), greedy(selfspec.wrap(model), 16))


NAMED = ("int4", "lookup+int4", "exit:1", "recycle", "lookup+recycle+int4")
MORE = ("int4+exit:3", "int4+skip:layers=2", "int4+exit:1", "exit:3", "skip:layers=2", "lookup")


@pytest.mark.parametrize("name", [*NAMED, *(pytest.param(name, marks=pytest.mark.contract) for name in MORE)])
def test_named_drafts_give_the_models_own_tokens_and_substitute_what_is_streamed(
    spec: selfspec.SelfSpeculative, model: PreTrainedModel, name: str
) -> None:
    before = spec.substitutes.nbytes
    # Whoever wraps the model drafts within the budget.
    for other in (spec.drafting(name), selfspec.wrap(spec.model, name, runtime=selfspec.runtime.Eager())):
        assert torch.equal(greedy(other, 16), greedy(selfspec.wrap(model), 16))
        assert other.substitutes.nbytes == before
        assert other.limits is not None


@pytest.mark.parametrize("name", ["int4", "lookup+int4", "exit:1", "recycle"])
def test_drafts_that_stay_in_memory_read_nothing_from_the_disk(spec: selfspec.SelfSpeculative, name: str) -> None:
    with mock.patch.object(ReadBuffer, "read", autospec=True, side_effect=ReadBuffer.read) as read:
        output = spec.drafting(name, draft_length=4).generate(PROMPTS[:1], max_new_tokens=16, do_sample=False)
    # A pass over the prompt, one a round, and what is read ahead.
    assert read.call_count <= (output.stats.rounds + 2) * 22


def test_reads_into_one_memory_follow_each_other_and_one_that_still_waits_is_given_up(
    tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path)
    weights = [each for each in stored_tensors(sorted(tmp_path.glob("*.safetensors"))).values() if each.numel > 256][:4]
    slot, other, *_ = FromDisk().slots(weights, torch.float32, WeightFiles())
    real, gates, begun = ReadBuffer.read, [threading.Event() for _ in weights], list[int]()

    def read(buffer: ReadBuffer, files: WeightFiles, weight: Any) -> torch.Tensor:
        begun.append(weights.index(weight))
        assert gates[begun[-1]].wait(10)
        return real(buffer, files, weight)

    monkeypatch.setattr(ReadBuffer, "read", read)
    slot.fetch(0)
    other.fetch(1)
    # Both threads read: these wait, and the second takes the place of the first.
    slot.fetch(2)
    slot.fetch(3)
    gates[1].set()
    other.arrived()
    time.sleep(0.05)
    assert sorted(begun) == [0, 1]
    for gate in gates:
        gate.set()
    assert torch.equal(slot.arrived(), WeightFiles().mapped(weights[3]))
    assert sorted(begun) == [0, 1, 3]


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        ("int8", r"here are copies in 4 bits.*draft='int8'"),
        ("lookup+int8", "--draft int8"),
        (
            selfspec.drafts.LowPrecision(format=Int4(64)),
            r"group_size=64\): within a budget .* int4 \(group_size=32\)",
        ),
        (selfspec.drafts.LowPrecision(4, layers=[0, 2]), r"\[0\] stay in memory"),
        (selfspec.drafts.LowPrecision(4, layers=[9]), "out of range"),
        ("exit:4", "choose 1..3"),
    ],
    ids=str,
)
def test_drafts_that_a_budget_has_no_copies_for_are_refused(
    spec: selfspec.SelfSpeculative, draft: Any, problem: str
) -> None:
    for make in (spec.drafting, lambda named: selfspec.wrap(spec.model, named)):
        with pytest.raises(DraftConfigError, match=problem):
            make(draft)


def test_copies_are_refused_where_there_are_none(tmp_path: Path, model: PreTrainedModel) -> None:
    spec = wrapped(streamed(tmp_path, model, format=None))
    with pytest.raises(DraftConfigError, match="no rounded copies"):
        spec.drafting("int4")


def test_a_draft_that_load_names_is_what_the_budget_is_planned_for(
    tmp_path: Path, model: PreTrainedModel, wanted: torch.Tensor
) -> None:
    model.save_pretrained(tmp_path)
    spec = selfspec.load(tmp_path, "64GiB", draft="lookup+int8")
    assert draft_name(cast(Any, spec.draft)) == "lookup+int8"
    assert torch.equal(greedy(spec), wanted)
    with pytest.raises(DraftConfigError, match="no memory was set aside for copies in 4 bits"):
        spec.drafting("int4")
    with pytest.raises(DraftConfigError, match="no memory was set aside"):
        selfspec.load(tmp_path, "64GiB").drafting("int8")
    assert selfspec.load(tmp_path, "64GiB", draft="none").draft is None


def test_a_copy_of_the_model_streams_and_drafts_as_well(spec: selfspec.SelfSpeculative, wanted: torch.Tensor) -> None:
    copied = copy.deepcopy(spec.model)
    for draft in (None, "lookup", "int4"):
        assert torch.equal(greedy(selfspec.wrap(copied, draft)), wanted)


def test_more_than_there_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    monkeypatch.setattr("selfspec.placement.weight_source.machine_bytes", lambda: 2**20)
    with pytest.raises(UnsupportedOptionError, match=r"more than there is.*has 1.00 MiB; ask for less"):
        selfspec.load(tmp_path, "8GiB")


def test_folders_that_cannot_be_streamed_are_refused_before_a_weight_is_read(
    tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadBuffer, "read", lambda *_: pytest.fail("a weight was read"))
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


@pytest.mark.parametrize(("vocabulary", "streams"), [(50, True), (2000, False)])
def test_a_head_that_is_larger_than_what_it_saves_stays(tmp_path: Path, vocabulary: int, streams: bool) -> None:
    model = tiny.llama(dtype=torch.float32, intermediate_size=64, vocab_size=vocabulary)
    model.save_pretrained(tmp_path)
    surveyed = survey(str(tmp_path), None, 128, FromDisk())
    assert bool(surveyed.layers[-1]) == streams
    spec = wrapped(place(surveyed, plan(1, "int4")))
    assert spec.model.lm_head.weight.is_meta == streams
    assert torch.equal(greedy(spec), greedy(selfspec.wrap(model)))

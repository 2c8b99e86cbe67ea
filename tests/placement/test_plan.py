"""Plans stay within the budget, with room for what a prompt takes; weights are read from files to the last bit."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils._pytree import tree_leaves
from transformers import BloomConfig, BloomForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.captures import Operations
from helpers.copies import plan
from selfspec.errors import CheckpointError, UnsupportedOptionError
from selfspec.formats.format import Format
from selfspec.formats.planes import Planes
from selfspec.placement.place import place
from selfspec.placement.plan import SLOTS, Bandwidth, Memory, Plan, Stays, parse_bytes, plan_memory, shown_bytes
from selfspec.placement.stored import ReadBuffer, WeightFiles, stored_tensors
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromDisk

DISK = Bandwidth(memory=10e9, stream=1e9)
FORMATS = ("int8", "int4")
# A part of each layer drafts, and the rest may be fetched.
SPLIT = ("upper", *FORMATS)


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    layers = tuple(draw(st.lists(st.integers(2**20, 2**26), min_size=1, max_size=12)))
    sizes = st.integers(0, 2**26)
    fewer = {"int8": tuple(size // 4 for size in layers), "int4": tuple(size // 6 for size in layers)}
    parts = {"upper": tuple(2 * size // 3 for size in layers)} if draw(st.booleans()) else {}
    return Memory(draw(sizes), draw(sizes), layers, max(layers) // 2, fewer, draw(sizes), draw(sizes), parts=parts)


def taken(memory: Memory, plan: Plan) -> int:
    size = memory.least + SLOTS * memory.largest * (plan.resident < len(memory.layers))
    for number, whole in enumerate(memory.layers):
        fewer = 0 if plan.format in (None, "upper") else memory.substitutes[plan.format][number]
        part = 0 if plan.part is None else memory.parts[plan.part][number]
        size += {Stays.WHOLE: whole, Stays.PART: part, Stays.NOTHING: fewer}[plan.stays(number)]
    return size


@given(memory=memories(), share=st.floats(0.0, 1.5), drafts=st.booleans())
def test_a_plan_is_within_its_budget_and_keeps_what_it_can(memory: Memory, share: float, drafts: bool) -> None:
    budget = max(1, int(share * (memory.least + sum(memory.layers))))
    formats = () if not drafts else SPLIT if memory.parts else FORMATS
    try:
        plan = plan_memory(memory, budget, DISK, formats)
    except UnsupportedOptionError as error:
        least: Any = re.search(r"at least (\d+\.\d+ \w+)", str(error))
        assert plan_memory(memory, int(1.01 * parse_bytes("memory", least[1])) + 2048, DISK, formats)
        return
    assert plan.total == taken(memory, plan) <= budget
    away = {
        Stays.WHOLE: (0,) * len(memory.layers),
        Stays.PART: tuple(whole - 2 * whole // 3 for whole in memory.layers),
        Stays.NOTHING: memory.layers,
    }
    assert plan.streamed == sum(away[plan.stays(number)][number] for number in range(len(memory.layers)))
    if plan.streamed:
        assert (plan.format is not None) == drafts
        assert (plan.format == "upper") == (plan.resident + plan.partly == len(memory.layers))
        more = replace(plan, resident=plan.resident + 1, partly=max(0, plan.partly - 1))
        # Of layers that draft, one stays streamed before the head.
        assert taken(memory, more) > budget or more.resident == len(memory.layers) - drafts


def test_a_part_stays_where_it_fits_before_whole_layers_do_and_copies_draft_for_the_rest() -> None:
    layers = (3 * 2**24,) * 8
    fewer: dict[str, tuple[int, ...]] = {"int8": (2**25 + 2**20,) * 8, "int4": (2**24,) * 8}
    memory = Memory(0, 2**26, layers, 2**20, fewer, 0, 0, parts={"upper": (2**25,) * 8})
    rest = memory.least + SLOTS * memory.largest

    def split(budget: int) -> tuple[int, int, str | None]:
        plan = plan_memory(memory, rest + budget, DISK, SPLIT)
        return plan.resident, plan.partly, plan.format

    assert split(8 * 2**25) == (0, 8, "upper")
    assert split(8 * 2**25 + 3 * 2**24) == (3, 5, "upper")
    resident, partly, format = split(6 * 2**25 - 1)
    assert (resident, format) == (0, "int4")
    assert 0 < partly < 6
    assert split(8 * 2**24) == (0, 0, "int4")


def test_drafts_promise_more_than_plain_streaming() -> None:
    memory = Memory(0, 2**26, (2**28,) * 20, 2**26, {"int8": (2**26,) * 20, "int4": (2**25,) * 20}, 0, 0)
    plan = plan_memory(memory, 2**31, DISK, FORMATS)
    assert plan.drafting is not None
    assert plan.drafting > 4 * plan.plain
    assert plan.draft_length > 8


def test_a_plan_prices_what_the_host_launches() -> None:
    memory = Memory(0, 2**26, (2**28,) * 20, 2**26, {"int8": (2**26,) * 20, "int4": (2**25,) * 20}, 0, 0)
    free, slow, slower = (
        plan_memory(memory, 2**31, Bandwidth(500e9, 25e9, launch), FORMATS) for launch in (0.0, 1e-4, 1e-3)
    )
    # A pass takes as long as its weights or its launches do, and so does a draft step.
    assert slow.plain == free.plain == pytest.approx(25e9 / free.streamed, rel=0.1)
    assert slow.draft_step == pytest.approx(60e-4 * slow.plain)
    assert slower.plain == pytest.approx(1 / (20 * 47e-3))
    assert slower.draft_length < slow.draft_length


def test_too_little_says_how_much_is_needed_and_what_for() -> None:
    memory = Memory(2**28, 2**27, (2**28,) * 4, 2**25, {"int8": (2**26,) * 4, "int4": (2**25,) * 4}, 2**24, 2**24)
    with pytest.raises(UnsupportedOptionError) as refused:
        plan_memory(memory, 2**28, DISK, FORMATS)
    assert str(refused.value) == (
        "memory=256.00 MiB is too little for this model: it takes at least 672.00 MiB (256.00 MiB for the process, "
        "128.00 MiB for weights that stay, 128.00 MiB for weights on their way, 128.00 MiB for copies that draft, "
        "16.00 MiB for keys and values, 16.00 MiB to work with); raise it, ask for a shorter context, or decode "
        "without drafts (draft=False, --draft none), which takes 544.00 MiB"
    )
    with pytest.raises(UnsupportedOptionError, match=r"at least 544.00 MiB \(.*shorter context$"):
        plan_memory(memory, 2**28, DISK, ())


def test_copies_of_weights_that_always_stay_count_where_all_layers_stay() -> None:
    fewer: dict[str, tuple[int, ...]] = {"int8": (2**18,) * 4, "int4": (2**17,) * 4}
    memory = Memory(0, 2**26, (2**20,) * 4, 2**10, fewer, 0, 0, 0, {"int8": 2**24, "int4": 2**23})
    room = memory.least + sum(memory.layers) + sum(memory.substitutes["int8"])
    assert plan_memory(memory, room + 2**24, DISK, ["int8"], beside="int8").resident == 4
    streams = plan_memory(memory, room + 2**24 - 1, DISK, ["int8"], beside="int8")
    assert streams.resident < 4
    # There they are not made.
    assert streams.total < room


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [(1, 1), ("6GiB", 6 * 2**30), ("1.5 gib", 3 * 2**29), (" 500 MB ", 500_000_000), ("64B", 64), ("1TiB", 2**40)],
)
def test_sizes_are_read(size: str | int, bytes_: int) -> None:
    assert parse_bytes("memory", size) == bytes_


# Digits and letters of other scripts, too.
WORDS = ["", "6", "6 G", "-1GiB", "0GiB", "0.1B", "1e3GiB", "6 GiB each", "\uff16GiB", "\u0666GiB", "6\uff27iB"]


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None, *WORDS, "9" * 5000 + "GiB"], ids=lambda size: str(size)[:20])
def test_what_is_no_size_is_refused_by_name(size: object) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"memory=.*6GiB"):
        parse_bytes("memory", size)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "text"), [(512, "0.5 KiB"), (3 * 2**19, "1.50 MiB"), (6 * 2**30, "6.00 GiB")])
def test_sizes_are_shown(size: int, text: str) -> None:
    assert shown_bytes(size) == text


@settings(max_examples=20, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    odd=st.booleans(),
)
def test_weights_are_read_as_they_were_saved(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype, odd: bool
) -> None:
    file = tmp_path_factory.mktemp("files") / "model.safetensors"
    saved = {f"w{number}": torch.randn(shape, dtype=torch.float64).to(dtype) for number, shape in enumerate(shapes)}
    # Header lengths move the weights to other offsets.
    save_file(saved, file, {"note": "x" * (3 if odd else 8)})
    found = stored_tensors([file])
    assert set(found) == set(saved)
    files, buffer = WeightFiles(), ReadBuffer(max(weight.nbytes for weight in found.values()))
    for name, weight in found.items():
        assert torch.equal(buffer.read(files, weight), saved[name])


def test_a_weight_of_more_than_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.placement.stored._MOST_AT_ONCE", 4096)
    weight = torch.randn(5000)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    found = stored_tensors([tmp_path / "model.safetensors"])["w"]
    assert torch.equal(ReadBuffer(found.nbytes).read(WeightFiles(), found), weight)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(10_000, dtype=torch.int8)}, file)
    return file


def test_truncated_files_are_refused_before_anything_is_read(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"truncated.*copy or download it again"):
        stored_tensors([file])


def test_numbers_that_torch_has_not_are_refused(file: Path) -> None:
    assert stored_tensors([file])["w"].dtype == torch.int8
    file.write_bytes(file.read_bytes().replace(b'"I8","shape":[10000]', b'"F4","shape":[20000]'))
    with pytest.raises(CheckpointError, match=r"w in .* is F4"):
        stored_tensors([file])


# What allocators hold on to is not in tensors.
_NOT_IN_TENSORS = 80 * 2**20


class _Held:
    """Counts bytes of tensors that are made: those that are there, and the most that were."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._known: set[int] = set()

    def note(self, _: object, made: Any) -> None:
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                self._count(each.untyped_storage())
        self.most = max(self.most, self.now)

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self._known:
            self._known.add(place)
            self.now += size
            weakref.finalize(storage, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self._known.remove(place)
        self.now -= size


def _wide() -> PreTrainedModel:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
    return tiny.llama(dtype=torch.float32, max_position_embeddings=4096, **sizes)


def _long() -> PreTrainedModel:
    return tiny.llama(dtype=torch.float32, max_position_embeddings=32768, num_hidden_layers=1)


def _bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=64, n_layer=1, n_head=8, eos_token_id=49))


def _gpt_oss() -> PreTrainedModel:
    kept = {"num_hidden_layers": 1, "max_position_embeddings": 4096, "eos_token_id": 49, "pad_token_id": 49}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return GptOssForCausalLM(
        GptOssConfig(vocab_size=50, hidden_size=64, intermediate_size=64, **kept, **heads, **experts)
    )


@pytest.mark.parametrize(
    ("make", "context", "tokens", "weights"),
    [
        (_wide, 4096, 2000, None),
        # Panels of planes are joined, never a weight.
        (_wide, 4096, 2000, Planes()),
        # Masks are most of it.
        pytest.param(_long, 32768, 32500, None, marks=pytest.mark.contract),
        # Eager attention: scores are.
        (_bloom, 2048, 2000, None),
        pytest.param(_gpt_oss, 4096, 4000, None, marks=pytest.mark.contract),
    ],
)
def test_a_long_prompt_is_read_within_what_is_set_aside_for_it(
    tmp_path: Path, make: Callable[[], PreTrainedModel], context: int, tokens: int, weights: Format | None
) -> None:
    made = make() if weights is None else make().to(torch.bfloat16)
    made.save_pretrained(tmp_path)
    surveyed = survey(str(tmp_path), None, context, FromDisk(), weights)
    spec = selfspec.wrap(place(surveyed, plan(0)))
    held = _Held()
    with Operations(held.note):
        output = spec.generate(tiny.prompt(tokens), max_new_tokens=1, do_sample=False)
    memory = surveyed.memory
    assert held.most > output.stats.cache_bytes
    assert held.most <= output.stats.cache_bytes + memory.working - _NOT_IN_TENSORS


@pytest.mark.parametrize(("tied", "bits"), [(True, 8), (True, 4), (False, 8)])
def test_copies_of_a_head_that_stays_are_set_aside_where_they_are_made(tmp_path: Path, tied: bool, bits: int) -> None:
    model = tiny.llama(dtype=torch.float32, vocab_size=20_000, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    memory = survey(str(tmp_path), None, 64, FromDisk()).memory
    spec = selfspec.load(tmp_path, "64GiB", device="cpu", context=64, draft=f"int{bits}")
    spec.generate(tiny.prompt(5), max_new_tokens=4, draft_length=2, do_sample=False)
    aside = sum(memory.substitutes[f"int{bits}"]) + memory.kept_substitutes[f"int{bits}"]
    assert 20_000 * 32 * bits // 8 < spec.substitutes.nbytes <= aside

"""Weights are streamed to a device beside what it computes, and generate what they generate in memory."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.copies import MASK, PROMPTS, StandInCopies, greedy, plan, stand_in_device, streamed, wrapped
from selfspec.control.profile import DraftChoice
from selfspec.errors import StorageError, UnsupportedOptionError
from selfspec.model.registry import find_adapter
from selfspec.placement.drafts import placement_of
from selfspec.placement.place import place
from selfspec.placement.plan import LONGEST, NODES
from selfspec.placement.stored import WeightFiles
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromDisk, FromHost, source_for
from selfspec.placement.weight_stream import DeviceCopies, HostMemory

CPU = torch.device("cpu")


def llama() -> PreTrainedModel:
    return tiny.llama(dtype=torch.float32, intermediate_size=64)


def wide() -> PreTrainedModel:
    return tiny.llama(dtype=torch.float32, intermediate_size=2048, hidden_size=512, num_attention_heads=4)


def test_a_pass_moves_each_weight_once_and_draft_steps_move_none(tmp_path: Path) -> None:
    copies = StandInCopies()
    spec = wrapped(streamed(tmp_path, llama(), FromHost(copies)))
    placement: Any = placement_of(spec.model)
    each = sum(weight.nbytes for weight in llama().model.layers[1:].parameters() if weight.ndim == 2)
    each += llama().lm_head.weight.nbytes
    output = spec.generate(PROMPTS[:1], max_new_tokens=16, do_sample=False)
    # The prompt's pass needs no head; what is ahead at the end has been moved, too.
    passes = output.stats.rounds + 2
    assert copies.copied <= placement.stream.bytes_moved <= passes * each + 4 * 64 * 64 * 4
    assert placement.stream.bytes_moved >= output.stats.rounds * each


def test_drafts_may_be_trees_where_a_device_computes_while_weights_arrive(tmp_path: Path) -> None:
    for source, nodes in ((FromHost(StandInCopies()), NODES), (FromDisk(), None)):
        model = streamed(tmp_path, llama(), source)
        placement: Any = placement_of(model)
        choice = placement.choice(DraftChoice(selfspec.drafts.LowPrecision(4)), model, find_adapter(model))
        assert choice.control == selfspec.CostAware(LONGEST, nodes=nodes)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
def test_errors_in_the_middle_of_a_transfer_leave_the_model_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    copies = StandInCopies()
    spec = wrapped(streamed(tmp_path, llama(), FromHost(copies)))
    wanted = greedy(spec)
    stock, left = copies.wait_for, iter(range(100))

    def failing(copied: object) -> None:
        if next(left) == 5:
            raise error
        stock(copied)

    with monkeypatch.context() as patched:
        patched.setattr(copies, "wait_for", failing)
        with pytest.raises(type(error)):
            greedy(spec)
    assert torch.equal(greedy(spec), wanted)


def test_memory_of_the_host_is_given_back_with_the_model(tmp_path: Path) -> None:
    copies = StandInCopies()
    spec = wrapped(streamed(tmp_path, llama(), FromHost(copies)))
    spec.generate(PROMPTS, MASK, max_new_tokens=4)
    assert len(copies.locked) == 1
    del spec
    gc.collect()
    assert copies.locked == []


def test_a_disk_that_fails_while_loading_gives_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, model = StandInCopies(), llama()
    model.save_pretrained(tmp_path)
    surveyed = survey(str(tmp_path), None, 128, FromHost(copies))
    monkeypatch.setattr(WeightFiles, "opened", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(StorageError):
        place(surveyed, plan(1))
    gc.collect()
    assert copies.locked == []


@pytest.mark.contract
def test_load_streams_to_a_device_within_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_device(monkeypatch)
    model = wide()
    model.save_pretrained(tmp_path)
    weights = sum(weight.nbytes for weight in model.parameters())
    spec = selfspec.load(tmp_path, 128 * 2**20, context=64, device="cpu")
    placement: Any = placement_of(spec.model)
    # Nothing of the process counts.
    assert 0 < placement.plan.streamed < weights
    wanted = greedy(selfspec.wrap(model))
    assert torch.equal(greedy(spec), wanted)


def test_more_than_the_host_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_device(monkeypatch)
    monkeypatch.setattr("selfspec.placement.weight_source.machine_bytes", lambda: 1000)
    wide().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedOptionError, match=r"streamed from memory of the host, which has 1\.0 KiB"):
        selfspec.load(tmp_path, 128 * 2**20, context=64)


def test_devices_that_nothing_is_streamed_to_are_refused() -> None:
    assert isinstance(source_for(CPU), FromDisk)
    with pytest.raises(UnsupportedOptionError, match="on cpu or cuda"):
        source_for(torch.device("meta"))


@pytest.mark.parametrize(("module", "name"), [(os, "preadv"), (mmap, "MAP_ANONYMOUS")])
def test_a_system_without_direct_reads_is_refused_by_name(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama().save_pretrained(tmp_path)
    monkeypatch.delattr(module, name)
    with pytest.raises(UnsupportedOptionError, match=f"has no {name}, by which .*without memory="):
        selfspec.load(tmp_path, "1GiB", device="cpu")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What `DeviceCopies` asks of torch, on a CPU."""
    made = MagicMock(**{"cudaHostRegister.return_value": 0})
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: made.side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.main)
    monkeypatch.setattr(torch.cuda, "stream", made.within)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    for name, given in (("mem_get_info", (2**40, 2**50)), ("memory_reserved", 2**20), ("memory_allocated", 2**10)):
        monkeypatch.setattr(torch.cuda, name, lambda _, given=given: given)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return made


def test_the_streams_of_cuda_wait_for_each_other(tmp_path: Path, cuda: MagicMock) -> None:
    model = llama()
    spec = wrapped(streamed(tmp_path, model, FromHost(DeviceCopies(CPU))))
    wanted = greedy(selfspec.wrap(model))
    assert torch.equal(greedy(spec), wanted)
    ((address, size, flags),) = (each.args for each in cuda.cudaHostRegister.call_args_list)
    assert size > 0 == flags
    copy = cuda.mock_calls.index(call.within(cuda.side))
    assert cuda.mock_calls[copy - 1] == call.side.wait_event(cuda.main.record_event())
    names = [name for name, *_ in cuda.mock_calls]
    assert names[copy + 1 : copy + 4] == ["within().__enter__", "within().__exit__", "side.record_event"]
    assert call.main.wait_event(cuda.side.record_event()) in cuda.mock_calls
    # While it generates, the host waits for nothing.
    assert not any("synchronize" in name for name in names)
    del spec
    gc.collect()
    assert cuda.mock_calls[-3:] == [
        call.side.synchronize(),
        call.main.synchronize(),
        call.cudaHostUnregister(address),
    ]


def test_memory_that_cannot_be_locked_is_a_typed_error(cuda: MagicMock) -> None:
    cuda.cudaHostRegister.return_value = 2
    copies = DeviceCopies(CPU)
    # What others use does not count, and what torch holds for later does.
    assert copies.device_bytes() == 2**40 + 2**20 - 2**10
    with pytest.raises(UnsupportedOptionError, match=r"no 1.00 MiB .*can be locked.*raise memory="):
        HostMemory(2**20, copies)
    with pytest.raises(UnsupportedOptionError, match=r"has no .* for streamed weights"):
        HostMemory(2**62, copies)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streaming_to_a_gpu_gives_the_models_own_tokens(tmp_path: Path) -> None:
    model = wide()
    model.save_pretrained(tmp_path)
    wanted = selfspec.wrap(model.to("cuda")).generate(PROMPTS.cuda(), MASK.cuda(), max_new_tokens=24, do_sample=False)
    spec = selfspec.load(tmp_path, 144 * 2**20, context=64, device="cuda")
    placement: Any = placement_of(spec.model)
    assert placement.plan.streamed
    host = selfspec.load(tmp_path, 144 * 2**20, context=64, device="cuda", cache="host")
    for each in (spec, host):
        output = each.generate(PROMPTS.cuda(), MASK.cuda(), max_new_tokens=24, do_sample=False)
        assert torch.equal(output.sequences, wanted.sequences)

"""Graphs of passes, by a stand-in for CUDA's that runs on a CPU: the same tokens, for every cache and every length."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import captures, tiny
from helpers.captures import StandIn, StandInRecorder, assert_stock, ragged_samples, wrapped
from helpers.published_heads import WRITERS
from helpers.snapshot import Snapshot
from helpers.tiny import in_turns
from selfspec.draft.registry import parse_draft
from selfspec.errors import UnsupportedOptionError
from selfspec.process import ProcessLock
from selfspec.runtime import CudaGraphs, Eager, cuda_graphs
from selfspec.runtime.cuda_graphs import Launch, Recorder, Recording
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.pass_function import PassTensors
from selfspec.runtime.runtime import Function, OtherSizesError

PROMPT, NEW, BUCKET = 5, 20, 8
EXIT = selfspec.drafts.EarlyExit(1)


DRAFTS = {**captures.DRAFTS, "layers": selfspec.drafts.LayerSkip(layers=[0, 2])}


@pytest.mark.parametrize(
    ("architecture", "kernel", "draft"), in_turns(sorted(tiny.BUILDERS), ("sdpa", "eager"), tuple(DRAFTS))
)
def test_greedy_text_is_the_stock_models(architecture: str, kernel: str, draft: str) -> None:
    model = tiny.BUILDERS[architecture](attention=kernel)
    before = Snapshot(model)
    spec = wrapped(model, StandIn(0, BUCKET), DRAFTS[draft])
    assert_stock(spec, tiny.prompt(PROMPT), NEW)
    assert spec.programs.proved
    assert all(kind.padded for kind in spec.programs.proved)
    assert not spec.programs.refusals
    before.assert_same(model)


@pytest.mark.statistical
@pytest.mark.parametrize("draft", DRAFTS)
def test_samples_of_a_ragged_batch_are_those_of_the_stock_modules(architecture: str, draft: str) -> None:
    model = tiny.BUILDERS[architecture]()
    stock = ragged_samples(wrapped(model, Eager(), DRAFTS[draft]), PROMPT, NEW)
    spec = wrapped(model, StandIn(0, BUCKET), DRAFTS[draft])
    assert ragged_samples(spec, PROMPT, NEW) == stock
    assert any(not kind.uniform for kind in spec.programs.proved)


@pytest.fixture
def spec(llama: PreTrainedModel) -> selfspec.SelfSpeculative:
    return wrapped(llama, StandIn(0, BUCKET), EXIT)


@pytest.mark.contract
@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_come_and_go(spec: selfspec.SelfSpeculative, first: bool) -> None:
    for inference in (first, not first, first):
        with torch.inference_mode(inference):
            assert_stock(spec, tiny.prompt(PROMPT), NEW)
        assert spec.programs.proved
        assert not spec.programs.refusals


@pytest.mark.contract
def test_threads_share_programs(spec: selfspec.SelfSpeculative) -> None:
    prompts = [tiny.prompt(PROMPT, seed=seed) for seed in range(3)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda prompt: assert_stock(spec, prompt, NEW), prompts))


def test_a_graph_serves_for_a_bucket_of_lengths(llama: PreTrainedModel) -> None:
    spec = wrapped(llama, StandIn(0, BUCKET))
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    runtime = spec.runtime
    assert isinstance(runtime, StandIn)
    # The last pass looks at 24 slots; tokens are chosen in one more.
    assert [recorder.captured for recorder in runtime.recorders] == [4]


@pytest.mark.contract
def test_another_generation_has_a_cache_elsewhere(llama: PreTrainedModel) -> None:
    spec = wrapped(llama, StandIn(0, BUCKET), EXIT)
    others = []
    for seed in range(3):
        prompt = tiny.prompt(PROMPT, seed=seed)
        others.append(spec.stream(prompt, max_new_tokens=NEW, do_sample=False))
        next(others[-1])
        assert_stock(spec, prompt, NEW)
    for seed, generation in enumerate(others):
        expected = llama.generate(tiny.prompt(PROMPT, seed=seed), max_new_tokens=NEW, do_sample=False)
        assert generation.finish().sequences.tolist() == expected.tolist()


def test_a_limited_number_of_graphs_is_kept(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 2
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", most)
    spec = wrapped(llama, StandIn(0, BUCKET))
    for _ in range(2):
        assert_stock(spec, tiny.prompt(PROMPT), NEW)
    (candidate,) = spec.programs._candidates.values()
    assert candidate.program is not None
    graphs = candidate.program.function
    assert isinstance(graphs, cuda_graphs._Graphs)
    assert len(graphs._graphs) == most


class _Failing(StandInRecorder):
    """Fails, or gives other bits, from some capture on; it is short of memory once."""

    def __init__(self, good: float, error: Exception | None) -> None:
        super().__init__()
        self._good, self._error = good, error

    def record(self, launch: Launch) -> Recording:
        if self.captured < self._good:
            return super().record(launch)
        if isinstance(self._error, torch.OutOfMemoryError):
            self._good = torch.inf
        if self._error is not None:
            raise self._error
        recording = super().record(launch)

        def replay() -> None:
            recording.replay()
            recording.outputs[0].add_(1e-12)

        return Recording(replay, recording.outputs)


@dataclass(frozen=True)
class _FailingGraphs(StandIn):
    good: int = 0
    error: Exception | None = None

    def recorder(self, device: torch.device) -> Recorder:
        self.recorders.append(_Failing(self.good, self.error))
        return self.recorders[-1]


def test_a_capture_without_memory_is_tried_again_later(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.runtime.graph_cache.LATER", 3)
    runtime = _FailingGraphs(0, BUCKET, error=torch.OutOfMemoryError("no room"))
    spec = wrapped(llama, runtime)
    for _ in range(2):
        assert_stock(spec, tiny.prompt(PROMPT), NEW)
    assert not spec.programs.refusals
    assert spec.programs.proved
    assert [recorder.captured > 0 for recorder in runtime.recorders] == [True]


_NOT_PERMITTED = RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("error", "reason"), [(_NOT_PERMITTED, str(_NOT_PERMITTED)), (None, "other bits than its modules")]
)
@pytest.mark.parametrize("good", [0, 1, 2])
def test_what_cannot_be_captured_is_run_by_the_stock_modules(
    llama: PreTrainedModel, good: int, error: Exception | None, reason: str
) -> None:
    spec = wrapped(llama, _FailingGraphs(0, BUCKET, good=good, error=error))
    assert_stock(spec, tiny.prompt(PROMPT), NEW)
    assert not spec.programs.proved
    (refusal,) = spec.programs.refusals.values()
    assert reason in refusal


def test_a_program_inside_that_does_not_fit_these_sizes_may_fit_others(llama: PreTrainedModel) -> None:
    def fits_no_size(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        raise OtherSizesError

    @dataclass(frozen=True)
    class Picky(StandIn):
        def program(self, function: Function, example: PassTensors) -> Function:
            return super().program(fits_no_size, example)

    spec = wrapped(llama, Picky(0, BUCKET))
    assert_stock(spec, tiny.prompt(PROMPT), NEW)
    assert not spec.programs.proved
    assert not spec.programs.refusals


def test_a_cache_is_free_when_its_generation_ends(llama: PreTrainedModel) -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Forgetful(StandInRecorder):
        """Keeps nothing but outputs, as a graph does, which holds addresses and no tensors."""

        def record(self, launch: Launch) -> Recording:
            return Recording(lambda: None, launch())

    @dataclass(frozen=True)
    class Graphs(StandIn):
        def program(self, function: Function, example: PassTensors) -> Function:
            seen.extend(map(weakref.ref, example.slots.buffers))
            return super().program(function, example)

        def recorder(self, device: torch.device) -> Recorder:
            return Forgetful()

    spec = wrapped(llama, Graphs(0, BUCKET))
    # The prompt's own pass, which gives the first token, is not recorded.
    spec.generate(tiny.prompt(PROMPT), max_new_tokens=2, do_sample=False)
    assert len(seen) == 2 * tiny.DEPTH
    assert [candidate.program is not None for candidate in spec.programs._candidates.values()] == [True]
    # Its slots stay for a text of as many rows, and are freed before there are others.
    assert all(ref() is not None for ref in seen)
    spec.generate(tiny.prompt(PROMPT, 2), max_new_tokens=1, do_sample=False)
    assert [ref for ref in seen if ref() is not None] == []


@pytest.mark.parametrize("name", [*DRAFTS, "eagle"])
def test_later_generations_capture_nothing(llama: PreTrainedModel, name: str, tmp_path: Path) -> None:
    runtime = StandIn(0, 64)
    draft = DRAFTS[name] if name in DRAFTS else parse_draft(f"eagle:{WRITERS['eagle1'](tmp_path, llama)}")
    spec = wrapped(llama, runtime, draft)

    def captured(*lengths: int) -> int:
        before = sum(each.captured for each in runtime.recorders)
        for new in lengths:
            assert_stock(spec, tiny.prompt(PROMPT), new)
        return sum(each.captured for each in runtime.recorders) - before

    # One text has too few rounds of some kinds.
    assert captured(*[NEW, NEW + 5, NEW - 5] * 3)
    assert not captured(NEW, NEW + 5, NEW - 5)
    assert len(runtime.recorders) == (1 if name in DRAFTS else 2)


def test_what_a_text_leaves_in_its_slots_reaches_no_later_text(llama: PreTrainedModel) -> None:
    spec = wrapped(llama, StandIn(0, 64), EXIT)
    assert_stock(spec, tiny.prompt(PROMPT), NEW)
    ended: Any = spec.programs._current
    for layer in ended._ended.layers:
        # Even where it is masked, NaN would spoil the sum.
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    assert_stock(spec, tiny.prompt(PROMPT), NEW)


QUANTISED = """
import torch

class Linear(torch.nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.register_buffer("scale", dense.weight.detach().abs().amax() / 127)
        self.qweight = torch.nn.Parameter((dense.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, states):
        return torch.nn.functional.linear(states, self.qweight.to(states.dtype) * self.scale)
"""


@pytest.mark.parametrize(
    ("package", "runtime", "is_captured"),
    [
        ("gptqmodel", StandIn(0, BUCKET), True),
        ("gptqmodels", StandIn(0, BUCKET), False),
        ("gptqmodel", captures.Again(), False),
    ],
)
def test_models_of_known_quantisers_are_captured_alone(
    llama: PreTrainedModel, package: str, runtime: Any, is_captured: bool
) -> None:
    module: Any = ModuleType(f"{package}.layers")
    exec(QUANTISED, vars(module))
    for layer in llama.model.layers:
        layer.mlp.down_proj = module.Linear(layer.mlp.down_proj)
    spec = wrapped(llama, runtime, EXIT)
    assert_stock(spec, tiny.prompt(PROMPT), NEW)
    assert bool(spec.programs.proved) is is_captured
    assert not spec.programs.refusals
    name = f"model.layers.0.mlp.down_proj is a {package}.layers.Linear, which may act differently next time"
    assert spec.programs.refused == (None if is_captured else name)


def test_a_model_elsewhere_is_refused_by_name(llama: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedOptionError, match="CUDA device, and this one is on cpu"):
        selfspec.wrap(llama, runtime=CudaGraphs())
    spec = selfspec.wrap(llama)
    spec.programs = GraphCache(CudaGraphs())
    with pytest.raises(UnsupportedOptionError, match="move it there"):
        spec.generate(tiny.prompt(PROMPT), max_new_tokens=4)


CHILD = """
import os, signal, threading
import torch
torch.set_num_threads(1)
from helpers import tiny
from helpers.captures import StandIn, StandInRecorder, wrapped

prompt, options = tiny.prompt(5), {"max_new_tokens": 12, "do_sample": False}
model = tiny.llama()
wanted = model.generate(prompt, **options).tolist()
spec = wrapped(model, StandIn(0, 8))
recording, forked = threading.Event(), threading.Event()
record = StandInRecorder.record

def held(*arguments):
    recording.set()
    forked.wait()
    return record(*arguments)

StandInRecorder.record = held
other = threading.Thread(target=spec.generate, args=(prompt,), kwargs=options)
other.start()
recording.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    StandInRecorder.record = record
    for each in (wrapped(model, StandIn(0, 8)), spec):
        assert each.generate(prompt, **options).sequences.tolist() == wanted
        assert each.programs.proved
    os._exit(0)
forked.set()
other.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert spec.generate(prompt, **options).sequences.tolist() == wanted
assert spec.programs.proved
"""


@pytest.mark.contract
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_child_forked_while_a_thread_records_decodes() -> None:
    tests = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_a_lock_lets_one_thread_in_at_a_time() -> None:
    lock = ProcessLock()
    seen: list[bool] = []
    with lock:
        other = threading.Thread(target=lambda: seen.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
    assert seen == [False]
    assert lock.acquire(blocking=False)
    lock.release()

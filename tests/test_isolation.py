"""Isolation: nothing that happens to one generation, an exception at any point included, reaches another one."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.snapshot import Snapshot, changed, process_state
from helpers.tiny import in_turns
from selfspec.decode.output import Stats
from selfspec.model.view import view_with
from selfspec.process import status_bytes

PROMPT, NEW = 7, 7
DRAFTS: dict[str, selfspec.drafts.Drafter] = {
    "exit": selfspec.drafts.EarlyExit(2),
    "sublayers": selfspec.drafts.LayerSkip(attention=[3], mlp=[1]),
    "layers": selfspec.drafts.LayerSkip(layers=[0, 2]),
    "int8": selfspec.drafts.LowPrecision(layers=[2, 3]),
}


def _prompts() -> tuple[torch.Tensor, torch.Tensor]:
    prompts = tiny.prompt(PROMPT, 2)
    mask = torch.ones_like(prompts)
    mask[0, :3] = 0
    return prompts, mask


class _Everyone:
    """What plain `generate` and the wrapper give, and that they still give it."""

    def __init__(self, model: PreTrainedModel, spec: selfspec.SelfSpeculative) -> None:
        self.model, self.spec = model, spec
        self.snapshot = Snapshot(model)
        self.wanted = self._all()

    def _all(self) -> list[Any]:
        prompts, mask = _prompts()
        plain = self.model.generate(prompts, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
        greedy = self.spec.generate(prompts, mask, max_new_tokens=NEW, do_sample=False)
        sampled = self.spec.generate(prompts, mask, max_new_tokens=NEW, do_sample=True, seed=3)
        return [plain.tolist(), *((out.sequences.tolist(), _counts(out.stats)) for out in (greedy, sampled))]

    def assert_unharmed(self) -> None:
        self.snapshot.assert_same(self.model)
        assert self._all() == self.wanted


def _counts(stats: Stats) -> tuple[object, ...]:
    return stats.rounds, stats.drafted, stats.judged_per_depth, stats.accepted_per_depth


class PlantedError(Exception):
    pass


class _FailAt(TorchDispatchMode):
    """Raises instead of the n-th tensor operation: in a layer, in the head, in sampling, in the cache."""

    def __init__(self, number: int | None, error: type[BaseException]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number, self.error, self.seen = number, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen == self.number:
            raise self.error("planted")
        return func(*args, **(kwargs or {}))


@pytest.mark.contract
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_an_exception_at_any_operation_leaves_everything_right(
    llama: PreTrainedModel, draft: selfspec.drafts.Drafter
) -> None:
    everyone = _Everyone(llama, selfspec.wrap(llama, draft, draft_length=2))
    prompts, mask = _prompts()

    def run(number: int | None, error: type[BaseException] = PlantedError) -> int:
        with _FailAt(number, error) as mode:
            everyone.spec.generate(prompts, mask, max_new_tokens=6, do_sample=True, seed=1)
        return int(mode.seen)

    errors = [PlantedError, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit]
    total = run(None)
    assert total > 1000
    # The first run has a few operations more than others.
    points = range(1, total, total // 10 + 1)
    for count, number in enumerate(points):
        error = errors[count % len(errors)]
        with pytest.raises(error, match="planted"):
            run(number, error)
        everyone.assert_unharmed()


@pytest.mark.parametrize(
    ("call", "error"), [(1, StopIteration), (2, PlantedError), (4, KeyboardInterrupt), (9, torch.OutOfMemoryError)]
)
@pytest.mark.parametrize("name", ["model.layers.0", "model.layers.1.mlp", "model.layers.3.self_attn", "lm_head"])
def test_a_hook_that_raises_leaves_everything_right(
    llama: PreTrainedModel, name: str, call: int, error: type[BaseException]
) -> None:
    spec = selfspec.wrap(llama, DRAFTS["sublayers"], draft_length=2)
    everyone = _Everyone(llama, spec)
    calls = 0

    def failing(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error("planted")

    handle = llama.get_submodule(name).register_forward_pre_hook(failing)
    stream = spec.stream(tiny.prompt(PROMPT), max_new_tokens=30, do_sample=False)
    # Python itself turns a StopIteration inside a generator into a RuntimeError.
    with pytest.raises(RuntimeError if error is StopIteration else error):
        for _ in stream:
            pass
    assert calls == call
    handle.remove()
    assert next(stream, None) is None, "a stream that failed is over"
    everyone.assert_unharmed()


@pytest.mark.contract
def test_a_generation_inside_a_hook_of_another_is_right(llama: PreTrainedModel) -> None:
    """The deepest interleaving there is: a generation in the middle of another one's pass."""
    spec = selfspec.wrap(llama, DRAFTS["sublayers"], draft_length=4)
    wanted = llama.generate(tiny.prompt(PROMPT), max_new_tokens=12, do_sample=False)[0].tolist()
    inner_wanted = llama.generate(tiny.prompt(5, seed=2), max_new_tokens=9, do_sample=False)[0].tolist()
    inner: list[list[int]] = []
    busy, calls = False, 0

    def within(*_: object) -> None:
        nonlocal busy, calls
        calls += not busy
        if not busy and calls in (1, 3, 4, 9):
            busy = True
            for generate in (spec.generate, selfspec.wrap(llama, DRAFTS["exit"], draft_length=4).generate):
                out = generate(tiny.prompt(5, seed=2), max_new_tokens=9, do_sample=False)
                inner.append(out.sequences[0].tolist())
            inner.append(llama.generate(tiny.prompt(5, seed=2), max_new_tokens=9, do_sample=False)[0].tolist())
            busy = False

    llama.model.layers[2].mlp.register_forward_hook(within)
    assert spec.generate(tiny.prompt(PROMPT), max_new_tokens=12, do_sample=False).sequences[0].tolist() == wanted
    assert len(inner) == 12
    assert all(text == inner_wanted for text in inner)


# Threads.


@pytest.fixture
def eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _together(jobs: list[Callable[[], Any]]) -> list[Any]:
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        barrier.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


@pytest.mark.contract
@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize(("architecture", "shared"), in_turns(("llama", "gpt2"), (True, False)))
def test_threads_that_share_a_model_get_what_they_would_get_alone(architecture: str, shared: bool) -> None:
    model = tiny.BUILDERS[architecture]()
    before = Snapshot(model)
    prompts, mask = _prompts()
    one = selfspec.wrap(model, DRAFTS["exit"], draft_length=2)
    two = one if shared else selfspec.wrap(model, DRAFTS["sublayers"], draft_length=3)

    def drafting(spec: selfspec.SelfSpeculative, seed: int) -> list[Any]:
        found: list[Any] = []
        for repeat in range(2):
            greedy = spec.generate(prompts, mask, max_new_tokens=NEW, do_sample=False)
            options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9}
            options["seed"] = seed + repeat
            sampled = spec.generate(prompts, mask, draft_length=1 + seed % 3, **options)
            streamed = [chunk.rows for chunk in spec.stream(tiny.prompt(4, seed=seed), **options)]
            found += [greedy.sequences.tolist(), sampled.sequences.tolist(), _counts(sampled.stats), streamed]
        return found

    def plain() -> list[Any]:
        options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        return [model.generate(prompts, **options).tolist() for _ in range(5)]

    def through_transformers() -> list[Any]:
        options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": True, "seed": 8}
        return [model.generate(prompts, custom_generate=two, **options).tolist() for _ in range(3)]

    def forward() -> list[Any]:
        with torch.no_grad():
            return [model(prompts, output_hidden_states=True).hidden_states[3].tolist() for _ in range(12)]

    jobs: list[Callable[[], Any]] = [lambda: drafting(one, 10), lambda: drafting(two, 21), plain, through_transformers]
    alone = [job() for job in jobs]
    assert _together(jobs) == alone
    before.assert_same(model)
    # Not before the snapshot was compared: transformers hangs hooks of its own for this.
    assert _together([*jobs, forward]) == [*alone, forward()]


@pytest.mark.usefixtures("eager_switching")
def test_a_thread_that_fails_leaves_the_others_alone(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, DRAFTS["layers"], draft_length=4)
    prompts, mask = _prompts()
    here = threading.local()

    def failing(module: nn.Module, args: object) -> None:
        here.calls = getattr(here, "calls", 0) + 1
        if getattr(here, "fails", False) and here.calls % 7 == 0:
            raise PlantedError("planted")

    llama.model.layers[1].mlp.register_forward_pre_hook(failing)

    def good(seed: int) -> list[Any]:
        options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "seed": seed}
        return [spec.generate(prompts, mask, **options).sequences.tolist() for _ in range(4)]

    def bad() -> int:
        here.fails = True
        failures = 0
        for _ in range(8):
            try:
                spec.generate(prompts, mask, max_new_tokens=NEW)
            except PlantedError:
                failures += 1
        here.fails = False
        return failures

    alone = [good(1), good(2)]
    assert _together([lambda: good(1), bad, lambda: good(2)]) == [alone[0], 8, alone[1]]


def test_a_view_is_made_while_attributes_are_set_on_the_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))

    class Late:
        @property
        def __class__(self) -> type:
            module.__dict__[f"late_{len(module.__dict__)}"] = 1
            return Late

        @__class__.setter
        def __class__(self, value: type) -> None:
            raise AssertionError

    module.__dict__["looked_at"] = Late()
    twin = view_with(module, {"0": torch.nn.Identity()})
    assert isinstance(twin.get_submodule("0"), torch.nn.Identity)


# What the process gives back, and what tests would leave to each other in it.

_FREED = """
from selfspec.process import give_large_blocks_back, status_bytes
{prepare}
# The allocator learns from the largest that was freed.
del (largest := [bytearray(30 << 20)])[:]
before, kept, large = status_bytes("VmRSS"), [], []
for _ in range(40):
    large.append(bytearray(1 << 20))
    kept.append(bytearray(1 << 10))
del large
print(status_bytes("VmRSS") - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators")
def test_large_blocks_go_back_although_small_ones_beside_them_stay() -> None:
    left = {}
    for prepare in ("", "give_large_blocks_back()"):
        run = subprocess.run(
            [sys.executable, "-c", _FREED.format(prepare=prepare)], capture_output=True, text=True, check=True
        )
        left[prepare] = int(run.stdout)
    assert left[""] > 30 << 20
    assert left["give_large_blocks_back()"] < 5 << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells of it")
def test_sizes_are_those_of_this_process() -> None:
    assert 0 < status_bytes("VmRSS") <= status_bytes("VmHWM")


def _hook_on_all_modules() -> Any:
    handle: Any = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    return contextlib.closing(mock.Mock(close=handle.remove))


CHANGES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "grad mode": torch.no_grad,
    "kernels of attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "modes of torch": FakeTensorMode,
    "hooks on all modules": _hook_on_all_modules,
    "working folder": lambda: contextlib.chdir(Path.cwd().parent),
    "environment": lambda: mock.patch.dict(os.environ, SELFSPEC_PROFILES="elsewhere"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_would_outlast_its_test_is_seen(name: str) -> None:
    before = process_state()
    with CHANGES[name]():
        left = changed(before, process_state())
        assert any(each.split(": ")[0] == name for each in left)
    assert not changed(before, process_state())


@pytest.fixture(scope="module")
def drawn() -> Tensor:
    """What a fixture draws that no test of this module has to itself."""
    return torch.rand(3)


def test_what_tests_share_does_not_depend_on_which_comes_first(drawn: Tensor) -> None:
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))

"""What a round costs the host: how often it waits for the device, and how far it is from a call to a verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.accept import TokenLevel
from selfspec.decode.loop import run_round
from selfspec.runtime import Eager
from selfspec.runtime.model_state import reads_values

NEW = 30
DRAFTS = {
    "plain": None,
    "exit": selfspec.drafts.EarlyExit(2),
    "sublayers": selfspec.drafts.LayerSkip(attention=[1], mlp=[2]),
    "layers": selfspec.drafts.LayerSkip(layers=[0, 2]),
    "int8": selfspec.drafts.LowPrecision(layers=[2, 3]),
}
_TAKING = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu)


class Waits(TorchFunctionMode):
    """Counts what needs values or shapes that the device has yet to find out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _TAKING
        with _Reads(self):
            return func(*args, **(kwargs or {}))


class _Reads(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._waits.count += reads_values(func, args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 9}], ids=str
)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_a_round_of_fixed_length_waits_once(
    llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None, rule: str, options: dict[str, Any], rows: int
) -> None:
    spec = selfspec.wrap(llama, draft, draft_length=3, accept=rule)
    generation = spec.stream(tiny.prompt(5, batch=rows), max_new_tokens=NEW, seed=1, **options)
    next(generation)
    waits = []
    for _ in range(3):
        with Waits() as counted:
            next(generation)
        waits.append(counted.count)
    assert waits == [1, 1, 1]


def test_a_control_that_looks_at_confidences_waits_for_each_token(llama: PreTrainedModel) -> None:
    control = selfspec.ConfidenceStop(0.0, longest=3)
    generation = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=control).stream(
        tiny.prompt(5), max_new_tokens=NEW, do_sample=False
    )
    next(generation)
    with Waits() as counted:
        next(generation)
    assert counted.count == 3


# Frames and files of torch and transformers do not count. The verdict is what the rule gives: chances of draft tokens.
FOLDERS = (str(Path(selfspec.__file__).parent), str(Path(selfspec.adapters.__file__).resolve().parent))
VERDICT = TokenLevel.accept_probs.__code__


def entered(call: Callable[[], object]) -> list[list[CodeType]]:
    """The functions of selfspec that a call enters, in order, each with those that it runs in, the outermost first."""
    stacks: list[list[CodeType]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            stacks.append([code for code in outwards(frame) if code.co_filename.startswith(FOLDERS)][::-1])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return stacks


def outwards(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def files(stacks: list[list[CodeType]]) -> list[str]:
    return sorted({stack[-1].co_filename for stack in stacks})


@pytest.fixture
def stacks(llama: PreTrainedModel) -> list[list[CodeType]]:
    """What a greedy call enters, on the stock runtime, after a first call of the same kind."""
    spec = selfspec.wrap(llama, "exit:2", draft_length=3, runtime=Eager())

    def call() -> object:
        return spec.generate(tiny.prompt(7), max_new_tokens=12, do_sample=False)

    call()
    return entered(call)


def test_a_verdict_is_at_most_eight_frames_below_generate(stacks: list[list[CodeType]]) -> None:
    deepest = max((stack for stack in stacks if stack[-1] is VERDICT), key=len)
    assert deepest[0] is selfspec.SelfSpeculative.generate.__code__
    assert len(deepest) <= 8, [code.co_qualname for code in deepest]


def test_a_pass_is_at_most_nine_frames_below_generate(llama: PreTrainedModel) -> None:
    frames: list[int] = []

    def noted(*_: object) -> None:
        frames.append(len([code for code in outwards(sys._getframe()) if code.co_filename.startswith(FOLDERS)]))

    llama.get_decoder().register_forward_pre_hook(noted)
    selfspec.wrap(llama, "exit:2", draft_length=3).generate(tiny.prompt(9), max_new_tokens=9, do_sample=False)
    # Below `generate`, and without the call of the view.
    assert max(frames) - 1 <= 9


def test_a_round_enters_few_files_before_its_verdict(stacks: list[list[CodeType]]) -> None:
    in_rounds = [stack for stack in stacks if run_round.__code__ in stack]
    starts = [index for index, stack in enumerate(in_rounds) if stack[-1] is run_round.__code__]
    verdicts = [index for index, stack in enumerate(in_rounds) if stack[-1] is VERDICT]
    entered_before = files(in_rounds[starts[1] : verdicts[1] + 1])
    assert len(entered_before) <= 24, entered_before
    assert len({code.co_filename for code in in_rounds[verdicts[1]]}) <= 5


def test_a_whole_call_enters_few_files(stacks: list[list[CodeType]]) -> None:
    assert len(files(stacks)) <= 58, files(stacks)

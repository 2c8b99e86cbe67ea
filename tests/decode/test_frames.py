"""How far it is from a call to a verdict: frames of selfspec on the stack, and files of selfspec that are entered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.accept import TokenLevel
from selfspec.decode.loop import run_round
from selfspec.runtime import Eager

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

"""Streamers get what transformers gives them: the prompt, each committed token, and the end whatever happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.generation import BaseStreamer

import selfspec
from helpers import tiny

OPTIONS: dict[str, Any] = {"max_new_tokens": 17, "do_sample": False}


class Listener(BaseStreamer):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


@pytest.fixture
def spec(llama: PreTrainedModel) -> selfspec.SelfSpeculative:
    return selfspec.wrap(llama, selfspec.drafts.LayerSkip(mlp=[3]), draft_length=4)


@pytest.mark.parametrize("eos", [None, [3, 11, 20, 40]])
def test_a_streamer_hears_what_it_hears_from_transformers(spec: selfspec.SelfSpeculative, eos: Any) -> None:
    stock, own = Listener(), Listener()
    spec.model.generate(tiny.prompt(5), streamer=stock, eos_token_id=eos, **OPTIONS)
    out = spec.generate(tiny.prompt(5), streamer=own, eos_token_id=eos, **OPTIONS)
    assert own.heard == stock.heard
    assert own.heard[0] == tiny.prompt(5).tolist()
    assert [token for (token,) in own.heard[1:-1]] == out.sequences[0, 5:].tolist()
    assert own.heard[-1] == "end"


def test_text_streamers_print_the_same(
    spec: selfspec.SelfSpeculative, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    for skip in (False, True):
        spec.model.generate(tiny.prompt(5), streamer=TextStreamer(tokenizer, skip_prompt=skip), **OPTIONS)
        wanted = capsys.readouterr().out
        spec.generate(tiny.prompt(5), streamer=TextStreamer(tokenizer, skip_prompt=skip), **OPTIONS)
        assert capsys.readouterr().out == wanted


def test_a_streamer_is_ended_after_an_error_too(llama: PreTrainedModel) -> None:
    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("out of something")

    listener = Listener()
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=4)
    hook = llama.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of something"):
        spec.generate(tiny.prompt(5), streamer=listener, **OPTIONS)
    assert listener.heard == [tiny.prompt(5).tolist(), "end"]
    hook.remove()
    with torch.no_grad():
        llama.lm_head.weight.fill_(float("nan"))
    listener.heard.clear()
    with pytest.raises(selfspec.errors.NonFiniteLogitsError):
        spec.generate(tiny.prompt(5), streamer=listener, **OPTIONS)
    assert listener.heard == [tiny.prompt(5).tolist(), "end"]


def test_an_abandoned_stream_tells_the_end(spec: selfspec.SelfSpeculative) -> None:
    listener = Listener()
    stream = spec.stream(tiny.prompt(5), streamer=listener, **OPTIONS)
    first = next(stream)
    stream.close()
    assert listener.heard == [tiny.prompt(5).tolist(), *([token] for token in first.tokens), "end"]
    assert stream.stats.seconds


@pytest.mark.tools
def test_a_stream_that_is_left_at_the_end_of_the_process_says_nothing() -> None:
    script = """
from helpers import tiny
import selfspec
stream = selfspec.wrap(tiny.llama(), "exit:2").stream(tiny.prompt(5), max_new_tokens=8)
next(stream)
"""
    tests = str(Path(__file__).parents[1])
    run = subprocess.run([sys.executable, "-c", script], cwd=tests, capture_output=True, text=True, check=True)
    assert run.stderr == ""


def test_several_rows_are_refused_before_anything_runs(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=4)
    llama.register_forward_pre_hook(lambda module, args: pytest.fail("it ran"))
    listener = Listener()
    for options in ({}, {"num_return_sequences": 2, "do_sample": True}):
        prompts = tiny.prompt(5, 1 if options else 2)
        with pytest.raises(selfspec.errors.UnsupportedOptionError, match=r"streamer.*one row.*spec\.stream"):
            spec.generate(prompts, streamer=listener, **{**OPTIONS, **options})
    assert listener.heard == []

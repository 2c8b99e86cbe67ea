"""Streams: streamers hear what transformers tells them, text comes piece by piece, modes of torch change meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.generation import BaseStreamer

import selfspec
from helpers import tiny
from helpers.shrunken import shrunken
from helpers.tokenizers import KINDS
from selfspec.decode.generation import Generation
from selfspec.decode.text_stream import TextStream, continuation

OPTIONS: dict[str, Any] = {"max_new_tokens": 17, "do_sample": False}


class Listener(BaseStreamer):
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


def test_foreseeing_takes_nothing_in(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(tokenizer, tokenizer("Once upon").input_ids)
    tokens = tokenizer("Once upon a time").input_ids[len(tokenizer("Once upon").input_ids) :]
    assert stream.foresee(tokens) == " a time"
    assert stream.push(tokens) == " a time"


@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), special=st.booleans())
def test_pieces_make_up_the_whole(data: st.DataObject, kind: str, special: bool) -> None:
    """Of any tokens, in any portions: bytes that make no character, spaces and special tokens among them."""
    tokenizer = KINDS[kind]()
    any_tokens = st.lists(st.integers(0, len(tokenizer) - 1), max_size=14) | st.text(max_size=6).map(
        lambda text: tokenizer(text).input_ids
    )
    prompt, tokens = data.draw(any_tokens), data.draw(any_tokens)
    stream, text, at = TextStream(tokenizer, prompt, special), "", 0
    while at < len(tokens):
        size = data.draw(st.integers(1, 4))
        text += stream.push(tokens[at : at + size])
        at += size
    text += stream.finish()
    assert text == continuation(tokenizer, prompt, tokens, special)
    if not prompt:
        assert text == tokenizer.decode(tokens, skip_special_tokens=not special)


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_level"])
def test_a_character_that_the_prompt_leaves_unfinished_is_written_whole(kind: str) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer("a\N{PARTY POPPER}bcd", add_special_tokens=False).input_ids
    stream = TextStream(tokenizer, tokens[:-5])
    assert stream.push(tokens[-5:]) == "\N{PARTY POPPER}bcd"


NEW = 9
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
}
CHANGES = [*(pair for pair in permutations(MODES, 2) if "inference" in pair), ("grad", "no grad"), ("no grad", "grad")]
DRAFTS = (None, "exit:2", "int8", "recycle")


def begun(spec: selfspec.SelfSpeculative) -> Generation:
    prompt = tiny.prompt(9)
    return spec.stream(prompt, torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, pad_token_id=0)


def taken(generation: Generation, rounds: int) -> list[int]:
    return [token for _, committed in zip(range(rounds), generation, strict=False) for token in committed.tokens]


def modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny.llama() if request.param == "llama" else shrunken(request.param)


@pytest.mark.parametrize("draft", DRAFTS)
def test_it_may_begin_in_one_mode_and_go_on_in_another(model: PreTrainedModel, draft: str | None) -> None:
    prompt = tiny.prompt(9)
    wanted = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    spec = selfspec.wrap(model, draft, draft_length=3)
    around = modes()
    for first, then in CHANGES:
        with MODES[first]():
            inside = modes()
            generation = begun(spec)
            tokens = taken(generation, 1)
            assert modes() == inside
        with MODES[then]():
            inside = modes()
            tokens += taken(generation, 1)
            assert modes() == inside
        tokens += taken(generation, NEW)
        assert modes() == around
        assert tokens == wanted[0, 9:].tolist(), (first, then)
        assert torch.equal(generation.output().sequences, wanted)


@pytest.mark.parametrize("draft", [None, "int8"])
@pytest.mark.parametrize("leave", [Generation.close, lambda _: None], ids=["closed", "dropped"])
def test_it_may_be_left_in_another_mode_than_it_began_in(
    model: PreTrainedModel, draft: str | None, leave: Callable[[Generation], None]
) -> None:
    spec = selfspec.wrap(model, draft, draft_length=3)
    wanted = taken(begun(spec), NEW)
    for first, then in CHANGES:
        with MODES[first]():
            generation = begun(spec)
            taken(generation, 1)
        with MODES[then]():
            inside = modes()
            leave(generation)
            del generation
            gc.collect()
            assert modes() == inside
            # What the wrapper keeps serves in either mode.
            assert taken(begun(spec), NEW) == wanted

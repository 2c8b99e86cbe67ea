"""Passes beside the engine's own run in threads that end: OpenMP keeps a team for each thread that lives."""

from __future__ import annotations

import asyncio
import threading

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import selfspec
from helpers.serving import small
from helpers.stories import checkpoint_folder
from selfspec.serve.engine import Engine
from selfspec.serve.own_thread import in_own_thread
from selfspec.serve.served import serve_model


def threads_of(model: PreTrainedModel) -> set[threading.Thread]:
    """The threads in which the model will run from now on."""
    seen: set[threading.Thread] = set()
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: seen.add(threading.current_thread()))
    return seen


def test_work_is_done_in_a_thread_that_ends() -> None:
    thread = in_own_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 // 0)


def test_no_thread_that_lives_ran_the_model_before_the_engine_does() -> None:
    model = small()
    seen = threads_of(model)
    Engine(selfspec.wrap(model))
    assert seen
    assert not any(thread.is_alive() for thread in seen)


def test_prompts_are_scored_in_a_thread_that_ends() -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    served = serve_model(selfspec.wrap(model), AutoTokenizer.from_pretrained(checkpoint_folder()), "stories")
    seen = threads_of(model)
    try:
        asyncio.run(served.score([1, 2, 3], 1))
    finally:
        served.close()
    assert seen
    assert not any(thread.is_alive() for thread in seen)

"""A saved folder in what `transformers` runs of folders: a pipeline, and `transformers serve` with OpenAI's client."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import selfspec
from helpers.saved_folders import checkpoint_folder, installed, rounds  # noqa: F401 - a fixture
from helpers.tokenizers import PLAIN

pytest.importorskip("openai")

from openai import OpenAI
from transformers.cli.serve import Serve

MESSAGES = [{"role": "user", "content": "Tell me of Lily."}]
NEW = 24


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())
    tokenizer.chat_template = PLAIN
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float32)
    saved = tmp_path / "model"
    selfspec.wrap(model, "exit:3", draft_length=3).save_pretrained(saved, tokenizer=tokenizer)
    return str(saved)


@pytest.fixture
def expected(folder: str) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    text: str = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_a_pipeline_drafts_by_the_folder(folder: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = rounds(monkeypatch)
    made = pipeline("text-generation", model=folder, trust_remote_code=True)
    answer = made(MESSAGES, max_new_tokens=NEW, do_sample=False)[0]["generated_text"][-1]["content"]
    assert answer.strip() == expected.strip()
    assert max(drafted) == 3


class Closing(Serve):
    """Closes its loop at the end."""

    def start_server(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), name="transformers-serve")
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)


@pytest.fixture
def served(folder: str) -> Iterator[OpenAI]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Closing(
        folder, device="cpu", dtype="float32", trust_remote_code=True, host="127.0.0.1", port=port, non_blocking=True
    )
    try:
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        server.kill_server()


@pytest.mark.parametrize("stream", [False, True])
def test_transformers_serve_drafts_by_the_folder(
    folder: str, expected: str, served: OpenAI, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted = rounds(monkeypatch)
    reply = served.chat.completions.create(
        model=folder, messages=MESSAGES, max_tokens=NEW, temperature=0, stream=stream
    )
    if stream:
        said = "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)
    else:
        said = reply.choices[0].message.content
    assert said.strip() == expected.strip()
    assert max(drafted) == 3

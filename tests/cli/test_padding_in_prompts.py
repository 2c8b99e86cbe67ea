"""Prompts that contain the padding token, as chat templates write it: to every command all of a prompt is text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.http_server import running
from helpers.running import Invoke
from helpers.stories import checkpoint_folder
from helpers.tokenizers import written

pytest.importorskip("pandas")

TEXTS = ("One day</s> a dog and a cat</s> went to the", "Tom</s></s> had a big red ball. He liked to")
NEW = 12


@pytest.fixture(params=["pad = eos, inside", "pad = bos = eos, first"])
def padded(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A checkpoint whose padding token is one of its end tokens, and stands in every prompt."""
    folder = tmp_path / "padded"
    shutil.copytree(checkpoint_folder(), folder)
    pad = 2 if "inside" in request.param else 1
    for name in ("config.json", "generation_config.json"):
        said = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**said, "pad_token_id": pad}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert all(pad in tokenizer(text).input_ids for text in TEXTS)
    return str(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Both texts as a workload, and as a file of prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return str(file)


def said(invoke: Invoke, *words: str, stdin: bytes = b"") -> dict[str, Any]:
    ending = invoke(*words, "--output", "json", stdin=stdin)
    assert ending.status == 0, ending.stderr
    found: dict[str, Any] = json.loads(ending.stdout)
    return found


def stock(folder: str, ids: list[int], new: int = NEW) -> list[int]:
    """The model's own text, all of the prompt being text."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([ids])
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
    found: list[int] = text[0, len(ids) :].tolist()
    return found


def assert_generates_stock_text(invoke: Invoke, model: str, draft: str, text: str = TEXTS[0]) -> None:
    words = ("generate", model, "--prompt", text, "--draft", draft, "--max-new-tokens", str(NEW))
    found = said(invoke, *words)
    assert found["token_ids"] == stock(model, found["prompt_token_ids"])


@pytest.mark.parametrize("draft", ["none", "lookup+exit:3", "union:suffix+recycle+int8"])
def test_generate(invoke: Invoke, padded: str, draft: str) -> None:
    for text in TEXTS:
        assert_generates_stock_text(invoke, padded, draft, text)


def test_chat(invoke: Invoke, padded: str, tmp_path: Path) -> None:
    template = written(tmp_path, "{% for message in messages %}{{ message.content }}</s>{% endfor %}")
    words = ("chat", padded, "--template", template, "--draft", "exit:3", "--max-new-tokens", str(NEW))
    found = said(invoke, *words, stdin="\n".join(TEXTS).encode())
    tokenizer = AutoTokenizer.from_pretrained(padded)
    for turn in range(len(TEXTS)):
        before = "".join(f"{each['content']}</s>" for each in found["messages"][: 2 * turn + 1])
        ids = tokenizer(before, add_special_tokens=False).input_ids
        answer = tokenizer.decode(stock(padded, ids), skip_special_tokens=True)
        assert found["messages"][2 * turn + 1]["content"].split() == answer.split()


def test_serve(padded: str) -> None:
    with running(folder=padded, draft="exit:3") as server:
        for text in TEXTS:
            answer = server.complete(prompt=text, max_tokens=NEW, temperature=0).body["choices"][0]["text"]
            ids = server.tokenizer(text).input_ids
            assert answer.split() == server.tokenizer.decode(stock(padded, ids), skip_special_tokens=True).split()


def test_verify(invoke: Invoke, padded: str, prompts: str) -> None:
    words = f"verify {padded} --draft exit:3 --prompt-file {prompts} --max-new-tokens 8 --samples 100".split()
    assert said(invoke, *words)["verdict"] == "EXACT"


def test_bench(invoke: Invoke, padded: str, prompts: str, tmp_path: Path) -> None:
    quick = ("--prompts", "2", "--context", "12", "--max-new-tokens", "16", "--repeats", "1", "--warm-up", "1")
    words = f"bench {padded} --workload x={prompts} --arm draft --arm lookup --draft lookup+exit:3".split()
    found = said(invoke, *words, *quick, "--measure", "quality", "--temperature", "0", "--to", str(tmp_path))
    arms = found["cells"][0]["arms"]
    assert all(arm["absence"] is None for arm in arms)


STUDY = ("--texts", "2", "--prompt-tokens", "12", "--max-new-tokens", "8", "--pricing", "weights", "--device", "cpu")


@pytest.mark.tools
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_ablate(invoke: Invoke, padded: str, prompts: str, tmp_path: Path, temperature: str) -> None:
    to = str(tmp_path / "study")
    words = f"ablate --model {padded} --draft exit:3 --confirm 1 --temperature {temperature} --to {to}".split()
    found = said(invoke, *words, "--workload", f"x={prompts}", *STUDY)
    assert found["failed"] == []
    confirmed = [row for row in found["best"] if row.get("measured_speedup")]
    assert confirmed
    assert all(row["exact"] is (True if temperature == "0" else None) for row in confirmed)


def test_search(invoke: Invoke, padded: str, prompts: str, tmp_path: Path) -> None:
    words = ("search", padded, "--to", str(tmp_path / "found.json"), "--evaluations", "4", "--workload", f"x={prompts}")
    assert said(invoke, *words, *STUDY)["evaluations"] == 4


@pytest.mark.tools
def test_calibrate(invoke: Invoke, padded: str, prompts: str, tmp_path: Path) -> None:
    quick = ("--draft", "exit:3", "--max-new-tokens", "8", "--repeats", "1", "--longest-draft", "1", "--threads", "1")
    found = said(invoke, "calibrate", padded, *quick, "--prompt-file", prompts, "--to", str(tmp_path / "profile.json"))
    assert found["report"]["settings"]["prompts"] == 2


def test_quantize(invoke: Invoke, padded: str, prompts: str, tmp_path: Path) -> None:
    file = str(tmp_path / "int4.safetensors")
    said(invoke, "quantize", padded, "--bits", "4", "--texts", "2", "--prompt-file", prompts, "--to", file)
    assert_generates_stock_text(invoke, padded, f"int4:{file}")


@pytest.mark.tools
@pytest.mark.parametrize("kind", ["exit", "layerskip"])
def test_train(invoke: Invoke, padded: str, tmp_path: Path, kind: str) -> None:
    text, to = tmp_path / "text.txt", str(tmp_path / "trained")
    text.write_text(" ".join(TEXTS) * 40)
    words = ("train", kind, padded, "--text", str(text), "--to", to, "--exits", "3", "--steps", "2", "--batch", "2")
    short = ("--length", "16", "--held-out-blocks", "2", "--device", "cpu")
    said(invoke, *words, *short, *(("--check-seconds", "0") if kind == "layerskip" else ()))
    model, draft = (to, "exit:3") if kind == "layerskip" else (padded, f"head:{to}@3")
    assert_generates_stock_text(invoke, model, draft)


def test_export(invoke: Invoke, padded: str, tmp_path: Path) -> None:
    """It proves itself on random tokens, of which none pads."""
    to = str(tmp_path / "draft")
    said(invoke, "export", padded, "--draft", "exit:3", "--to", to)
    assert_generates_stock_text(invoke, padded, f"assistant:{to}")


def test_index(invoke: Invoke, padded: str, prompts: str, tmp_path: Path) -> None:
    corpus, documents = str(tmp_path / "corpus"), tmp_path / "documents.jsonl"
    documents.write_text(Path(prompts).read_text().replace('"prompt"', '"text"'))
    said(invoke, "index", padded, "--text", str(documents), "--to", corpus)
    assert_generates_stock_text(invoke, padded, f"suffix:{corpus}")


def test_inspect(invoke: Invoke, padded: str) -> None:
    assert said(invoke, "inspect", padded)

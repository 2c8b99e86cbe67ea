"""Prompts that contain the padding token, as chat templates write it: to every command all of a prompt is text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.http_server import running
from helpers.saved_folders import checkpoint_folder
from helpers.snippets import Invoke, Said
from helpers.tokenizers import written

pytest.importorskip("pandas")

TEXTS = ("One day</s> a dog and a cat</s> went to the", "Tom</s></s> had a big red ball. He liked to")
NEW = 12
PADS = ("pad = eos, inside", "pad = bos = eos, first")


@pytest.fixture(params=PADS)
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
def place(tmp_path: Path) -> Path:
    """A folder with both texts: as prompts, as documents, and as one text."""
    for name in ("prompt", "text"):
        (tmp_path / f"{name}s.jsonl").write_text("".join(json.dumps({name: text}) + "\n" for text in TEXTS))
    (tmp_path / "text.txt").write_text(" ".join(TEXTS) * 40)
    return tmp_path


def stock(folder: str, ids: list[int], new: int = NEW) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([ids])
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
    found: list[int] = text[0, len(ids) :].tolist()
    return found


def assert_generates_stock_text(said: Said, model: str, draft: str, text: str = TEXTS[0]) -> None:
    found = said("generate", model, "--prompt", text, "--draft", draft, "--max-new-tokens", str(NEW))
    assert found["token_ids"] == stock(model, found["prompt_token_ids"])


@pytest.mark.parametrize("draft", ["none", "lookup+exit:3", "suffix+recycle+int8"])
def test_generate(said: Said, padded: str, draft: str) -> None:
    for text in TEXTS:
        assert_generates_stock_text(said, padded, draft, text)


def test_chat(said: Said, padded: str, tmp_path: Path) -> None:
    template = written(tmp_path, "{% for message in messages %}{{ message.content }}</s>{% endfor %}")
    words = ("chat", padded, "--template", template, "--draft", "exit:3", "--max-new-tokens", str(NEW))
    found = said(*words, stdin="\n".join(TEXTS).encode())
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


BENCH = "--prompts 2 --context 12 --max-new-tokens 16 --repeats 1 --warm-up 1 --measure quality --temperature 0"
TRAINING = "--steps 2 --batch 2 --length 16 --held-out-blocks 2 --device cpu"


def typed(words: str, padded: str, place: Path) -> list[str]:
    return words.format(padded=padded, place=place, text=place / "text.txt", to=place / "made").split()


@pytest.mark.tools
def test_bench(said: Said, padded: str, place: Path) -> None:
    words = (
        "bench {padded} --workload x={place}/prompts.jsonl --arm draft --arm lookup --draft lookup+exit:3 --to {to} "
    )
    table = said(*typed(words + BENCH, padded, place))["table"]
    assert {row["arm"] for row in table} >= {"model.generate", "selfspec plain"}
    assert not any(row["refused"] for row in table)
    # Greedy lossless texts are the same, and so is what they are worth.
    assert len({round(row["perplexity"], 4) for row in table}) == 1
    assert {row["quality_differs"] for row in table if "quality_differs" in row} == {False}


# What makes a draft, the model and the draft that it is for, and pieces of what it prints.
MAKERS = [
    # It proves itself on random tokens, of which none pads.
    ("export {padded} --draft exit:3", "{to} lookup", "{to}: exit:3, 3 layers|assistant_model"),
    ("train vocabulary {padded} --text {text} --size 16", "{padded} exit:3+vocab:{to}", ""),
    (
        f"train head {{padded}} --depth 2 --text {{text}} {TRAINING}",
        "{padded} eagle:{to}",
        "token 1|token 2|accepted of a greedy draft|step 2/2",
    ),
    pytest.param(
        f"train exit {{padded}} --exits 2,3 --text {{text}} {TRAINING}",
        *("{padded} head:{to}@3", "exit 2|exit 3|selfspec calibrate|step 2/2"),
        marks=pytest.mark.tools,
    ),
    pytest.param(
        f"train layerskip {{padded}} --exits 2,3 --text {{text}} {TRAINING}",
        *("{to} exit:3", "exit 2|exit 3|selfspec calibrate|step 2/2"),
        marks=pytest.mark.tools,
    ),
]


@pytest.mark.parametrize(("padded", "output"), list(zip(PADS, ("text", "json"), strict=True)), indirect=["padded"])
@pytest.mark.parametrize(("words", "drafted", "printed"), MAKERS)
def test_what_is_made_drafts(
    invoke: Invoke, said: Said, padded: str, place: Path, words: str, drafted: str, printed: str, output: str
) -> None:
    command = typed(f"{words} --to {{to}}", padded, place)
    if output == "json":
        said(*command)
    else:
        ending = invoke(*command)
        assert ending.status == 0, ending.stderr
        for each in printed.split("|"):
            assert each.format(to=place / "made") in ending.stdout + ending.stderr
        shown = [line for line in ending.stderr.splitlines() if line]
        assert len(set(shown)) == len(shown)
    assert_generates_stock_text(said, *typed(drafted, padded, place))

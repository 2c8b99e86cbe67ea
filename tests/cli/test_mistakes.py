"""Typical mistakes on the command line and in Python: each is answered by one clear line, status 2 or a typed error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.running import Invoke
from selfspec.errors import SelfSpecError

# What is typed after `selfspec`, and a piece of the answer. `{tmp}` is an empty folder, `{text}` a file of text.
COMMANDS = {
    "a command that there is not": ("generat demo", "Did you mean 'generate'"),
    "a command misspelt": ("calibrat demo", "Did you mean 'calibrate'"),
    "an option that there is not": ("generate demo --promt x", "--prompt"),
    "an option without its value": ("generate demo --prompt", "requires an argument"),
    "no model": ("generate --prompt x", "name a model: a checkpoint folder, a hub name, or demo"),
    "no model to calibrate": ("calibrate", "name a model: a checkpoint folder, a hub name, or demo"),
    "no model to benchmark": ("bench", "name a model: a checkpoint folder, a hub name, or demo"),
    "no prompt": ("generate demo --prompt-file {tmp}/none.txt", "cannot be read"),
    "an empty prompt file": ("generate demo --prompt-file {tmp}/empty.txt", "is empty"),
    "a prompt file that is no text": ("generate demo --prompt-file {tmp}/binary", "is not UTF-8"),
    "two prompts": ("generate demo --prompt x --prompt-file {text}", "give the prompt once"),
    "a folder that there is not": ("generate ./nowhere --prompt x", "does not exist"),
    "an absolute folder that there is not": ("verify /nowhere/model", "does not exist"),
    "an empty folder": ("generate {tmp} --prompt x", "has no config.json"),
    "a file for a folder": ("generate {text} --prompt x", "is a file; give the folder"),
    "a draft misspelt": ("generate demo --draft exti:4 --prompt x", "did you mean exit:4"),
    "a draft without its colon": ("generate demo --draft exit4 --prompt x", "did you mean exit:4"),
    "a draft in capitals": ("generate demo --draft INT8 --prompt x", "did you mean int8"),
    "an exit without a layer": ("generate demo --draft exit: --prompt x", "write exit:E"),
    "an exit beyond the depth": ("generate demo --draft exit:99 --prompt x", "choose 1..11"),
    "an exit at 0": ("generate demo --draft exit:0 --prompt x", "choose 1..11"),
    "three bits": ("generate demo --draft int3 --prompt x", "is not understood"),
    "a skip set without parts": ("generate demo --draft skip:3 --prompt x", "write skip:PART"),
    "a skip set beyond the depth": ("generate demo --draft skip:layers=40 --prompt x", "40"),
    "a skip file that there is not": ("generate demo --draft skip-file:no.json --prompt x", "no.json"),
    "a profile that there is not": ("generate demo --draft auto:no.json --prompt x", "no.json"),
    "heads that there are not": ("generate demo --draft head:nowhere --prompt x", "nowhere"),
    "substitutes that there are not": ("generate demo --draft int4:no.safetensors --prompt x", "no.safetensors"),
    "a draft of length 0": ("generate demo --draft exit:4 --draft-length 0 --prompt x", "--draft-length"),
    "trees of plain decoding": ("generate demo --nodes 8 --prompt x", "--nodes has no effect"),
    "a rule that there is not": ("generate demo --accept greedy --prompt x", "greedy"),
    "a negative temperature": ("generate demo --temperature -1 --prompt x", "--temperature"),
    "top-p of greedy decoding": ("generate demo --top-p 0.9 --prompt x", "--top-p has no effect"),
    "top-k of greedy decoding": ("generate demo --top-k 5 --prompt x", "--top-k has no effect"),
    "top-p in percent": ("generate demo --temperature 1 --top-p 90 --prompt x", "--top-p"),
    "a negative seed": ("generate demo --seed -1 --prompt x", "--seed must be"),
    "no new tokens": ("generate demo --max-new-tokens 0 --prompt x", "--max-new-tokens"),
    "new tokens in words": ("generate demo --max-new-tokens ten --prompt x", "--max-new-tokens"),
    "a device that there is not": ("generate demo --device gpu --prompt x", "is no device"),
    "a device that is not here": ("generate demo --device cuda:99 --prompt x", "choose cpu"),
    "a dtype that there is not": ("generate demo --dtype int8 --prompt x", "--dtype"),
    "no threads": ("generate demo --threads 0 --prompt x", "--threads"),
    "a format that there is not": ("inspect demo --output yaml", "--output"),
    "a budget without a unit": ("inspect demo --memory much", "much"),
    "a context without a budget": ("inspect demo --context 100", "add --memory"),
    "a repetition penalty of 0": ("generate demo --repetition-penalty 0 --prompt x", "repetition_penalty"),
    "quantizing to 3 bits": ("quantize demo --bits 3 --to {tmp}/m", "8 and 4 bits"),
    "a workload without a file": ("bench demo --workload code --to {tmp}/b", "write NAME=FILE"),
    "a workload that there is not": ("bench demo --workload a=no.jsonl --to {tmp}/b", "no.jsonl"),
    "plain decoding as a draft of bench": ("bench demo --draft none --to {tmp}/b", "always among the arms"),
    "a demo without a draft": ("demo --draft none", "give --draft exit:4"),
    "a demo that does not sample": ("demo --temperature 0", "give one above 0"),
    "a study of nothing": ("ablate", "there is nothing to study"),
    "a study that there is not": ("ablate {tmp}/no.toml", "no.toml"),
    "sizes of skip sets in words": ("search demo --sublayers few --to {tmp}/s.json", "--sublayers"),
    "a training without a text": ("train layerskip demo --to {tmp}/t", "--text"),
    "a training on a text that there is not": ("train layerskip demo --text no.txt --to {tmp}/t", "no.txt"),
    "exits in words": ("train layerskip demo --text {text} --to {tmp}/t --exits early", "--exits"),
}


@pytest.mark.parametrize(("typed", "answer"), COMMANDS.values(), ids=COMMANDS)
def test_on_the_command_line(invoke: Invoke, tmp_path: Path, typed: str, answer: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a dog. " * 20)
    words = [word.format(tmp=tmp_path, text=text) for word in typed.split()]
    ending = invoke(*words)
    assert (ending.status, ending.stdout) == (2, "")
    assert ending.stderr.startswith("error: ")
    assert ending.stderr.count("\n") == 1
    assert answer in ending.stderr
    assert len(ending.stderr.split()) < 70


PROMPT = torch.tensor([[1, 2, 3]])

# What is called with a stock model of four layers, and a piece of the answer.
CALLS: dict[str, tuple[Callable[[PreTrainedModel], Any], str]] = {
    "a bare decoder": (lambda model: selfspec.wrap(model.model, "int8"), "language-model head"),
    "a linear layer": (lambda model: selfspec.wrap(torch.nn.Linear(2, 2), "int8"), "not a transformers model"),
    "a misspelt draft": (lambda model: selfspec.wrap(model, "look-up"), "did you mean lookup"),
    "a number for a draft": (lambda model: selfspec.wrap(model, cast(Any, 4)), "EarlyExit(layer=4)"),
    "a class for a draft": (lambda model: selfspec.wrap(model, cast(Any, selfspec.drafts.EarlyExit)), "EarlyExit"),
    "an exit beyond the depth": (lambda model: selfspec.wrap(model, selfspec.drafts.EarlyExit(9)), "choose 1..3"),
    "a draft length of 0": (lambda model: selfspec.wrap(model, "exit:2", draft_length=0), "at least 1"),
    "a rule that there is not": (lambda model: selfspec.wrap(model, "exit:2", accept="best"), "best"),
    "three bits": (lambda model: selfspec.drafts.LowPrecision(3), "8 and 4"),
    "a skip set of all": (lambda model: selfspec.wrap(model, selfspec.drafts.LayerSkip(layers=[0, 1, 2, 3])), "layers"),
    "text for ids": (lambda model: _wrapped(model).generate(cast(Any, "Once")), "input_ids"),
    "a flat prompt": (lambda model: _wrapped(model).generate(PROMPT[0]), "input_ids[None]"),
    "ids that the model has not": (lambda model: _wrapped(model).generate(PROMPT + 100), "vocabulary"),
    "a mask of another shape": (lambda model: _wrapped(model).generate(PROMPT, torch.ones(1, 9)), "mask"),
    "beams": (lambda model: _wrapped(model).generate(PROMPT, num_beams=2, max_new_tokens=4), "num_beams"),
    "no new tokens": (lambda model: _wrapped(model).generate(PROMPT, max_new_tokens=0), "max_new_tokens=0"),
    "a temperature of 0": (
        lambda model: _wrapped(model).generate(PROMPT, do_sample=True, temperature=0.0),
        "do_sample=False",
    ),
    "an option misspelt": (lambda model: _wrapped(model).generate(PROMPT, max_new_token=4), "max_new_token"),
    "a prompt beyond the context": (
        lambda model: _wrapped(model).generate(torch.ones(1, 200, dtype=torch.long), max_new_tokens=4),
        "shorten the prompt",
    ),
    "a wrapper that was unwrapped": (lambda model: _unwrapped(model).generate(PROMPT), "selfspec.wrap"),
    "a file for a checkpoint": (lambda model: selfspec.load(__file__, "1GiB"), "is a file"),
    "a folder that there is not": (lambda model: selfspec.load("./nowhere", "1GiB"), "does not exist"),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama()


def _wrapped(model: PreTrainedModel) -> selfspec.SelfSpeculative:
    return selfspec.wrap(model, "exit:2")


def _unwrapped(model: PreTrainedModel) -> selfspec.SelfSpeculative:
    spec = _wrapped(model)
    spec.unwrap()
    return spec


@pytest.mark.parametrize(("call", "answer"), CALLS.values(), ids=CALLS)
def test_in_python(model: PreTrainedModel, call: Callable[[PreTrainedModel], Any], answer: str) -> None:
    with pytest.raises(SelfSpecError) as refused:
        call(model)
    message = str(refused.value)
    assert answer in message
    assert "\n" not in message
    assert len(message.split()) < 70


def test_there_are_75_of_them() -> None:
    assert len(COMMANDS) + len(CALLS) >= 75

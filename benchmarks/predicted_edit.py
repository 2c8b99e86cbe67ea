"""Predicted outputs: an answer that repeats a file with some lines edited, with and without the file as prediction.

    python benchmarks/predicted_edit.py SMOLLM2 --threads 2

The prompt holds a file of 200 lines and asks for it again; greedily, a small model copies it. Ten lines of that answer
are then changed for the prediction, as if the model were editing these lines. Each draft runs with the prediction and
without it, in turns: by `spec.generate`, and by a server's chat completions. Texts are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import RESULTS, seconds_of
from loopback import free_port, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec
from selfspec.files.writing import write_json
from selfspec.measure.environment import environment

LINES, EDITED = 200, 10
DRAFTS = ("none", "lookup", "auto")
_KINDS = ("timeout", "limit", "path", "colour", "owner", "mode", "level", "port")


@dataclass(frozen=True)
class Reply:
    """An answer, its tokens, and the draft tokens out of the prediction."""

    text: str
    tokens: int
    accepted: int
    rejected: int


Ask = Callable[[str | None], Reply]
"""Answers the same messages with a prediction, or without one."""


def file_of(seed: int) -> list[str]:
    """Make the lines of a file of settings."""
    rng = random.Random(seed)
    return [f"{rng.choice(_KINDS)}{number} = {rng.randrange(10)}" for number in range(LINES)]


def messages(lines: list[str]) -> list[dict[str, str]]:
    """Ask for the file."""
    text = "\n".join(lines)
    return [{"role": "user", "content": f"Repeat this file exactly, and nothing else:\n\n```\n{text}\n```"}]


def edited(answer: str, seed: int) -> str:
    """Change ten lines of an answer, far from each other."""
    lines, rng = answer.split("\n"), random.Random(seed)
    for each in range(EDITED):
        place = (2 * each + 1) * len(lines) // (2 * EDITED)
        name, _, value = lines[place].partition(" = ")
        lines[place] = f"{name} = [{value}, {rng.randrange(1000)}]"
    return "\n".join(lines)


@contextmanager
def in_python(folder: str, draft: str, asked: Any, new: int, threads: int) -> Iterator[Ask]:
    """Ask `spec.generate`."""
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    spec = selfspec.wrap(AutoModelForCausalLM.from_pretrained(folder), draft)
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=False)

    def ask(prediction: str | None) -> Reply:
        asked_for = {"max_new_tokens": new, "do_sample": False, "tokenizer": tokenizer, "prediction": prediction}
        out = spec.generate(ids, torch.ones_like(ids), **asked_for)
        text = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        accepted = out.stats.predicted_accepted
        return Reply(text, out.lengths[0], accepted, out.stats.predicted - accepted)

    yield ask


@contextmanager
def in_server(folder: str, draft: str, asked: Any, new: int, threads: int) -> Iterator[Ask]:
    """Ask `selfspec serve`, which keeps no caches of earlier answers."""
    port = free_port()
    command = [sys.executable, "-m", "selfspec", "serve", folder, "--port", str(port), "--name", "m"]
    command += ["--draft", draft, "--keep", "0", "--dtype", "float32"]
    url = f"http://127.0.0.1:{port}/v1/chat/completions"

    def ask(prediction: str | None) -> Reply:
        said = None if prediction is None else {"type": "content", "content": prediction}
        body = {"model": "m", "messages": asked, "max_tokens": new, "temperature": 0, "prediction": said}
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            found = json.load(reply)
        details = found["usage"]["completion_tokens_details"]
        counts = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        return Reply(found["choices"][0]["message"]["content"], found["usage"]["completion_tokens"], *counts)

    with TemporaryDirectory() as logs, serving(command, port, threads, Path(logs) / "log"):
        yield ask


def compared(ask: Ask, repeats: int) -> dict[str, Any]:
    """Time answers with and without the prediction, in turns."""
    seconds: dict[str | None, list[float]] = {}
    replies: dict[str | None, Reply] = {}

    def once(said: str | None) -> None:
        spent = seconds_of(lambda: replies.update({said: ask(said)}))
        seconds.setdefault(said, []).append(spent)

    once(None)
    text = replies[None].text
    prediction = edited(text, 1)
    once(prediction)
    if repeats > 1:
        # The first of each warmed up.
        seconds.clear()
        for _ in range(repeats):
            once(None)
            once(prediction)
    without, with_it = (median(seconds[said]) for said in (None, prediction))
    return {
        "seconds": {"without": round(without, 3), "with": round(with_it, 3)},
        "times_as_fast": round(without / with_it, 2),
        "equal": {reply.text for reply in replies.values()} == {text},
        **{name: value for name, value in asdict(replies[prediction]).items() if name != "text"},
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a small chat model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--new", type=int, default=2048, help="most tokens of the answer")
    parser.add_argument("--draft", action="append", help=f"by default each of {', '.join(DRAFTS)}")
    parser.add_argument("--by", action="append", choices=("python", "server"), help="by default both")
    parser.add_argument("--to", default="predicted_edit", help="name of the results, which are added to")
    options = parser.parse_args()
    file, asked = RESULTS / f"{options.to}.json", messages(file_of(7))
    ways = {"python": in_python, "server": in_server}
    for by in options.by or ways:
        for draft in options.draft or DRAFTS:
            with ways[by](options.model, draft, asked, options.new, options.threads) as ask:
                found = compared(ask, options.repeats)
            record = json.loads(file.read_text()) if file.exists() else {}
            record |= {"environment": environment(torch.device("cpu")), "lines": LINES, "edited": EDITED}
            record.setdefault(by, {})[draft] = found
            write_json(file, record)
            print(by, draft, json.dumps(found))


if __name__ == "__main__":
    main()

"""Time an edit whose result the client predicts, through the server and in Python, with the prediction and without.

    python benchmarks/edits.py MODEL --texts 'heldout.jsonl#kind=code' --name edits

A small model cannot be asked to edit a file. So the new file is what the model writes greedily after the prompt, of
`--lines` lines, and the prediction is that file with a line more after `--changed` of them, evenly spread, as an older
version differs from it. Requests with and without the prediction take turns; every text is compared with the new file.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from harness import keep, prompts_of
from loopback import ask, free_port, serving
from transformers.utils import logging

import selfspec
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.environment import environment
from selfspec.measure.stock import bare


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--texts", required=True, metavar="FILE[#FIELD=VALUE]", help="of which the first begins")
    parser.add_argument("--draft", default="none", help="beside the prediction, and of the requests without it")
    parser.add_argument("--context", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--changed", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="edits")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    checkpoint = load_checkpoint(options.model, "float32", "cpu")
    model, tokenizer = bare(checkpoint.model), checkpoint.tokenizer
    spec = selfspec.wrap(model, options.draft)
    (ids,) = prompts_of(options.texts, tokenizer, 1, options.context)
    mask = torch.ones_like(ids)
    endless: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    new = spec.generate(ids, mask, max_new_tokens=12 * options.lines, **endless).sequences[0, ids.shape[1] :].tolist()
    ends = list(accumulate(tokenizer.decode([token]).count("\n") for token in new))
    if ends[-1] < options.lines:
        raise SystemExit(f"the model wrote {ends[-1]} lines, not {options.lines}; give other texts")
    new = new[: ends.index(options.lines) + 1]
    file = tokenizer.decode(new)
    lines = file.splitlines(keepends=True)
    for number in range(options.changed):
        lines[int((number + 0.5) * len(lines) / options.changed)] += "# as it was before\n"
    old = "".join(lines)

    def in_python(**predicted: Any) -> str:
        spec.forget()
        out = spec.generate(ids, mask, max_new_tokens=len(new), **endless, **predicted)
        return str(tokenizer.decode(out.sequences[0, ids.shape[1] :]))

    def by_server(**predicted: Any) -> str:
        body = {"model": "m", "prompt": ids[0].tolist(), "max_tokens": len(new), "temperature": 0, "ignore_eos": True}
        return asyncio.run(ask(port, "/v1/completions", {**body, **predicted})).text

    content = {"prediction": {"type": "content", "content": old}}
    tokens = {"prediction": tokenizer(old, add_special_tokens=False).input_ids}
    port, seconds = free_port(), {}
    command = [sys.executable, "-m", "selfspec", "serve", options.model, "--port", str(port), "--name", "m"]
    command += ["--dtype", "float32", "--draft", options.draft, "--keep", "0"]
    with tempfile.TemporaryDirectory() as folder, serving(command, port, options.threads, Path(folder) / "log"):
        seconds["server"] = _timed(by_server, content, file, options.repeats)
    seconds["Python"] = _timed(in_python, tokens, file, options.repeats)
    record = {"model": Path(options.model).name, "draft": options.draft, "tokens": len(new), "lines": options.lines}
    record |= {"changed": options.changed, "seconds": seconds, "environment": environment(model.device)}
    keep(options.name, record, _report(record))
    print(_report(record))


def _timed(write: Callable[..., str], predicted: Mapping[str, Any], file: str, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each turn with and without the prediction; a SystemExit: a text that is not the file."""
    found: dict[str, list[float]] = {"without": [], "with": []}
    # The first turn warms up.
    for turn in range(repeats + 1):
        for how, given in (("without", {}), ("with", predicted)):
            began = time.perf_counter()
            if write(**given) != file:
                raise SystemExit(f"{how} the prediction the text is another one")
            if turn:
                found[how].append(time.perf_counter() - began)
    return found


def _report(record: Mapping[str, Any]) -> str:
    told = [
        f"{record['model']} in float32, {record['tokens']} tokens in {record['lines']} lines, {record['changed']} of "
        f"them changed in the prediction; draft beside it: {record['draft']}; texts equal.\n",
        "| | without, s | with, s | times as fast |\n|---|---|---|---|",
    ]
    for name, turns in record["seconds"].items():
        ratios = [one / other for one, other in zip(turns["without"], turns["with"], strict=True)]
        without, predicted = (statistics.median(turns[how]) for how in ("without", "with"))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        told.append(f"| {name} | {without:.1f} | {predicted:.1f} | {spread} |")
    return "\n".join(told) + "\n"


if __name__ == "__main__":
    main()

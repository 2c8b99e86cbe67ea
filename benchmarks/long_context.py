"""Decoding behind long prompts: each prompt is read once, and every arm goes on from its keys and values, in turns.

    python benchmarks/long_context.py MODEL --texts 'heldout.jsonl#kind=code' --context 8000 32768 \
        --draft int8 --draft int8+window:512 --draft int8+top:512
    python benchmarks/long_context.py MODEL --texts heldout.jsonl --context 131072 --memory 2GiB

`selfspec bench --context` reads the prompt for each arm and repeat, as users do; at tens of thousands of tokens that
takes hours. Speeds here are of the tokens after the first round. With `--memory` the model is loaded within a
budget, which the most memory that the process took while it read is set against.
"""

from __future__ import annotations

import argparse
import time
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from harness import equal_tokens, keep, prompts_of, sampling
from rich.progress import track
from transformers import AutoTokenizer
from transformers.utils import logging

import selfspec
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.embedded import model_place
from selfspec.measure.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.measure.timing import peak_memory
from selfspec.process import resident_bytes

_PLAIN = "plain"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint, or demo")
    parser.add_argument("--texts", required=True, metavar="FILE[#FIELD=VALUE]", help="joined where they are too short")
    parser.add_argument("--context", type=int, nargs="+", required=True, help="tokens of a prompt")
    parser.add_argument("--draft", action="append", default=[], help="may be given again")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", help="budget of the process, e.g. 2GiB; drafts in fewer bits have no room then")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="long_context", help="of the results")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    place = model_place(options.model)
    tokenizer = AutoTokenizer.from_pretrained(place)
    if options.memory:
        # One token is written where the prompt is read.
        room = max(options.context) + 1 + options.max_new_tokens
        model = selfspec.load(place, options.memory, device="cpu", dtype="float32", draft=False, context=room).model
    else:
        model = load_checkpoint(place, "float32", "cpu").model
    settings = {name: value for name, value in vars(options).items() if name not in ("model", "texts")}
    contexts: dict[str, Any] = {}
    record = {
        "model": options.model.rstrip("/").rpartition("/")[2],
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "settings": settings,
        "environment": environment(torch.device("cpu")),
        "contexts": contexts,
    }
    for context in options.context:
        prompt = prompts_of(options.texts, tokenizer, 1, context)[0]
        contexts[str(context)] = _behind(model, prompt, options)
        keep(options.name, record, _report(record))
    print(_report(record))


def _behind(model: Any, prompt: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Read a prompt, and time what follows it."""
    plain, tokens = selfspec.wrap(model, None), options.max_new_tokens
    outputs: list[Any] = []

    def reads() -> None:
        mask = torch.ones_like(prompt)
        outputs.append(plain.generate(prompt, mask, max_new_tokens=1, eos_token_id=None, return_dict_in_generate=True))

    before, started = resident_bytes() or 0, time.perf_counter()
    most = before + (peak_memory(reads, prompt.device) or 0)
    seconds, read = time.perf_counter() - started, outputs[0]
    arms = {_PLAIN: plain, **{draft: plain.drafting(draft) for draft in options.draft}}
    found: dict[str, Any] = {}
    for temperature in options.temperatures:
        rates: dict[str, list[float]] = {name: [] for name in arms}
        texts: dict[str, list[list[int]]] = {name: [] for name in arms}
        passes: dict[str, list[float]] = {name: [] for name in arms}
        for repeat in track(range(-options.warm_up, options.repeats), f"T {temperature:g}", transient=True):
            for name, spec in arms.items():
                went_on = _went_on(spec, read, max(repeat, 0), tokens, temperature)
                if repeat >= 0:
                    rates[name].append(went_on.rate)
                    texts[name].append(went_on.text)
                    passes[name].append(went_on.a_pass)
        found[f"{temperature:g}"] = {
            name: {
                "tokens_per_second": Estimate.of_median(rates[name]).to_dict(),
                "against plain": Estimate.of_median(
                    [one / base for one, base in zip(rates[name], rates[_PLAIN], strict=True)]
                ).to_dict(),
                "tokens_per_pass": fmean(passes[name]),
                "equal_tokens": min(equal_tokens(*pair) for pair in zip(texts[name], texts[_PLAIN], strict=True)),
            }
            for name in arms
        }
    return {"prefill_seconds": seconds, "cache_bytes": read.stats.cache_bytes, "most_bytes": most, "decoding": found}


@dataclass(frozen=True)
class WentOn:
    """Text of one call.

    Attributes:
        text: new token ids.
        rate: tokens a second after the first round.
        a_pass: tokens of a round after the first.
    """

    text: list[int]
    rate: float
    a_pass: float


def _went_on(
    spec: selfspec.SelfSpeculative, read: selfspec.GenerateOutput, seed: int, tokens: int, temperature: float
) -> WentOn:
    # A copy each, which the call writes to.
    cache, mask = deepcopy(read.cache), torch.ones_like(read.sequences)
    options: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None, "seed": seed, **sampling(temperature)}
    text: list[int] = []
    times: list[tuple[float, int]] = []
    for chunk in spec.stream(read.sequences, mask, cache=cache, **options):
        text += chunk.rows[0].tokens
        times.append((time.perf_counter(), len(text)))
    (first, already), (last, written) = times[0], times[-1]
    return WentOn(text, (written - already) / (last - first), (written - already) / (len(times) - 1))


def _report(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["environment"]
    lines = [
        "# Decoding behind long prompts\n",
        f"{record['model']}, {record['parameters'] / 1e6:.1f}M parameters, float32; {machine['processor']}, "
        f"{settings['threads']} threads. {settings['max_new_tokens']} new tokens, {settings['repeats']} repeats in "
        "turns; medians and their intervals.",
    ]
    for context, found in record["contexts"].items():
        budget = f"; the process took {found['most_bytes'] / 2**30:.2f} GiB at most while it read"
        if settings["memory"]:
            budget += f", of {settings['memory']}"
        lines.append(f"\n## {int(context):,} tokens\n")
        held = f"keys and values take {found['cache_bytes'] / 2**20:.0f} MiB{budget}"
        lines.append(f"Read in {found['prefill_seconds']:.0f} s; {held}.")
        for temperature, arms in found["decoding"].items():
            lines.append(f"\n| temperature {temperature} | tokens/s | against plain | tokens a pass | equal tokens |")
            lines.append("|---|---|---|---|---|")
            for name, arm in arms.items():
                rate, ratio = (Estimate(**arm[key]) for key in ("tokens_per_second", "against plain"))
                equal = arm["equal_tokens"] if temperature == "0" else ""
                lines.append(
                    f"| {name} | {rate.shown(1)} | {ratio.shown(2)} | {arm['tokens_per_pass']:.2f} | {equal} |"
                )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""Decoding beside llama.cpp, float32 and Q8_0: the same weights, prompts, threads and number of tokens, in turns.

    pip install llama-cpp-python gguf
    python benchmarks/beside_llama_cpp.py MODEL... --texts 'heldout.jsonl#kind=code' --threads 2

llama.cpp runs with its own settings but for the threads, in a process of its own, which may be another environment's
(`--python`; it needs llama-cpp-python alone). Models are llamas; `benchmarks/widen.py` makes larger ones of a small
one. Tokens after the first are timed, over all prompts of a repeat; ratios are taken repeat by repeat.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import HERE, JsonWorker, equal_tokens, keep, prompts_of, sampling
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

import selfspec
from selfspec.measure.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.model.checkpoint import load_checkpoint
from selfspec.tools.export.gguf_file import write_gguf

_GENERATE, _PLAIN, _LLAMA = "model.generate", "selfspec plain", "llama.cpp F32"


@dataclass(frozen=True)
class Decoded:
    """Result of one call.

    Attributes:
        text: new token ids.
        seconds: that those after the first took.
    """

    text: list[int]
    seconds: float


Decode = Callable[[list[int], float, int], Decoded]
"""Decodes a prompt, at a temperature (0: greedy) and with a seed."""


@dataclass
class Arm:
    """A way to decode.

    Attributes:
        decode: does it.
        rates: tokens a second, one for each repeat.
        texts: what the last repeat gave, for each prompt.
    """

    decode: Decode
    rates: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)


def main() -> None:
    """Run the benchmark."""
    options = _options()
    torch.set_num_threads(options.threads)
    settings = {name: value for name, value in vars(options).items() if name not in ("models", "texts", "python")}
    models: list[dict[str, Any]] = []
    record = {"settings": settings, "environment": environment(torch.device("cpu")), "models": models}
    for folder in options.models:
        models.append(_measured(folder, options))
        keep(options.name, record, _report(record))
    print(_report(record))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--texts", required=True, metavar="FILE[#FIELD=VALUE]")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--draft", action="extend", nargs="+", help="[default: int8 int4]")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--python", default=sys.executable, help="of the environment that has llama.cpp")
    parser.add_argument("--name", default="llama_cpp", help="of the results")
    options = parser.parse_args()
    options.draft = options.draft or ["int8", "int4"]
    return options


def _measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    checkpoint = load_checkpoint(str(folder), "float32", "cpu")
    model, tokens = checkpoint.model, options.max_new_tokens
    texts = prompts_of(options.texts, checkpoint.tokenizer, options.prompts, options.context)
    prompts = [ids[0].tolist() for ids in texts]
    with tempfile.TemporaryDirectory() as kept:
        workers = {}
        for kind in ("F32", "Q8_0"):
            file = Path(kept) / f"{kind}.gguf"
            write_gguf(model, model, None, file, kind.lower())
            command = [
                options.python,
                "-P",
                HERE / "llama_cpp_worker.py",
                file,
                options.threads,
                options.context + tokens,
            ]
            workers[kind] = JsonWorker(command)
        # Once they have said this, they have read their files.
        systems = {kind: worker.read()["system"] for kind, worker in workers.items()}
    plain = selfspec.wrap(model)
    decoders: dict[str, Decode] = {
        _GENERATE: _Stock(model, tokens),
        _PLAIN: _Own(plain, tokens),
        **{f"selfspec {draft}": _Own(plain.drafting(draft), tokens) for draft in options.draft},
        **{f"llama.cpp {kind}": _Llama(worker, tokens) for kind, worker in workers.items()},
    }
    measured = {f"{at:g}": _in_turns(decoders, prompts, at, options) for at in options.temperatures}
    for worker in workers.values():
        worker.end()
    return {
        "name": folder.name,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "llama.cpp": systems["F32"],
        "temperatures": measured,
    }


def _in_turns(
    decoders: dict[str, Decode], prompts: Sequence[list[int]], temperature: float, options: argparse.Namespace
) -> dict[str, Any]:
    arms = {name: Arm(decode) for name, decode in decoders.items()}
    names = list(arms)
    for repeat in track(range(-options.warm_up, options.repeats), f"T {temperature:g}", transient=True):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            arm = arms[name]
            calls = [arm.decode(prompt, temperature, seed) for seed, prompt in enumerate(prompts)]
            arm.texts = [call.text for call in calls]
            if repeat >= 0:
                timed = sum(len(call.text) - 1 for call in calls)
                arm.rates.append(timed / sum(call.seconds for call in calls))
    return {
        name: {
            "tokens_per_second": Estimate.of_median(arm.rates).to_dict(),
            **{
                f"against {other}": Estimate.of_median(
                    [one / base for one, base in zip(arm.rates, arms[other].rates, strict=True)]
                ).to_dict()
                for other in (_LLAMA, _GENERATE)
            },
            "equal_tokens": [equal_tokens(*pair) for pair in zip(arm.texts, arms[_GENERATE].texts, strict=True)],
        }
        for name, arm in arms.items()
    }


@dataclass(frozen=True)
class _Llama:
    worker: JsonWorker
    tokens: int

    def __call__(self, ids: list[int], temperature: float, seed: int) -> Decoded:
        job = {"ids": ids, "tokens": self.tokens, "temperature": temperature, "seed": seed}
        return Decoded(**self.worker.ask(job))


@dataclass(frozen=True)
class _Own:
    spec: selfspec.SelfSpeculative
    tokens: int

    def __call__(self, ids: list[int], temperature: float, seed: int) -> Decoded:
        prompt = torch.tensor([ids])
        options: dict[str, Any] = {"max_new_tokens": self.tokens, "eos_token_id": None, "seed": seed}
        text: list[int] = []
        times: list[tuple[float, int]] = []
        for chunk in self.spec.stream(prompt, torch.ones_like(prompt), **options, **sampling(temperature)):
            text += chunk.rows[0].tokens
            times.append((time.perf_counter(), len(text)))
        (first, already), (last, all_) = times[0], times[-1]
        # Of a round with several tokens: what the first one would have taken alone.
        return Decoded(text, (last - first) * (all_ - 1) / (all_ - already))


@dataclass(frozen=True)
class _Stock:
    model: PreTrainedModel
    tokens: int

    def __call__(self, ids: list[int], temperature: float, seed: int) -> Decoded:
        torch.manual_seed(seed)
        watch, prompt = _Watch(), torch.tensor([ids])
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[watch],
            **sampling(temperature),
        )
        return Decoded(out[0, len(ids) :].tolist(), watch.times[-1] - watch.times[0])


class _Watch(StoppingCriteria):
    """Notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _report(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["environment"]
    lines = [
        "# Decoding beside llama.cpp\n",
        f"{machine['processor']}, {settings['threads']} threads, float32, {settings['repeats']} repeats in turns,",
        f"{settings['prompts']} prompts of {settings['context']} tokens, {settings['max_new_tokens']} new ones.",
        "Medians and their intervals. *Equal*: the tokens before the first that is not `model.generate`'s, by prompt.",
    ]
    for model in record["models"]:
        title = f"{model['name']}, {model['parameters'] / 1e6:.1f}M parameters"
        for temperature, arms in model["temperatures"].items():
            greedy = temperature == "0"
            lines.append(f"\n## {title}, temperature {temperature}\n")
            lines.append("| | tokens/s | against llama.cpp F32 | against model.generate |" + " equal |" * greedy)
            lines.append("|---" * (4 + greedy) + "|")
            for name, arm in arms.items():
                keys = ("tokens_per_second", f"against {_LLAMA}", f"against {_GENERATE}")
                rate, *ratios = (Estimate(**arm[key]) for key in keys)
                cells = [name, rate.shown(0), *(ratio.shown(2) for ratio in ratios)]
                cells += [" ".join(map(str, arm["equal_tokens"]))] * greedy
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

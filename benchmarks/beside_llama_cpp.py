"""Decoding beside llama.cpp, float32 and Q8_0: the same weights, prompts, threads and number of tokens, in turns.

    pip install llama-cpp-python gguf
    python benchmarks/beside_llama_cpp.py MODEL... --held-out FILE --threads 2

llama.cpp runs with its own settings but for the threads, in a process of its own, which may be another environment's
(`--python`; it needs llama-cpp-python alone). Models are llamas; `benchmarks/widen.py` makes larger
ones of a small one. Each line of the held-out text has `text` and `kind`. Tokens after the first are timed, over all
prompts of a repeat; ratios are taken repeat by repeat.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from kept import RESULTS
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

import selfspec
from selfspec.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.measure.prompts import parse_workloads
from selfspec.model.checkpoint import load_checkpoint
from selfspec.tools.export.gguf_file import write_gguf

_GENERATE, _PLAIN, _LLAMA = "model.generate", "selfspec plain", "llama.cpp F32"
_DRAFTS = ("int8", "int4")


@dataclass(frozen=True)
class Decoded:
    """What one call gave.

    Attributes:
        text: new token ids.
        seconds: that those after the first took.
    """

    text: list[int]
    seconds: float


Decode = Callable[[list[int], float, int], Decoded]
"""Of a prompt, a temperature (0: greedy) and a seed."""


@dataclass
class Arm:
    """One way to decode.

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
    settings = {name: value for name, value in vars(options).items() if name not in ("models", "held_out", "python")}
    models: list[dict[str, Any]] = []
    record = {"settings": settings, "environment": environment(torch.device("cpu")), "models": models}
    for folder in options.models:
        models.append(_measured(folder, options))
        (RESULTS / f"{options.name}.json").write_text(json.dumps(record, indent=1) + "\n")
        (RESULTS / f"{options.name}.md").write_text(_report(record))
    print(_report(record))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--python", default=sys.executable, help="of the environment that has llama.cpp")
    parser.add_argument("--name", default="llama_cpp", help="of the results")
    return parser.parse_args()


def _measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    checkpoint = load_checkpoint(str(folder), "float32", "cpu")
    model, tokens = checkpoint.model, options.max_new_tokens
    texts = parse_workloads(f"code={options.held_out}#kind=code")[0]
    prompts = [ids[0].tolist() for ids in texts.prompts(checkpoint.tokenizer, options.prompts, 1, options.context)]
    with tempfile.TemporaryDirectory() as kept:
        files = {kind: Path(kept) / f"{kind}.gguf" for kind in ("F32", "Q8_0")}
        for kind, file in files.items():
            write_gguf(model, model, None, file, kind.lower())
        workers = {kind: Worker(file, options) for kind, file in files.items()}
    plain = selfspec.wrap(model)
    decoders: dict[str, Decode] = {
        _GENERATE: _Stock(model, tokens),
        _PLAIN: _Own(plain, tokens),
        **{f"selfspec {draft}": _Own(plain.drafting(draft), tokens) for draft in _DRAFTS},
        **{f"llama.cpp {kind}": worker for kind, worker in workers.items()},
    }
    measured = {f"{at:g}": _in_turns(decoders, prompts, at, options) for at in options.temperatures}
    for worker in workers.values():
        worker.end()
    return {
        "name": folder.name,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "llama.cpp": workers["F32"].system,
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
            "equal_tokens": [_equal(*pair) for pair in zip(arm.texts, arms[_GENERATE].texts, strict=True)],
        }
        for name, arm in arms.items()
    }


def _equal(text: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=True))))


class Worker:
    """llama.cpp in a process of its own.

    Args:
        file: GGUF.
        options: of the benchmark.

    Attributes:
        system: what the build says that it uses.
    """

    def __init__(self, file: Path, options: argparse.Namespace) -> None:
        script = str(Path(__file__).with_name("llama_cpp_worker.py"))
        command = [options.python, "-P", script, str(file), str(options.threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tokens = options.max_new_tokens
        self.system = self._answer()["system"]

    def __call__(self, ids: list[int], temperature: float, seed: int) -> Decoded:
        """Decode."""
        job = {"ids": ids, "tokens": self._tokens, "temperature": temperature, "seed": seed}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Decoded(**self._answer())

    def end(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                "llama.cpp's process ended; see above for why, and this file's first lines for its packages"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Own:
    def __init__(self, spec: selfspec.SelfSpeculative, tokens: int) -> None:
        self._spec, self._tokens = spec, tokens

    def __call__(self, ids: list[int], temperature: float, seed: int) -> Decoded:
        prompt, options = torch.tensor([ids]), _sampling(temperature)
        chunks = self._spec.stream(
            prompt, torch.ones_like(prompt), max_new_tokens=self._tokens, eos_token_id=None, seed=seed, **options
        )
        text: list[int] = []
        times: list[tuple[float, int]] = []
        for chunk in chunks:
            text += chunk.rows[0].tokens
            times.append((time.perf_counter(), len(text)))
        (first, already), (last, all_) = times[0], times[-1]
        # Of a round with several tokens: what the first one would have taken alone.
        return Decoded(text, (last - first) * (all_ - 1) / (all_ - already))


class _Stock:
    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        self._model, self._tokens = model, tokens

    def __call__(self, ids: list[int], temperature: float, seed: int) -> Decoded:
        torch.manual_seed(seed)
        watch, prompt = _Watch(), torch.tensor([ids])
        out = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self._tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[watch],
            **_sampling(temperature),
        )
        return Decoded(out[0, len(ids) :].tolist(), watch.times[-1] - watch.times[0])


class _Watch(StoppingCriteria):
    """Notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _sampling(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}


def _report(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["environment"]
    lines = [
        "# Decoding beside llama.cpp\n",
        f"{machine['processor']}, {settings['threads']} threads, float32, {settings['repeats']} repeats in turns,",
        f"{settings['prompts']} prompts of {settings['context']} tokens, {settings['max_new_tokens']} new ones.",
        "Medians and their intervals. *Equal*: the tokens before the first that is not `model.generate`'s, by prompt.",
    ]
    for model in record["models"]:
        for temperature, arms in model["temperatures"].items():
            lines.append(
                f"\n## {model['name']}, {model['parameters'] / 1e6:.1f}M parameters, temperature {temperature}\n"
            )
            greedy = temperature == "0"
            lines.append("| | tokens/s | against llama.cpp F32 | against model.generate |" + " equal |" * greedy)
            lines.append("|---|---|---|---|" + "---|" * greedy)
            for name, arm in arms.items():
                rate, *ratios = (
                    Estimate(**arm[key]) for key in ("tokens_per_second", f"against {_LLAMA}", f"against {_GENERATE}")
                )
                cells = [name, rate.shown(0), *(ratio.shown(2) for ratio in ratios)]
                cells += [" ".join(map(str, arm["equal_tokens"]))] * greedy
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

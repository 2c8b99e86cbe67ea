"""Decoding beside llama.cpp: the same weights, prompts, threads and number of tokens, in turns.

Of a folder, in float32 and Q8_0; of a GGUF file, in its own bytes on both sides.

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
from pathlib import Path
from typing import Any

import torch
from harness import Arm, Decode, LlamaCpp, Own, Stock, equal_tokens, in_turns, keep, prompts_of

import selfspec
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.model.checkpoint import load_tokenizer
from selfspec.tools.export.gguf_file import write_gguf

_GENERATE, _PLAIN, _LLAMA = "model.generate", "selfspec plain", "llama.cpp F32"
# Of a GGUF file: stock modules have dense weights there.
_FILE = "llama.cpp"


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


def _measured_file(file: Path, options: argparse.Namespace) -> dict[str, Any]:
    spec, tokens = selfspec.load(file, draft=False), options.max_new_tokens
    texts = prompts_of(options.texts, load_tokenizer(str(file)), options.prompts, options.context)
    worker = LlamaCpp.over(file, options.python, options.threads, options.context, tokens)
    decoders: dict[str, Decode] = {
        _FILE: worker,
        _PLAIN: Own(spec, tokens),
        **{f"selfspec {draft}": Own(spec.drafting(draft), tokens) for draft in options.draft},
    }
    prompts = [ids[0].tolist() for ids in texts]
    measured = {
        f"{at:g}": _figures(in_turns(decoders, prompts, at, options.repeats, options.warm_up), (_FILE, _PLAIN))
        for at in options.temperatures
    }
    worker.worker.end()
    return {
        "name": file.name,
        "parameters": sum(weight.numel() for weight in spec.model.parameters()),
        "bytes": file.stat().st_size,
        "llama.cpp": worker.system,
        "temperatures": measured,
    }


def _measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    if folder.suffix == ".gguf":
        return _measured_file(folder, options)
    checkpoint = load_checkpoint(str(folder), "float32", "cpu")
    model, tokens = checkpoint.model, options.max_new_tokens
    texts = prompts_of(options.texts, checkpoint.tokenizer, options.prompts, options.context)
    prompts = [ids[0].tolist() for ids in texts]
    with tempfile.TemporaryDirectory() as kept:
        workers = {}
        for kind in ("F32", "Q8_0"):
            file = Path(kept) / f"{kind}.gguf"
            write_gguf(model, model, None, file, kind.lower())
            workers[kind] = LlamaCpp.over(file, options.python, options.threads, options.context, tokens)
    plain = selfspec.wrap(model)
    decoders: dict[str, Decode] = {
        _GENERATE: Stock(model, tokens),
        _PLAIN: Own(plain, tokens),
        **{f"selfspec {draft}": Own(plain.drafting(draft), tokens) for draft in options.draft},
        **{f"llama.cpp {kind}": worker for kind, worker in workers.items()},
    }
    measured = {
        f"{at:g}": _figures(in_turns(decoders, prompts, at, options.repeats, options.warm_up), (_LLAMA, _GENERATE))
        for at in options.temperatures
    }
    for each in workers.values():
        each.worker.end()
    return {
        "name": folder.name,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "llama.cpp": workers["F32"].system,
        "temperatures": measured,
    }


def _figures(arms: dict[str, Arm], against: tuple[str, str]) -> dict[str, Any]:
    return {
        name: {
            "tokens_per_second": Estimate.of_median(arm.rates).to_dict(),
            **{
                f"against {other}": Estimate.of_median(
                    [one / base for one, base in zip(arm.rates, arms[other].rates, strict=True)]
                ).to_dict()
                for other in against
            },
            "equal_tokens": [equal_tokens(*pair) for pair in zip(arm.texts, arms[against[1]].texts, strict=True)],
        }
        for name, arm in arms.items()
    }


def _report(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["environment"]
    lines = [
        "# Decoding beside llama.cpp\n",
        f"{machine['processor']}, {settings['threads']} threads, float32, {settings['repeats']} repeats in turns,",
        f"{settings['prompts']} prompts of {settings['context']} tokens, {settings['max_new_tokens']} new ones.",
        "Medians and their intervals. *Equal*: the tokens before the first that is not that of the last column's text.",
    ]
    for model in record["models"]:
        title = f"{model['name']}, {model['parameters'] / 1e6:.1f}M parameters"
        for temperature, arms in model["temperatures"].items():
            greedy = temperature == "0"
            lines.append(f"\n## {title}, temperature {temperature}\n")
            against = [key for key in next(iter(arms.values())) if key.startswith("against ")]
            lines.append(f"| | tokens/s | {' | '.join(against)} |" + " equal |" * greedy)
            lines.append("|---" * (4 + greedy) + "|")
            for name, arm in arms.items():
                keys = ("tokens_per_second", *against)
                rate, *ratios = (Estimate(**arm[key]) for key in keys)
                cells = [name, rate.shown(0), *(ratio.shown(2) for ratio in ratios)]
                cells += [" ".join(map(str, arm["equal_tokens"]))] * greedy
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

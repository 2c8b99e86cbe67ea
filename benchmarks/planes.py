"""Measure weights in planes: decoding over them beside the same checkpoint as it is, in turns, and their bits.

    python benchmarks/planes.py MODEL --dtype float32 --texts 'heldout.jsonl#kind=code' --threads 2
    python benchmarks/planes.py MODEL... --bits --texts heldout.jsonl

MODEL is a folder of a checkpoint in bfloat16. With `--llama PYTHON`, of an environment with llama-cpp-python, llama.cpp
decodes in the same turns, in bfloat16 and float32. `--bits` decodes nothing: it packs each checkpoint, counts bits,
escapes and weights that differ, and says how often a target accepts drafts on the texts. Results of each dtype, and
bits, have files of their own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from harness import Arm, Decode, LlamaCpp, Own, Stock, equal_tokens, in_turns, keep, prompts_of
from transformers import PreTrainedModel
from transformers.utils import logging

import selfspec
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import parse_draft
from selfspec.formats.packed import PackedWeight
from selfspec.formats.planes import PlanesLinear, bits_of
from selfspec.measure.acceptance import teacher_forced
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.model.checkpoint import load_to_device, load_tokenizer
from selfspec.model.registry import find_adapter
from selfspec.tools.export.gguf_file import write_gguf

_GENERATE, _PLAIN, _PLANES = "model.generate", "plain", "planes"
# Drafts whose acceptance is measured.
_JUDGED = ("upper", "int8")
_DRAFTS = ("upper", "int8", "int4", "lookup+upper", "lookup+int8")


def main() -> None:
    """Run the benchmark."""
    options = _options()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    settings = {name: value for name, value in vars(options).items() if name not in ("models", "texts", "llama")}
    models: dict[str, Any] = {}
    record = {"settings": settings, "environment": environment(torch.device("cpu")), "models": models}
    name, report = ("planes_bits", _bits_report) if options.bits else (f"planes_{options.dtype}", _report)
    name = options.name or name
    for folder in options.models:
        if options.bits:
            models[folder.name] = _bits(folder, options)
            keep(name, record, report(record))
            continue
        temperatures = models[folder.name] = {}
        for temperature, figures in _decoded(folder, options):
            temperatures[f"{temperature:g}"] = figures
            keep(name, record, report(record))
    print(report(record))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--texts", required=True, metavar="FILE[#FIELD=VALUE]")
    parser.add_argument("--bits", action="store_true", help="count bits; decode nothing")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--draft", nargs="+", default=list(_DRAFTS), help="over planes, beside plain decoding")
    parser.add_argument("--beside", nargs="+", default=["int8"], metavar="DRAFT", help="drafts over dense weights")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=1, help="in each turn; of --bits: texts")
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", help="of the results")
    parser.add_argument("--llama", metavar="PYTHON", help="of the environment that has llama.cpp")
    return parser.parse_args()


def _decoded(folder: Path, options: argparse.Namespace) -> Any:
    """Yield each temperature with its figures, by way of decoding."""
    checkpoint, tokens = load_checkpoint(str(folder), options.dtype, "cpu"), options.max_new_tokens
    texts = prompts_of(options.texts, checkpoint.tokenizer, options.prompts, options.context)
    prompts = [ids[0].tolist() for ids in texts]
    plain = selfspec.wrap(checkpoint.model)
    planes = selfspec.load(folder, weights="planes", dtype=options.dtype, draft=False)
    decoders: dict[str, Decode] = {
        _GENERATE: Stock(checkpoint.model, tokens),
        _PLAIN: Own(plain, tokens),
        **{draft: Own(plain.drafting(draft), tokens) for draft in options.beside},
        _PLANES: Own(planes, tokens),
        **{f"{_PLANES}, {draft}": Own(planes.drafting(draft), tokens) for draft in options.draft},
    }
    workers: dict[str, LlamaCpp] = {}
    if options.llama:
        with tempfile.TemporaryDirectory() as kept:
            for kind in ("BF16", "F32"):
                file = Path(kept) / f"{kind}.gguf"
                write_gguf(checkpoint.model, checkpoint.model, None, file, kind.lower())
                workers[f"llama.cpp {kind}"] = LlamaCpp.over(
                    file, options.llama, options.threads, options.context, tokens
                )
    for temperature in options.temperatures:
        arms = in_turns({**decoders, **workers}, prompts, temperature, options.repeats, options.warm_up)
        yield temperature, {name: _figures(arm, arms) for name, arm in arms.items()}
    for each in workers.values():
        each.worker.end()


def _figures(arm: Arm, arms: Mapping[str, Arm]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what, rates in (("whole", arm.whole), ("decoding", arm.rates)):
        found[f"{what}: tokens/s"] = Estimate.of_median(rates).to_dict()
        for other in (_GENERATE, _PLAIN):
            base = arms[other].whole if what == "whole" else arms[other].rates
            ratios = [one / by for one, by in zip(rates, base, strict=True)]
            found[f"{what}: against {other}"] = Estimate.of_median(ratios).to_dict()
    pairs = zip(arm.texts, arms[_PLAIN].texts, strict=True)
    return {**found, "tokens equal to plain": [equal_tokens(*pair) for pair in pairs]}


def _report(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["environment"]
    lines = [
        f"# Weights in planes, {settings['dtype']}\n",
        f"{machine['processor']}, {settings['threads']} threads, {settings['repeats']} repeats in turns, "
        f"{settings['prompts']} prompts of",
        f"{settings['context']} tokens, {settings['max_new_tokens']} new ones. Medians and their intervals.",
    ]
    columns = [f"{what}: {of}" for what in ("whole", "decoding") for of in ("tokens/s", "against model.generate")]
    columns += ["whole: against plain", "decoding: against plain"]
    for model, temperatures in record["models"].items():
        for temperature, arms in temperatures.items():
            lines.append(f"\n## {model}, temperature {temperature}\n")
            lines.append(f"| | {' | '.join(columns)} | equal |")
            lines.append("|---" * (2 + len(columns)) + "|")
            for name, arm in arms.items():
                cells = [Estimate(**arm[each]).shown(0 if each.endswith("/s") else 2) for each in columns]
                equal = " ".join(map(str, arm["tokens equal to plain"]))
                lines.append(f"| {name} | {' | '.join(cells)} | {equal} |")
    return "\n".join(lines) + "\n"


def _bits(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the bits of a checkpoint's weights in planes, how many differ, and how often drafts are accepted."""
    dense = load_to_device(str(folder), "bfloat16", "cpu")
    packed = selfspec.load(folder, weights="planes", dtype="bfloat16", draft=False).model
    numbers = escapes = nbytes = differ = 0
    others = sum(each.nbytes for each in packed.parameters() if not isinstance(each, PackedWeight))
    for weight, stock in zip(packed.parameters(), dense.parameters(), strict=True):
        if isinstance(weight, PackedWeight) and isinstance(layer := weight.layer, PlanesLinear):
            numbers += stock.numel()
            escapes += layer.escapes.numel()
            nbytes += layer.nbytes
            differ += int((bits_of(layer.join()) != bits_of(stock)).sum())
    return {
        "weights": numbers,
        "bits": 8 * nbytes / numbers,
        "escapes": escapes / numbers,
        "differ": differ,
        "bytes in bfloat16": sum(each.nbytes for each in dense.parameters()),
        "bytes in planes": nbytes + others,
        "accepted": _accepted(folder, packed, options),
    }


def _accepted(folder: Path, model: PreTrainedModel, options: argparse.Namespace) -> dict[str, Any]:
    if model.config.is_encoder_decoder:
        return {}
    texts = prompts_of(options.texts, load_tokenizer(str(folder)), options.prompts, options.context)
    drafts = {name: found for name in _JUDGED if isinstance(found := parse_draft(name), LayerPathDrafter)}
    judged = teacher_forced(model, find_adapter(model), drafts, texts, (1.0,))
    return {name: draft.alpha(1.0).to_dict() for name, draft in judged.items()}


def _bits_report(record: dict[str, Any]) -> str:
    lines = [
        "| checkpoint | weights in planes | bits of a weight | escapes | differ | MB in bfloat16 | MB in planes "
        "| 1 - TV of upper | of int8 |",
        "|---" * 9 + "|",
    ]
    for name, of in record["models"].items():
        cells = [f"{of['weights'] / 1e6:.1f}M", f"{of['bits']:.2f}", f"{of['escapes']:.3%}", str(of["differ"])]
        cells += [f"{of[key] / 1e6:.0f}" for key in ("bytes in bfloat16", "bytes in planes")]
        cells += [Estimate(**each).shown(3) for each in of["accepted"].values()] or ["", ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

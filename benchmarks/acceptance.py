"""Measure how often the target would accept drafts on held-out text: 1 - TV(p, q), and top-1 agreement.

    python benchmarks/acceptance.py MODEL... --draft int8 --draft int4 --texts heldout.jsonl
    python benchmarks/acceptance.py MODEL --draft exit:2 --draft head:FOLDER@2 --texts 'heldout.jsonl#kind=code'

Nothing is generated. A draft in fewer bits reads the texts by its own path, keys and values included, so its context is
a little worse than in a generation, where it is the target's own.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch
from harness import keep, prompts_of
from rich.progress import track

import selfspec
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import parse_draft
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.embedded import model_place
from selfspec.measure.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.measure.stock import Continuation
from selfspec.measure.teacher_forced import acceptance_rate, first_steps
from selfspec.model.checkpoint import load_tokenizer
from selfspec.model.registry import find_adapter
from selfspec.tools.lab.report import markdown_table

RATES = {"agreement": 0.0, "1 - TV at 0.8": 0.8, "1 - TV at 1": 1.0}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder of a checkpoint, or demo")
    parser.add_argument("--draft", action="append", required=True, help="a path of the model; may be given again")
    parser.add_argument("--texts", required=True, metavar="FILE[#FIELD=VALUE]")
    parser.add_argument("--number", type=int, default=40, help="of texts")
    parser.add_argument("--tokens", type=int, default=256, help="of a text")
    parser.add_argument("--weights", choices=["planes"], help="packed so; [default: dense, in float32]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="acceptance", help="of the results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = {name: getattr(options, name) for name in ("number", "tokens", "weights", "threads")}
    models: dict[str, dict[str, Any]] = {}
    record = {"settings": settings, "environment": environment(torch.device("cpu")), "models": models}
    for place in track(options.models, transient=True):
        models[place.rstrip("/").rpartition("/")[2]] = _measured(place, options)
        keep(options.name, record, _report(record))
    print(_report(record))


def _measured(place: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = model_place(place)
    if options.weights:
        model = selfspec.load(folder, weights=options.weights, dtype="bfloat16", draft=False).model
    else:
        model = load_checkpoint(folder, "float32", "cpu").model
    texts = prompts_of(options.texts, load_tokenizer(folder), options.number, options.tokens)
    judged = [Continuation(ids, 1) for ids in texts]
    drafts = {name: parse_draft(name) for name in options.draft}
    paths = {name: draft for name, draft in drafts.items() if isinstance(draft, LayerPathDrafter)}
    if paths.keys() != drafts.keys():
        raise SystemExit(f"no path of the model: {', '.join(drafts.keys() - paths.keys())}")
    found: dict[str, dict[str, Any]] = {name: {} for name in paths}
    for rate, temperature in RATES.items():
        for name, figures in first_steps(model, find_adapter(model), paths, judged, temperature).items():
            found[name][rate] = asdict(acceptance_rate(figures))
    return found


def _report(record: dict[str, Any]) -> str:
    settings = record["settings"]
    rows = [
        [model, draft, *(Estimate(**figures[name]).shown(3) for name in RATES)]
        for model, drafts in record["models"].items()
        for draft, figures in drafts.items()
    ]
    said = f"On {settings['number']} held-out texts of {settings['tokens']} tokens, 95 % intervals over texts."
    return f"{said}\n\n{markdown_table(['model', 'draft', *RATES], rows)}\n"


if __name__ == "__main__":
    main()

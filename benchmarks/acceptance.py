"""Measure how often the target would accept drafts on held-out text: 1 - TV(p, q), and top-1 agreement.

    python benchmarks/acceptance.py MODEL... --draft int8 --draft int4 --texts heldout.jsonl
    python benchmarks/acceptance.py MODEL --draft exit:2 --draft head:FOLDER@2 --texts 'heldout.jsonl#kind=code'
    python benchmarks/acceptance.py MODEL --draft int8+window:512 --draft int8+top:512 --texts heldout.jsonl \
        --tokens 1800 --again 150

With `--again` each text begins again where it ends, and what comes again is judged: a draft has to look far back.
Nothing is generated. Each draft reads the first tokens of the texts by its own path, keys and values included, so in
fewer bits its context is a little worse than in a generation, where it is the target's own.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from harness import keep, prompts_of
from rich.progress import track
from torch import Tensor
from transformers.utils import logging

from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import parse_draft
from selfspec.measure.acceptance import TEMPERATURES, teacher_forced
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.embedded import model_place
from selfspec.measure.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.measure.own_text import Continuation
from selfspec.model.registry import find_adapter


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder of a checkpoint, or demo")
    parser.add_argument("--draft", action="append", required=True, help="a path of the model; may be given again")
    parser.add_argument("--texts", required=True, metavar="FILE[#FIELD=VALUE]")
    parser.add_argument("--number", type=int, default=40, help="of texts")
    parser.add_argument("--tokens", type=int, default=256, help="of a text")
    parser.add_argument("--again", type=int, default=0, help="tokens of a text that come again, and alone are judged")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="acceptance", help="of the results")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    settings = {name: getattr(options, name) for name in ("number", "tokens", "again", "threads")}
    models: dict[str, dict[str, Any]] = {}
    record = {"settings": settings, "environment": environment(torch.device("cpu")), "models": models}
    for place in track(options.models, transient=True):
        models[place.rstrip("/").rpartition("/")[2]] = _measured(place, options)
        keep(options.name, record, _report(record))
    print(_report(record))


def _measured(place: str, options: argparse.Namespace) -> dict[str, Any]:
    checkpoint = load_checkpoint(model_place(place), "float32", "cpu")
    texts = prompts_of(options.texts, checkpoint.tokenizer, options.number, options.tokens)
    judged: list[Tensor | Continuation] = [*texts]
    if options.again:
        judged = [Continuation(torch.cat([ids, ids[:, : options.again]], 1), prompt=options.tokens) for ids in texts]
    drafts = {name: parse_draft(name) for name in options.draft}
    paths = {name: draft for name, draft in drafts.items() if isinstance(draft, LayerPathDrafter)}
    if paths.keys() != drafts.keys():
        raise SystemExit(f"no path of the model: {', '.join(drafts.keys() - paths.keys())}")
    found = teacher_forced(checkpoint.model, find_adapter(checkpoint.model), paths, judged, TEMPERATURES)
    return {
        name: {
            "agreement": draft.alpha(0.0).to_dict(),
            **{f"1 - TV at {heat:g}": draft.alpha(heat).to_dict() for heat in TEMPERATURES},
        }
        for name, draft in found.items()
    }


def _report(record: dict[str, Any]) -> str:
    settings = record["settings"]
    again = f", whose first {settings['again']} come again and alone are judged" if settings.get("again") else ""
    columns = ["agreement", *(f"1 - TV at {heat:g}" for heat in TEMPERATURES)]
    lines = [
        f"On {settings['number']} held-out texts of {settings['tokens']} tokens{again}, float32, with 95 % bootstrap "
        "intervals over texts.\n",
        f"| model | draft | {' | '.join(columns)} |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for model, drafts in record["models"].items():
        for draft, figures in drafts.items():
            cells = [Estimate(**figures[name]).shown(3) for name in columns]
            lines.append(f"| {model} | {draft} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""How well checkpoints in 8 and 4 bits draft for themselves: 1 - TV(p, q) on held-out text, for every draft.

    python benchmarks/low_precision.py MODEL... --held-out FILE

Each line of the held-out text has `text`. Every draft is run over its first tokens with substitutes in all layers, keys
and values included, so its context is a little worse than in a generation, where it is the target's own.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kept import RESULTS
from rich.progress import track
from transformers.utils import logging

from selfspec.draft import LowPrecision
from selfspec.environment import environment
from selfspec.measure.acceptance import Acceptance, teacher_forced
from selfspec.model.checkpoint import load_checkpoint
from selfspec.model.registry import find_adapter

_TEMPERATURES = (0.8, 1.0)
_DRAFTS = (
    LowPrecision(8),
    LowPrecision(8, head=False),
    LowPrecision(4),
    LowPrecision(4, head=False),
    LowPrecision(4, group_size=64),
)


@dataclass(frozen=True)
class Measured:
    """What one checkpoint gave.

    Attributes:
        name: of its folder.
        drafts: by the draft's name.
    """

    name: str
    drafts: dict[str, Acceptance]


def main() -> None:
    """Run the benchmark."""
    options = _options()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    texts = [json.loads(line)["text"] for line in options.held_out.read_text(encoding="utf-8").splitlines()]
    chosen = texts[:: max(1, len(texts) // options.texts)][: options.texts]
    measured = [_measured(folder, chosen, options) for folder in track(options.models, transient=True)]
    settings = {name: str(value) for name, value in vars(options).items() if name in ("texts", "tokens", "threads")}
    record = {
        "settings": settings,
        "environment": environment(torch.device("cpu")),
        "checkpoints": {each.name: {name: draft.to_dict() for name, draft in each.drafts.items()} for each in measured},
    }
    (RESULTS / "low_precision.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / "low_precision.md").write_text(_report(measured, settings))
    print(_report(measured, settings))


def _measured(folder: Path, texts: list[str], options: argparse.Namespace) -> Measured:
    checkpoint = load_checkpoint(str(folder), "float32", "cpu")
    ids = [checkpoint.tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens] for text in texts]
    drafters: dict[str, Any] = {_name(draft): draft for draft in _DRAFTS}
    found = teacher_forced(
        checkpoint.model,
        find_adapter(checkpoint.model),
        drafters,
        [each for each in ids if each.shape[1] > 1],
        _TEMPERATURES,
    )
    return Measured(folder.name, found)


def _name(draft: LowPrecision) -> str:
    exact_head = "" if draft.head_too else ", exact head"
    groups = f", groups of {draft.group_size}" if draft.bits == 4 else ""
    return f"{draft.bits} bits{groups}{exact_head}"


def _report(measured: list[Measured], settings: dict[str, str]) -> str:
    lines = [
        f"1 - TV(p, q) at temperature 1 on {settings['texts']} held-out texts of at most {settings['tokens']} tokens, "
        "float32, with a bootstrap interval over texts; in brackets the share of tokens on which both agree.\n",
        "| checkpoint | " + " | ".join(map(_name, _DRAFTS)) + " |",
        "|---|" + "---|" * len(_DRAFTS),
    ]
    for each in measured:
        rates = [(draft.alpha(1.0), draft.agreement()) for draft in each.drafts.values()]
        cells = (f"{at.value:.3f} ({at.low:.3f}-{at.high:.3f}) [{agreed.value:.3f}]" for at, agreed in rates)
        lines.append(f"| {each.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="folder of a checkpoint")
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()

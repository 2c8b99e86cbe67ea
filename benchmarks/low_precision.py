"""How well checkpoints in 8 and 4 bits draft for themselves: 1 - TV(p, q) on held-out text, for every draft.

    python benchmarks/low_precision.py MODEL... --held-out FILE

Each line of the held-out text has `text`. Every draft is run over its first tokens with substitutes in all layers, keys
and values included, so its context is a little worse than in a generation, where it is the target's own. "Compensated"
is what `selfspec quantize` writes, on text of the model's own. The tests' tiny models come last: their weights are
random, and their texts are random tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from kept import RESULTS
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from selfspec.draft import LowPrecision
from selfspec.environment import environment
from selfspec.measure.acceptance import Acceptance, teacher_forced
from selfspec.measure.embedded import DEMO, model_place
from selfspec.measure.own_text import own_texts, random_starts
from selfspec.model.checkpoint import load_checkpoint
from selfspec.model.registry import find_adapter

_TESTS = Path(__file__).resolve().parents[1] / "tests"
_TEMPERATURES = (0.8, 1.0)
_DRAFTS = (
    LowPrecision(8),
    LowPrecision(8, head=False),
    LowPrecision(4),
    LowPrecision(4, head=False),
    LowPrecision(4, group_size=64),
)
# Texts of the model's own, as many as `selfspec quantize` has written.
_OWN_TEXTS = 12
_COMPENSATED = "4 bits, compensated"


@dataclass(frozen=True)
class Subject:
    """A model, and what its drafts are judged on.

    Attributes:
        name: of its folder, or of its architecture.
        model: the target.
        texts: token ids, each `[1, tokens]`.
    """

    name: str
    model: PreTrainedModel
    texts: list[Tensor]


@dataclass(frozen=True)
class Measured:
    """What one model gave.

    Attributes:
        name: of its folder, or of its architecture.
        drafts: by the draft's name.
        seconds: that texts of its own and compensated weights took to make.
    """

    name: str
    drafts: dict[str, Acceptance]
    seconds: float


def main() -> None:
    """Run the benchmark."""
    options = _options()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    texts = [json.loads(line)["text"] for line in options.held_out.read_text(encoding="utf-8").splitlines()]
    chosen = texts[:: max(1, len(texts) // options.texts)][: options.texts]
    places = [model_place(DEMO), *options.models]
    measured = [_measured(each) for each in track(_subjects(places, chosen, options.tokens), transient=True)]
    settings = {name: str(value) for name, value in vars(options).items() if name in ("texts", "tokens", "threads")}
    record = {
        "settings": settings,
        "environment": environment(torch.device("cpu")),
        "models": {
            each.name: {
                "compensating_seconds": each.seconds,
                **{name: draft.to_dict() for name, draft in each.drafts.items()},
            }
            for each in measured
        },
    }
    (RESULTS / "low_precision.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / "low_precision.md").write_text(_report(measured, settings))
    print(_report(measured, settings))


def _subjects(places: list[str | Path], texts: list[str], tokens: int) -> Iterator[Subject]:
    for place in places:
        checkpoint = load_checkpoint(str(place), "float32", "cpu")
        ids = [checkpoint.tokenizer(text, return_tensors="pt").input_ids[:, :tokens] for text in texts]
        name = DEMO if place == model_place(DEMO) else Path(place).name
        yield Subject(name, checkpoint.model, [each for each in ids if each.shape[1] > 1])
    sys.path.insert(0, str(_TESTS))
    from helpers import tiny

    for name, build in tiny.BUILDERS.items():
        # Sizes that the largest groups divide.
        hidden, inner = ("n_embd", "n_inner") if name == "gpt2" else ("hidden_size", "intermediate_size")
        model = build(dtype=torch.float32, **{hidden: 64, inner: 128})
        yield Subject(f"random {name}", model, [tiny.prompt(64, seed=number) for number in range(len(texts))])


def _measured(subject: Subject) -> Measured:
    model, adapter = subject.model, find_adapter(subject.model)
    given = {_name(draft): draft for draft in _DRAFTS}
    found = teacher_forced(model, adapter, given, subject.texts, _TEMPERATURES)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "compensated.safetensors"
        LowPrecision(4).save(file, model, adapter, own_texts(model, random_starts(model, _OWN_TEXTS)))
        seconds = time.perf_counter() - began
        compensated = {_COMPENSATED: LowPrecision.from_file(file)}
        found |= teacher_forced(model, adapter, compensated, subject.texts, _TEMPERATURES)
    return Measured(subject.name, found, seconds)


def _name(draft: LowPrecision) -> str:
    exact_head = "" if draft.head_too else ", exact head"
    groups = f", groups of {draft.group_size}" if draft.bits == 4 else ""
    return f"{draft.bits} bits{groups}{exact_head}"


def _report(measured: list[Measured], settings: dict[str, str]) -> str:
    lines = [
        f"1 - TV(p, q) at temperature 1 on {settings['texts']} held-out texts of at most {settings['tokens']} tokens "
        "(random models: random tokens), float32, with a bootstrap interval over texts; in brackets the share of "
        "tokens on which both agree.\n",
        "| model | " + " | ".join(measured[0].drafts) + " |",
        "|---|" + "---|" * len(measured[0].drafts),
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

"""How often exits are right, before and after training: on given text and in generation, and what speed that makes.

    python benchmarks/acceptance.py --held-out FILE --base BASE --layerskip TRAINED --plain CONTROL --heads HEADS

Each line of the held-out text has `text` and `kind`. Prompts are the beginnings of its documents, always the same.
Sampled figures are the main ones; beside each greedy one stands the share of tokens inside a repeating cycle.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kept import RESULTS
from rich.progress import track
from torch import Tensor, nn

import selfspec
from selfspec.control.costs import Costs
from selfspec.control.forecast import speedup
from selfspec.draft import Drafter, ExitHead
from selfspec.environment import environment
from selfspec.measure.acceptance import ExitFigures
from selfspec.measure.cycles import cycle_share
from selfspec.measure.readout import Readout
from selfspec.model.checkpoint import Checkpoint, load_checkpoint
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import packed, spread

_TEMPERATURES = (0.8, 1.0)
_LENGTH = 256
_PROMPT = 48


@dataclass(frozen=True)
class Subject:
    """A model and how it drafts.

    Attributes:
        name: what the tables call it.
        checkpoint: model and tokenizer.
        drafters: by exit layer.
    """

    name: str
    checkpoint: Checkpoint
    drafters: dict[int, Drafter]


def main() -> None:
    """Run the benchmark."""
    options = _options()
    torch.set_num_threads(options.threads)
    documents = _documents(options.held_out)
    record: dict[str, Any] = {
        "settings": {name: str(value) for name, value in vars(options).items() if name not in _FOLDERS},
        "environment": environment(torch.device("cpu")),
        "forced": [],
        "generated": [],
        "speed": [],
    }
    for subject in _subjects(options):
        for kind, texts in documents.items():
            record["forced"] += forced(subject, kind, texts, options.blocks)
            if subject.name != "plain":
                record["generated"] += generated(subject, kind, texts, options)
        if subject.name != "plain":
            record["speed"] += speed(subject, documents["code"], options)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{options.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / f"{options.name}.md").write_text(_tables(record))
    print(_tables(record))


_FOLDERS = ("base", "layerskip", "plain", "heads", "held_out")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in _FOLDERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, required=name in ("base", "held_out"))
    parser.add_argument("--exits", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--blocks", type=int, default=24, help="of each kind, 256 tokens each")
    parser.add_argument("--prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="acceptance")
    return parser.parse_args()


def _documents(file: Path) -> dict[str, list[str]]:
    by_kind: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        by_kind.setdefault(document["kind"], []).append(document["text"])
    return by_kind


def _subjects(options: argparse.Namespace) -> Iterator[Subject]:
    for name in ("base", "plain", "layerskip"):
        folder = getattr(options, name)
        if folder is not None:
            exits = {exit_layer: selfspec.EarlyExit(exit_layer) for exit_layer in options.exits}
            yield Subject(name, load_checkpoint(str(folder), "float32", "cpu"), dict(exits))
    if options.heads is not None:
        config = json.loads((options.heads / "exit_head.json").read_text())
        heads = {exit_layer: ExitHead.from_pretrained(options.heads, exit_layer) for exit_layer in config["exits"]}
        yield Subject("base with exit heads", load_checkpoint(str(options.base), "float32", "cpu"), dict(heads))


@torch.no_grad()
def forced(subject: Subject, kind: str, texts: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Loss of the full model, and agreement and 1 - TV at every exit, over given text."""
    model, tokenizer = subject.checkpoint.model, subject.checkpoint.tokenizer
    readout = Readout(model, find_adapter(model))
    adapters = _adapters(subject, readout.depth)
    figures = {exit_layer: ExitFigures() for exit_layer in adapters}
    losses = []
    blocks = spread(packed(texts, tokenizer, _LENGTH), count)
    for ids in track(blocks.split(2), f"{subject.name}, {kind}, given text", transient=True):
        with readout.recorded(list(adapters)) as states:
            full = model(input_ids=ids, use_cache=False).logits
        losses += [
            nn.functional.cross_entropy(logits[:-1], row[1:]).item() for logits, row in zip(full, ids, strict=True)
        ]
        for exit_layer, adapter in adapters.items():
            draft = readout.logits(adapter(states[exit_layer]))
            figures[exit_layer].add(full.flatten(0, 1), draft.flatten(0, 1), _TEMPERATURES)
    return [
        {
            "subject": subject.name,
            "kind": kind,
            "loss": statistics.mean(losses),
            "exit": exit_layer,
            "agreement": counted.agreement,
            **{f"alpha_{temperature}": counted.alpha(temperature) for temperature in _TEMPERATURES},
        }
        for exit_layer, counted in figures.items()
    ]


def _adapters(subject: Subject, depth: int) -> dict[int, nn.Module]:
    """What stands before the norm at each exit that is measured: nothing at plain exits."""
    trained = {
        exit_layer: copy.deepcopy(drafter.draft_head.adapter).float()
        for exit_layer, drafter in subject.drafters.items()
        if isinstance(drafter, ExitHead) and drafter.draft_head.adapter is not None
    }
    return trained or {exit_layer: nn.Identity() for exit_layer in range(1, depth)}


def generated(subject: Subject, kind: str, texts: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Acceptance while generating, greedily and at temperature 0.8, judged token by token."""
    rows = []
    prompts = _prompts(subject.checkpoint, texts, options.prompts)
    for exit_layer, drafter in track(subject.drafters.items(), f"{subject.name}, {kind}, generating", transient=True):
        spec = selfspec.wrap(subject.checkpoint.model, draft=drafter, draft_length=options.draft_length)
        for temperature in (0.0, 0.8):
            outputs = [_generate(spec, ids, temperature, options.max_new_tokens, seed) for seed, ids in prompts]
            judged = sum(output.stats.judged for output in outputs)
            new = [output.sequences[0, -output.lengths[0] :].tolist() for output in outputs]
            rows.append(
                {
                    "subject": subject.name,
                    "kind": kind,
                    "exit": exit_layer,
                    "temperature": temperature,
                    "acceptance_rate": sum(output.stats.accepted for output in outputs) / judged,
                    "mean_accepted_length": sum(map(len, new)) / sum(output.stats.row_rounds for output in outputs),
                    "judged": judged,
                    "cycle_share": statistics.mean(cycle_share(tokens) for tokens in new),
                }
            )
    return rows


def speed(subject: Subject, texts: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measured speed against plain decoding by the same loop, and what the formula makes of the measured costs."""
    rows = []
    prompts = _prompts(subject.checkpoint, texts, options.prompts)
    plain = selfspec.wrap(subject.checkpoint.model)
    for exit_layer, drafter in track(subject.drafters.items(), f"{subject.name}, speed", transient=True):
        spec = selfspec.wrap(subject.checkpoint.model, draft=drafter, draft_length=options.draft_length)
        for temperature in (0.0, 0.8):
            ratios, costs, rates = [], [], []
            for repeat in range(options.repeats + 1):
                # In turns, so that whatever else the machine does falls on both.
                pairs = [
                    (
                        _generate(plain, ids, temperature, options.max_new_tokens, seed).stats,
                        _generate(spec, ids, temperature, options.max_new_tokens, seed).stats,
                    )
                    for seed, ids in prompts
                ]
                if repeat == 0:
                    continue
                step = _seconds([one for one, _ in pairs]) / sum(one.new_tokens for one, _ in pairs)
                drafted = [other for _, other in pairs]
                ratios.append(step / (_seconds(drafted) / sum(other.new_tokens for other in drafted)))
                costs.append(_costs(drafted, step))
                rates.append(sum(other.accepted for other in drafted) / sum(other.judged for other in drafted))
            middle = sorted(range(len(ratios)), key=ratios.__getitem__)[len(ratios) // 2]
            rows.append(
                {
                    "subject": subject.name,
                    "exit": exit_layer,
                    "temperature": temperature,
                    "acceptance_rate": rates[middle],
                    "c": costs[middle].draft,
                    "V": costs[middle].verify,
                    "o": costs[middle].overhead,
                    "predicted": speedup(rates[middle], options.draft_length, costs[middle]),
                    "measured": ratios,
                }
            )
    return rows


def _seconds(stats: Sequence[selfspec.Stats]) -> float:
    return sum(sum(seconds for phase, seconds in each.seconds.items() if phase != "prefill") for each in stats)


def _costs(drafted: Sequence[selfspec.Stats], step: float) -> Costs:
    rounds = sum(each.rounds for each in drafted)

    def spent(phase: str) -> float:
        return sum(each.seconds[phase] for each in drafted) / step

    return Costs(
        draft=spent("draft") / sum(each.drafted for each in drafted),
        verify=spent("verify") / rounds,
        overhead=(spent("accept") + spent("commit")) / rounds,
    )


def _generate(
    spec: selfspec.SelfSpeculative, ids: Tensor, temperature: float, count: int, seed: int
) -> selfspec.GenerateOutput:
    if temperature == 0:
        return spec.generate(ids, torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return spec.generate(ids, torch.ones_like(ids), max_new_tokens=count, seed=seed, accept="token", **options)


def _prompts(checkpoint: Checkpoint, texts: Sequence[str], count: int) -> list[tuple[int, Tensor]]:
    """The beginnings of documents spread over all, numbered."""
    chosen = [texts[number * len(texts) // count] for number in range(min(count, len(texts)))]
    encoded = [checkpoint.tokenizer(text[:2000], return_tensors="pt").input_ids[:, :_PROMPT] for text in chosen]
    return list(enumerate(encoded))


def _tables(record: dict[str, Any]) -> str:
    lines = [
        "Teacher-forced, on held-out text:",
        "",
        "| | text | loss | exit | top-1 agreement | 1 - TV at 0.8 | 1 - TV at 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['subject']} | {r['kind']} | {r['loss']:.3f} | {r['exit']} | {r['agreement']:.2f} | {r['alpha_0.8']:.2f} "
        f"| {r['alpha_1.0']:.2f} |"
        for r in record["forced"]
    ]
    lines += [
        "",
        "In generation:",
        "",
        "| | prompts | exit | temperature | acceptance rate | mean accepted length | in cycles |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['subject']} | {r['kind']} | {r['exit']} | {r['temperature']} | {r['acceptance_rate']:.2f} "
        f"| {r['mean_accepted_length']:.2f} | {r['cycle_share']:.2f} |"
        for r in record["generated"]
    ]
    lines += [
        "",
        "Speed on code, against plain decoding in the same loop, in turns:",
        "",
        "| | exit | temperature | acceptance rate | c | V | o | predicted | measured, median (range) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['subject']} | {r['exit']} | {r['temperature']} | {r['acceptance_rate']:.2f} | {r['c']:.2f} "
        f"| {r['V']:.2f} | {r['o']:.2f} | {r['predicted']:.2f} | {statistics.median(r['measured']):.2f} "
        f"({min(r['measured']):.2f}-{max(r['measured']):.2f}) |"
        for r in record["speed"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

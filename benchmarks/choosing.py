"""Paths chosen as the text goes beside fixed ones, by the weights that are read: tokens per unit of a plain step.

    python benchmarks/choosing.py MODEL --layers 4 --layers 8 --exits 10-27 --workload code=FILE --workload chat=FILE

The best fixed set of M layers is the best of those that this finds for each workload and for all together: from none on
it leaves out one layer more, the one whose loss costs the least of 1 - TV(p, q) on the model's own greedy text. Sets
that `selfspec search` found may be named besides with `--draft`. Each arm decodes with several draft lengths, and its
best one counts. Trials are part of passes that verify.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import keep, sampling
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

import selfspec
from selfspec.control import FixedLength
from selfspec.control.controller import Controller
from selfspec.control.costs import Costs, CostsByRows
from selfspec.draft.along_layer_path import LayerPathDrafter, LayerPathProposer
from selfspec.draft.draft import Budget
from selfspec.draft.layer_skip import LayerSkip
from selfspec.draft.path_choice import Trial
from selfspec.draft.registry import draft_name
from selfspec.measure.acceptance import teacher_forced
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.embedded import model_place
from selfspec.measure.environment import environment
from selfspec.measure.own_text import Continuation, own_text
from selfspec.measure.prompts import parse_workloads
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import share_read
from selfspec.tools.lab.report import markdown_table

Texts = Sequence[Tensor]


class Length(FixedLength):
    """Keeps the same draft length in every round; rows may depend on each other."""

    def begin(self, costs: CostsByRows) -> Controller:
        # Priced as they are counted here.
        return Controller(Budget.chain(self.length), costs=Costs(costs.in_batch(1).draft))


@dataclass
class Read:
    """Counts the weights that passes have read, in plain steps."""

    drafts: float = 0.0
    trials: int = 0


@contextmanager
def weights_read() -> Iterator[Read]:
    """Count what drafts read, and trials; a round reads one step more, wherever verification begins."""
    read, propose, run = Read(), LayerPathProposer.propose, Trial.run

    def proposed(self: Any, rows: Any, budget: Any) -> Any:
        draft, model = propose(self, rows, budget), rows.runner.model
        read.drafts += draft.steps * share_read(model, find_adapter(model), self._path, self._head)
        return draft

    def tried(self: Any, *args: Any) -> Any:
        read.trials += 1
        return run(self, *args)

    patched: tuple[Any, Any] = (LayerPathProposer, Trial)
    patched[0].propose, patched[1].run = proposed, tried
    try:
        yield read
    finally:
        patched[0].propose, patched[1].run = propose, run


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint, or demo")
    parser.add_argument("--workload", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--layers", action="append", type=int, default=[], help="M of clasp:M")
    parser.add_argument("--exits", metavar="E-F", help="of del:E-F, beside each of these exits")
    parser.add_argument("--draft", action="append", default=[], help="a fixed one besides")
    parser.add_argument("--temperature", action="append", type=float, help="by default 0 and 0.8")
    parser.add_argument("--length", action="append", type=int, help="of a draft, by default 1, 2, 3, 4 and 6")
    parser.add_argument("--number", type=int, default=4, help="of texts of a workload")
    parser.add_argument("--tokens", type=int, default=192, help="that each gets")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="choosing", help="of the results")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    checkpoint = load_checkpoint(model_place(options.model), "float32", "cpu")
    model = checkpoint.model
    texts = {
        each.name: each.prompts(checkpoint.tokenizer, options.number, 1, options.prompt)
        for given in options.workload
        for each in parse_workloads(given)
    }
    groups = {f"clasp:{layers}": _fixed_sets(model, texts, layers) for layers in options.layers}
    if options.exits:
        first, last = map(int, options.exits.split("-"))
        groups[f"del:{options.exits}"] = [f"exit:{layer}" for layer in range(first, last + 1)]
    record: dict[str, Any] = {
        "settings": vars(options),
        "environment": environment(torch.device("cpu")),
        "parameters": model.num_parameters(),
        "groups": [{"chosen": chosen, "fixed": [*fixed, *options.draft]} for chosen, fixed in groups.items()],
        "results": [],
    }
    arms = dict.fromkeys(draft for each in record["groups"] for draft in (each["chosen"], *each["fixed"]))
    settings = [(name, t) for name in texts for t in options.temperature or (0.0, 0.8)]
    for arm in track(arms, transient=True):
        for workload, temperature in settings:
            lengths = options.length or (1, 2, 3, 4, 6)
            found = [_decoded(model, arm, texts[workload], temperature, each, options.tokens) for each in lengths]
            best = max(found, key=lambda each: each["tokens_a_step"])
            record["results"].append({"workload": workload, "temperature": temperature, "draft": arm, **best})
        keep(options.name, record, _report(record))
    print(_report(record))


def _decoded(
    model: PreTrainedModel, draft: str, texts: Texts, temperature: float, length: int, tokens: int
) -> dict[str, Any]:
    spec = selfspec.wrap(model, draft, draft_length=Length(length))
    new = rounds = judged = accepted = 0
    with weights_read() as read:
        for ids in texts:
            options = {"max_new_tokens": tokens, "eos_token_id": None, "seed": 0, **sampling(temperature)}
            out = spec.generate(ids, attention_mask=torch.ones_like(ids), **options)
            new, rounds = new + out.stats.new_tokens, rounds + out.stats.rounds
            judged, accepted = judged + out.stats.judged, accepted + out.stats.accepted
    rates = {"tokens_a_step": new / (rounds + read.drafts), "acceptance": accepted / judged}
    return {"length": length, **rates, "trials": read.trials / rounds}


def _fixed_sets(model: PreTrainedModel, texts: Mapping[str, Texts], layers: int) -> list[str]:
    own = {
        name: [Continuation(own_text(model, ids, 64, 0.0), ids.shape[1]) for ids in each]
        for name, each in texts.items()
    }
    kinds = [*own.values(), [text for each in own.values() for text in each[:2]]]
    return list(dict.fromkeys(draft_name(_greedy_set(model, each, layers)) for each in kinds))


def _greedy_set(model: PreTrainedModel, texts: Sequence[Continuation], layers: int) -> LayerSkip:
    adapter, chosen = find_adapter(model), LayerSkip(layers=[0])
    left: list[int] = []
    for _ in range(layers):
        others = [layer for layer in range(len(adapter.decoder_layers(model))) if layer not in left]
        sets: dict[str, LayerPathDrafter] = {str(each): LayerSkip(layers=sorted([*left, each])) for each in others}
        found = teacher_forced(model, adapter, sets, texts, (1.0,))
        best = max(found, key=lambda each: found[each].alpha(1.0).value)
        left.append(int(best))
        chosen = LayerSkip(layers=sorted(left))
    return chosen


def _report(record: Mapping[str, Any]) -> str:
    found = {(each["workload"], each["temperature"], each["draft"]): each for each in record["results"]}
    parts = [
        f"{Path(record['settings']['model']).name}, {record['parameters'] / 1e6:.1f}M parameters",
        "Tokens a plain step by the weights that are read; of each draft at its best length, in brackets.",
    ]
    heads = ("text", "temperature", "chosen", "best fixed", "which", "chosen by best fixed", "acceptance")
    for group in record["groups"]:
        rows = []
        for workload, temperature, draft in found:
            fixed = [one for each in group["fixed"] if (one := found.get((workload, temperature, each)))]
            if draft != group["chosen"] or len(fixed) < len(group["fixed"]):
                continue
            own, best = found[workload, temperature, draft], max(fixed, key=lambda each: each["tokens_a_step"])
            cells = [f"{each['tokens_a_step']:.3f} ({each['length']})" for each in (own, best)]
            cells += [best["draft"], f"{own['tokens_a_step'] / best['tokens_a_step']:.3f}", f"{own['acceptance']:.3f}"]
            rows.append([workload, f"{temperature:g}", *cells, f"{best['acceptance']:.3f}", f"{own['trials']:.1%}"])
        parts += [f"## {group['chosen']}", markdown_table([*heads, "of best fixed", "rounds with a trial"], rows)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()

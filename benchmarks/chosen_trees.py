"""What the default control drafts where it may draft trees: by counts, beside chains, on held-out text.

    python benchmarks/chosen_trees.py MODEL --held-out FILE --draft int8

Each line of the held-out text has `text`; prompts are the beginnings of its documents, one row at a time. Arms take
turns prompt by prompt. The control has the costs that it assumes of a CPU, from the weights that a draft step reads.
`by cost` is tokens committed by the cost of the rounds in plain steps, by the same costs: no clock.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kept import RESULTS
from rich.progress import track
from torch import Tensor

import selfspec
from selfspec.control import CostAware
from selfspec.control.costs import Costs
from selfspec.draft.registry import parse_draft
from selfspec.environment import environment
from selfspec.measure.embedded import model_place
from selfspec.measure.estimate import Estimate
from selfspec.measure.prompts import read_workloads
from selfspec.model.checkpoint import load_checkpoint

_CONTEXT = 64
_NODES = (None, 8, 16)
_TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Counted:
    """One text.

    Attributes:
        tokens: committed.
        rounds: target passes.
        drafted: rounds with a draft.
        branched: of these, drafts with branches.
        cost: of all rounds, in plain steps.
    """

    tokens: int
    rounds: int
    drafted: int
    branched: int
    cost: float


def counted(spec: selfspec.SelfSpeculative, prompt: Tensor, control: CostAware, options: dict[str, Any]) -> Counted:
    """Generate after a prompt and count what rounds drafted and committed."""
    assert isinstance(control.costs, Costs)
    rounds = list(spec.stream(prompt, torch.ones_like(prompt), draft_length=control, eos_token_id=None, **options))
    drafts = [(each.steps, len(each.rows[0].draft)) for each in rounds]
    return Counted(
        tokens=sum(len(each.tokens) for each in rounds),
        rounds=len(rounds),
        drafted=sum(nodes > 0 for _, nodes in drafts),
        branched=sum(nodes > steps for steps, nodes in drafts),
        cost=sum(control.costs.of_round(steps, nodes) if nodes else 1.0 for steps, nodes in drafts),
    )


def main() -> None:
    """Count, and write table and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--held-out", required=True, metavar="FILE[#FIELD=VALUE]")
    parser.add_argument("--draft", default="int8")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--name", default="chosen_trees")
    asked = parser.parse_args()
    checkpoint = load_checkpoint(model_place(asked.model), "float32", "cpu")
    drafter = parse_draft(asked.draft)
    assert drafter is not None
    spec = selfspec.wrap(checkpoint.model, drafter)
    costs = Costs.assumed(drafter.cost(spec.model, spec.adapter), torch.device("cpu"))
    controls = {nodes: CostAware(costs=costs, nodes=nodes) for nodes in _NODES}
    (workload,) = read_workloads([f"held-out={asked.held_out}"]).values()
    prompts = workload.prompts(checkpoint.tokenizer, asked.prompts, 1, _CONTEXT)
    found: dict[tuple[float, int | None], list[Counted]] = {}
    for seed, prompt in enumerate(track(prompts, "drafting", transient=True)):
        for temperature in _TEMPERATURES:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": None, "seed": seed}
            options = {"max_new_tokens": asked.max_new_tokens, **(sampling if temperature else {"do_sample": False})}
            for nodes, control in controls.items():
                found.setdefault((temperature, nodes), []).append(counted(spec, prompt, control, options))
    record = {
        "settings": {**vars(asked), "model": Path(asked.model).name, "held_out": Path(asked.held_out).name},
        "environment": environment(torch.device("cpu")),
        "costs": asdict(costs),
        "figures": [
            {"temperature": temperature, "nodes": nodes, "texts": [asdict(each) for each in texts]}
            for (temperature, nodes), texts in found.items()
        ],
    }
    (RESULTS / f"{asked.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    table = _table(found)
    (RESULTS / f"{asked.name}.md").write_text(table)
    print(table)


def _table(found: dict[tuple[float, int | None], list[Counted]]) -> str:
    lines = [
        "| temperature | nodes at most | committed a pass | by cost | drafts with branches |",
        "|---|---|---|---|---|",
    ]
    for (temperature, nodes), texts in found.items():
        length = Estimate.of_ratio([each.tokens for each in texts], [each.rounds for each in texts])
        by_cost = Estimate.of_ratio([each.tokens for each in texts], [each.cost for each in texts])
        branched = sum(each.branched for each in texts), sum(each.drafted for each in texts)
        budget = "chain" if nodes is None else nodes
        lines.append(
            f"| {temperature:g} | {budget} | {length.shown(2)} | {by_cost.shown(2)} | {branched[0]} of {branched[1]} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""What trees along the model's own path commit for each target pass, beside chains, on held-out text when sampling.

    python benchmarks/trees.py --held-out FILE

Each line of the held-out text has `text`; prompts are the beginnings of its documents, always the same. Arms take turns
over batches of prompts. Intervals are 95 % bootstraps over batches. `by cost` divides by the cost of a round in plain
steps, from the weights that a draft step reads and what further tokens cost on the CPUs that were looked at: no clock.
The second table is of candidates for one place, drawn without replacement from the draft's q at places of the held-out
texts: how often the token-level rule accepts one, and how often the best rule there could be would.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from kept import RESULTS
from rich.progress import track

import selfspec
from selfspec.control import FixedLength
from selfspec.control.costs import Costs
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import parse_draft
from selfspec.environment import environment
from selfspec.measure.acceptance import forced_logits
from selfspec.measure.candidates import Candidates, candidates_at_one_place, distributions
from selfspec.measure.embedded import DEMO, model_place
from selfspec.measure.estimate import Estimate
from selfspec.model.checkpoint import Checkpoint, load_checkpoint
from selfspec.model.registry import find_adapter

_TREES = ((1, 4), (2, 4), (3, 4), (2, 8), (3, 8))
_CONTROLS = [*map(FixedLength, range(1, 7)), *(FixedLength(levels, nodes) for levels, nodes in _TREES)]
_ROWS, _PROMPT = 8, 48
# Texts that candidates for one place are compared on, and which of their places.
_TEXTS, _EVERY = 24, 6


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--drafts", nargs="+", default=["exit:2", "exit:4"])
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--batches", type=int, default=12, help=f"of {_ROWS} prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--name", default="trees")
    options = parser.parse_args()
    checkpoint = load_checkpoint(model_place(options.model), "float32", "cpu")
    batches = _prompts(checkpoint.tokenizer, options.held_out, options.batches)
    stats: dict[tuple[str, FixedLength], list[Any]] = {}
    wrappers = {draft: selfspec.wrap(checkpoint.model, draft) for draft in options.drafts}
    for seed, ids in enumerate(track(batches, "drafting", transient=True)):
        for draft, spec in wrappers.items():
            for control in _CONTROLS:
                output = spec.generate(
                    ids,
                    torch.ones_like(ids),
                    draft_length=control,
                    seed=seed,
                    max_new_tokens=options.max_new_tokens,
                    do_sample=True,
                    temperature=options.temperature,
                    top_k=None,
                    eos_token_id=None,
                )
                stats.setdefault((draft, control), []).append(output.stats)
    rows = []
    for (draft, control), found in stats.items():
        spec = wrappers[draft]
        drafter = parse_draft(draft)
        assert drafter is not None
        costs = Costs.assumed(drafter.cost(spec.model, spec.adapter), torch.device("cpu"))
        nodes = control.nodes or control.length
        length = Estimate.of_ratio([each.new_tokens for each in found], [each.row_rounds for each in found])
        cost = costs.of_round(control.length, nodes)
        rows.append(
            {
                "draft": draft,
                "levels": control.length,
                "nodes": nodes,
                "committed": length.to_dict(),
                "by_cost": length.value / cost,
                "accepted_per_level": [
                    sum(each.accepted_per_depth[level] for each in found) / sum(each.row_rounds for each in found)
                    for level in range(control.length)
                ],
            }
        )
    several = _candidates(checkpoint, options)
    given = {**vars(options), "held_out": options.held_out.name, "model": Path(options.model).name}
    record = {"settings": given, "environment": environment(torch.device("cpu")), "figures": rows}
    record["candidates"] = [{"draft": draft, **asdict(each)} for draft, found in several.items() for each in found]
    (RESULTS / f"{options.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / f"{options.name}.md").write_text(_table(rows) + _beside_the_best(several))
    print(_table(rows) + _beside_the_best(several))


def _candidates(checkpoint: Checkpoint, options: argparse.Namespace) -> dict[str, list[Candidates]]:
    """What several candidates for one place are worth, by draft."""
    found = {}
    texts = _texts(checkpoint.tokenizer, options.held_out, _TEXTS, _PROMPT + options.max_new_tokens)
    for draft in options.drafts:
        drafter = parse_draft(draft)
        assert isinstance(drafter, LayerPathDrafter)
        forced = forced_logits(checkpoint.model, find_adapter(checkpoint.model), {draft: drafter}, texts)
        pairs = (distributions([each.target[::_EVERY], each.draft[::_EVERY]], options.temperature) for each in forced)
        found[draft] = candidates_at_one_place([(p, q) for p, q in pairs])
    return found


def _beside_the_best(several: dict[str, list[Candidates]]) -> str:
    lines = ["", "| draft | candidates for one place | accepted | by the best rule |", "|---|---|---|---|"]
    lines += [
        f"| {draft} | {each.count} | {each.accepted.shown(3)} | {each.best.shown(3)} |"
        for draft, found in several.items()
        for each in found
    ]
    return "\n".join(lines) + "\n"


def _prompts(tokenizer: Any, file: Path, batches: int) -> list[torch.Tensor]:
    return list(torch.cat(_texts(tokenizer, file, batches * _ROWS, _PROMPT)).split(_ROWS))


def _texts(tokenizer: Any, file: Path, number: int, tokens: int) -> list[torch.Tensor]:
    """The beginnings of documents, evenly spread, `[1, tokens]` each."""
    texts = (json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines())
    begun = [ids for ids in (tokenizer(text).input_ids[:tokens] for text in texts) if len(ids) == tokens]
    step = max(1, len(begun) // number)
    return [torch.tensor([ids]) for ids in begun[::step][:number]]


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| draft | levels | nodes | committed a pass | by cost |", "|---|---|---|---|---|"]
    for row in rows:
        length = Estimate(**row["committed"]).shown(2)
        lines.append(f"| {row['draft']} | {row['levels']} | {row['nodes']} | {length} | {row['by_cost']:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

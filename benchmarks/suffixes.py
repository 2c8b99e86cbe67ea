"""Count what drafts without a model commit a pass: chains beside trees, of the text alone and with a corpus.

    python benchmarks/suffixes.py MODEL --corpus FILE --workload code=humaneval.jsonl --workload spec=spec_bench.jsonl

Nothing is timed: the counts are the same on every machine. FILE is one of `selfspec index`. Sampled texts are drawn by
`coupled`, so that all arms write the same ones; of candidates that were not drawn it accepts what every lossless rule
does in expectation. Greedy text of small models runs into loops, which flatter any draft that copies; sampled text
hardly does.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import selfspec
from selfspec.draft import Drafter, PromptLookup, Recycling, Suffixes, Union
from selfspec.draft.offer import Offer
from selfspec.files.writing import write_json
from selfspec.measure.estimate import Estimate
from selfspec.measure.prompts import read_workloads

_CONTEXT, _DEPTH = 64, 7
_SIZES = (7, 15)


@dataclass(frozen=True)
class Chains(Suffixes):
    """The likeliest continuation alone."""

    def offers(self, batch: Any, budget: Any) -> list[tuple[Offer, ...]]:
        return [tuple(map(_likeliest, offers)) for offers in super().offers(batch, budget)]


def _likeliest(offer: Offer) -> Offer:
    chain: dict[tuple[int, ...], float] = {}
    path: tuple[int, ...] = ()
    while children := [each for each in offer.shares if len(each) == len(path) + 1 and each[:-1] == path]:
        path = max(children, key=offer.shares.__getitem__)
        chain[path] = offer.shares[path]
    return Offer(offer.kind, chain)


def arms(corpus: str) -> dict[str, Drafter]:
    """What drafts, by name."""
    return {
        "look-up": PromptLookup(),
        "text, chain": Chains(most_bytes=0),
        "text, tree": Suffixes(most_bytes=0),
        "text and earlier ones, tree": Suffixes(),
        "corpus, chain": Chains(corpus),
        "corpus, tree": Suffixes(corpus),
        "recycling": Recycling(),
        "union with recycling, no corpus": Union(Suffixes(), Recycling()),
        "union with recycling, corpus": Union(Suffixes(corpus), Recycling()),
    }


def counted(
    model: PreTrainedModel, draft: Drafter, nodes: int, prompts: list[Tensor], heat: float, new: int
) -> Estimate:
    """Tokens a pass after all prompts, with an interval over these; the wrapper starts knowing nothing."""
    spec = selfspec.wrap(model, draft, draft_length=selfspec.FixedLength(_DEPTH, nodes=nodes))
    sampled: dict[str, Any] = {"temperature": heat, "top_k": 0, "accept": "coupled"} if heat else {}
    found = [
        spec.generate(
            prompt,
            torch.ones_like(prompt),
            max_new_tokens=new,
            do_sample=heat > 0,
            eos_token_id=None,
            seed=seed,
            **sampled,
        ).stats
        for seed, prompt in enumerate(prompts)
    ]
    return Estimate.of_ratio([each.new_tokens for each in found], [each.row_rounds for each in found])


def main() -> None:
    """Measure, and write table and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--corpus", required=True, metavar="FILE")
    parser.add_argument("--workload", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--to", type=Path, default=Path("benchmarks/results"), metavar="FOLDER")
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
    workloads = {
        each.name: each.prompts(tokenizer, asked.prompts, 1, _CONTEXT)
        for each in read_workloads(asked.workload).values()
    }
    cells = [(name, heat) for name in workloads for heat in (0.0, 0.8)]
    rows, record = [], []
    for name, draft in track(arms(asked.corpus).items(), "counting"):
        for nodes in _SIZES:
            found = [
                counted(model, draft, nodes, workloads[workload], heat, asked.max_new_tokens)
                for workload, heat in cells
            ]
            rows.append([name, str(nodes), *(each.shown(2) for each in found)])
            for (workload, heat), each in zip(cells, found, strict=True):
                point = {"draft": name, "nodes": nodes, "workload": workload, "temperature": heat}
                record.append({**point, "tokens_a_pass": asdict(each)})
    head = ["draft", "nodes", *(f"{workload}, {heat or 'greedy'}" for workload, heat in cells)]
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    model_name = Path(asked.model).name
    text = f"Tokens a pass, {model_name}, {asked.prompts} prompts of each sort; 95 % intervals over prompts.\n\n"
    text += "\n".join(lines) + "\n"
    write_json(asked.to / "suffixes.json", {"model": model_name, "corpus": Path(asked.corpus).name, "points": record})
    (asked.to / "suffixes.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

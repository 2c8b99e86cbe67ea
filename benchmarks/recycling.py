"""Count what drafts without a model commit a pass, by the nodes of their trees, on all text and outside of loops.

    python benchmarks/recycling.py MODEL --workload spec=spec_bench.jsonl --workload code=humaneval.jsonl

Nothing is timed: the counts are the same on every machine. Greedy text of small models runs into loops, which flatter
any draft that copies; a round counts as outside of loops where its first token is.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import selfspec
from selfspec.draft import Cascade, Drafter, PromptLookup, Recycling
from selfspec.files.writing import write_json
from selfspec.measure.cycles import in_cycles
from selfspec.measure.estimate import Estimate
from selfspec.measure.palette import ORANGE, PURPLE, STYLE, VERMILION, WINE
from selfspec.measure.prompts import read_workloads

_SIZES = (1, 3, 7, 15, 31)
_DEPTH = 7
_CONTEXT = 128
_ARMS: dict[str, Drafter] = {
    "look-up": PromptLookup(),
    "recycling after one token": Recycling(longest=1),
    "recycling after one to four": Recycling(),
    "look-up, then recycling": Cascade(PromptLookup(), Recycling()),
}
# Colours and markers.
_LOOKS = {
    "look-up": (PURPLE, "v"),
    "recycling after one token": (ORANGE, "o"),
    "recycling after one to four": (VERMILION, "P"),
    "look-up, then recycling": (WINE, "s"),
}


@dataclass(frozen=True)
class Point:
    """Tokens a pass of one arm with trees of one size on one workload, with intervals over prompts.

    Attributes:
        workload: its name.
        arm: what drafts.
        nodes: of a tree at most.
        everywhere: tokens a pass.
        outside_loops: the same over rounds that begin outside of loops.
    """

    workload: str
    arm: str
    nodes: int
    everywhere: Estimate
    outside_loops: Estimate


def measure(model: PreTrainedModel, name: str, prompts: list[Tensor], arm: str, nodes: int, new: int) -> Point:
    """Generate after all prompts with one wrapper, which starts knowing nothing."""
    control = selfspec.FixedLength(min(nodes, _DEPTH), nodes=nodes)
    spec = selfspec.wrap(model, _ARMS[arm], draft_length=control)
    counts = [counted(spec, prompt, new) for prompt in prompts]
    outside = [(tokens, passes) for _, _, tokens, passes in counts if passes]
    return Point(
        name,
        arm,
        nodes,
        Estimate.of_ratio([each[0] for each in counts], [each[1] for each in counts]),
        Estimate.of_ratio([tokens for tokens, _ in outside], [passes for _, passes in outside]),
    )


def counted(spec: selfspec.SelfSpeculative, prompt: Tensor, new: int) -> list[int]:
    """Tokens and passes of one text, and the same of rounds that begin outside of loops."""
    stream = spec.stream(prompt, torch.ones_like(prompt), max_new_tokens=new, do_sample=False, eos_token_id=None)
    rounds = [committed.tokens for committed in stream]
    loops, place, tokens, passes = in_cycles([token for each in rounds for token in each]), 0, 0, 0
    for each in rounds:
        if not loops[place]:
            tokens, passes = tokens + len(each), passes + 1
        place += len(each)
    return [place, len(rounds), tokens, passes]


def table(points: list[Point]) -> str:
    """The points as Markdown."""
    lines = ["| workload | draft | nodes | tokens a pass | outside of loops |", "|---|---|---|---|---|"]
    for point in points:
        shown = (
            f"{each.value:.2f} ({each.low:.2f}-{each.high:.2f})" for each in (point.everywhere, point.outside_loops)
        )
        lines.append(f"| {point.workload} | {point.arm} | {point.nodes} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def draw(points: list[Point], file: Path) -> None:
    """Draw tokens a pass outside of loops over the nodes of a tree, a panel for each workload."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(point.workload for point in points))
    with rc_context(STYLE):
        figure = Figure(figsize=(3.6 * len(workloads), 3.0), layout="constrained")
        panels = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
        for panel, workload in zip(panels, workloads, strict=True):
            for number, (arm, (colour, marker)) in enumerate(_LOOKS.items()):
                chosen = [point for point in points if (point.workload, point.arm) == (workload, arm)]
                # Side by side, so that intervals can be told apart.
                sizes = [point.nodes * 1.03 ** (number - 1.5) for point in chosen]
                found = [point.outside_loops for point in chosen]
                ends = [[each.value - each.low for each in found], [each.high - each.value for each in found]]
                values = [each.value for each in found]
                panel.errorbar(
                    sizes, values, ends, lw=1, elinewidth=0.7, capsize=2, color=colour, marker=marker, label=arm
                )
            panel.set(title=workload, xscale="log", xlabel="nodes of a tree, at most", xticks=_SIZES, ylim=(1, None))
            panel.set_xticks(_SIZES, [str(size) for size in _SIZES])
            panel.minorticks_off()
            panel.grid()
        panels[0].set_ylabel("tokens a pass, outside of loops; 95 % intervals")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
        figure.savefig(file, dpi=150)


def main() -> None:
    """Measure, and write table, figures and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workload", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--to", type=Path, default=Path("benchmarks/results"), metavar="FOLDER")
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
    jobs = [
        (workload, arm, nodes)
        for workload in read_workloads(asked.workload).values()
        for arm in _ARMS
        for nodes in _SIZES
    ]
    points = [
        measure(
            model,
            workload.name,
            workload.prompts(tokenizer, asked.prompts, 1, _CONTEXT),
            arm,
            nodes,
            asked.max_new_tokens,
        )
        for workload, arm, nodes in track(jobs, "counting")
    ]
    name = Path(asked.model).name
    write_json(asked.to / "recycling.json", {"model": name, "points": [_plain(point) for point in points]})
    (asked.to / "recycling.md").write_text(f"Greedy text of {name}; 95 % intervals over prompts.\n\n{table(points)}")
    draw(points, asked.to / "recycling.png")


def _plain(point: Point) -> dict[str, object]:
    both = {name: getattr(point, name) for name in ("everywhere", "outside_loops")}
    found = {name: [each.value, each.low, each.high] for name, each in both.items()}
    return {"workload": point.workload, "arm": point.arm, "nodes": point.nodes, **found}


if __name__ == "__main__":
    main()

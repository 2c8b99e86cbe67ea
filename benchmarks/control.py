"""Compare the default control with every fixed draft length and plain decoding: short texts, and useless drafts.

    python benchmarks/control.py --texts heldout.jsonl --untrained FOLDER --threads 2

Good drafts are those of the embedded model's exit, over the beginnings of six Python files and of held-out documents of
every kind. Useless ones leave an ordinary checkpoint after its first layer. Arms run in turns. A text counts by its
rounds at measured costs (c, V(m) and o), which a busy machine troubles least, and by the clock. The best fixed length
is one for a whole set of texts. Ratios are of sums over texts; their intervals (95 %) draw texts again. Texts do not
end before their last token.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import keep, prompts_of, sampling, seconds_of
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from selfspec.api import SelfSpeculative, wrap
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.embedded import checkpoint_folder
from selfspec.measure.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.model.registry import find_adapter

_LENGTHS = (1, 2, 3, 4, 5, 6)
_PLAIN, _CONTROL = "plain", "default"
_FEW, _CONTEXT = 6, 48
_UNITS = {"steps": "by counted rounds", "seconds": "by the clock"}
# Of the measuring of costs.
_REPEATS = 25


@dataclass(frozen=True)
class Case:
    """A draft and its texts.

    Attributes:
        name: what the tables call it.
        model: under test.
        exit: layer that it drafts from.
        temperature: 0 decodes greedily.
        prompts: each `[1, tokens]`.
        lengths: fixed ones that run beside the control.
    """

    name: str
    model: PreTrainedModel
    exit: int
    temperature: float
    prompts: Sequence[Tensor]
    lengths: Sequence[int] = _LENGTHS


@dataclass
class Arm:
    """A way to decode, and the cost of each text.

    Attributes:
        spec: decodes.
        taken: plain steps by measured costs, and seconds by the clock: a sum over turns for each text.
        rounds: how many of each draft length there were, in all texts.
    """

    spec: SelfSpeculative
    taken: dict[str, list[float]]
    rounds: Counter[int] = field(default_factory=Counter)

    @property
    def drafted(self) -> float:
        """Return the tokens drafted in a round that drafts; 0 where none does."""
        drafting = self.rounds.total() - self.rounds[0]
        return sum(length * number for length, number in self.rounds.items()) / max(drafting, 1)


def main() -> None:
    """Run the benchmark."""
    options = _options()
    torch.set_num_threads(options.threads)
    cases: list[dict[str, Any]] = []
    settings = {name: str(value) for name, value in vars(options).items() if name not in ("texts", "untrained")}
    record = {"settings": settings, "environment": environment(torch.device("cpu")), "cases": cases}
    known: dict[tuple[int, int], MeasuredCosts] = {}
    for case in _cases(options):
        key, draft = (id(case.model), case.exit), [selfspec.drafts.EarlyExit(case.exit)]
        if key not in known:
            known[key] = measure_costs(case.model, find_adapter(case.model), draft, context=64, repeats=_REPEATS)
        cases.append(_result(case, known[key], _measured(case, known[key], options), options))
        print(_table(cases[-1]), flush=True)
        keep(options.name, record, "\n".join(map(_table, cases)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", required=True, metavar="FILE", help="held-out, each line with `text` and `kind`")
    parser.add_argument("--untrained", help="a checkpoint whose first layer drafts nothing of use")
    parser.add_argument("--exit", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=60, help="held-out ones")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="turns that are not counted")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="control", help="of the results")
    return parser.parse_args()


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    embedded = load_checkpoint(str(checkpoint_folder()), "float32", "cpu")
    few = prompts_of(f"{options.texts}#kind=code", embedded.tokenizer, _FEW, _CONTEXT)
    held_out = prompts_of(options.texts, embedded.tokenizer, options.prompts, _CONTEXT)
    for temperature in options.temperatures:
        yield Case("six Python files", embedded.model, options.exit, temperature, few)
        yield Case("held-out texts", embedded.model, options.exit, temperature, held_out)
    if options.untrained is not None:
        untrained = load_checkpoint(options.untrained, "float32", "cpu")
        prompts = prompts_of(options.texts, untrained.tokenizer, options.prompts, _CONTEXT)
        for temperature in options.temperatures:
            yield Case("exit:1 of an untrained model", untrained.model, 1, temperature, prompts, lengths=())


def _measured(case: Case, costs: MeasuredCosts, options: argparse.Namespace) -> dict[str, Arm]:
    plain, drafter, number = wrap(case.model), selfspec.drafts.EarlyExit(case.exit), len(case.prompts)
    specs = {_PLAIN: plain, _CONTROL: plain.drafting(drafter)}
    specs |= {str(length): plain.drafting(drafter, length) for length in case.lengths}
    arms = {name: Arm(spec, {unit: [0.0] * number for unit in _UNITS}) for name, spec in specs.items()}
    names = list(arms)
    for turn in track(range(-options.warm_up, options.turns), f"{case.name}, T {case.temperature:g}", transient=True):
        for text, prompt in enumerate(case.prompts):
            first = (turn + text) % len(names)
            for name in names[first:] + names[:first]:
                arm, seed, rounds = arms[name], max(turn, 0) * number + text, list[int]()
                given = {"max_new_tokens": options.max_new_tokens, "eos_token_id": None, "seed": seed}
                chunks = arm.spec.stream(prompt, torch.ones_like(prompt), **given, **sampling(case.temperature))
                seconds = seconds_of(lambda: rounds.extend(len(each.rows[0].draft) for each in chunks))  # noqa: B023
                if turn >= 0:
                    arm.taken["seconds"][text] += seconds
                    arm.taken["steps"][text] += sum(_cost(costs, case.exit, length) for length in rounds)
                    arm.rounds.update(rounds)
    return arms


def _cost(costs: MeasuredCosts, exit_layer: int, length: int) -> float:
    """Return the plain steps of a round."""
    return 1.0 if length == 0 else costs.of(f"exit:{exit_layer}").of_round(length, length)


def _result(case: Case, costs: MeasuredCosts, arms: dict[str, Arm], options: argparse.Namespace) -> dict[str, Any]:
    found, tokens = costs.of(f"exit:{case.exit}"), options.turns * options.max_new_tokens * len(case.prompts)
    result: dict[str, Any] = {
        "case": case.name,
        "temperature": case.temperature,
        "texts": len(case.prompts),
        "c": found.draft,
        "V(2)": found.of_round(0, 1) - found.overhead,
        "V(4)": found.of_round(0, 3) - found.overhead,
        "o": found.overhead,
        "drafted a round": {name: arm.drafted for name, arm in arms.items()},
        "rounds by draft length": {name: dict(sorted(arm.rounds.items())) for name, arm in arms.items()},
        "tokens a second, plain": tokens / sum(arms[_PLAIN].taken["seconds"]),
    }
    for unit in _UNITS:
        taken = {name: arm.taken[unit] for name, arm in arms.items()}
        speeds = {name: sum(taken[_PLAIN]) / sum(each) for name, each in taken.items()}
        result[f"tokens a plain step, by {unit}"] = speeds
        result[f"against plain, by {unit}"] = Estimate.of_ratio(taken[_PLAIN], taken[_CONTROL]).to_dict()
        if case.lengths:
            best = max(case.lengths, key=lambda length: speeds[str(length)])
            against = Estimate.of_ratio(taken[str(best)], taken[_CONTROL]).to_dict()
            result[f"against the best fixed length, by {unit}"] = {"length": best, **against}
    return result


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"## {result['case']}, temperature {result['temperature']:g}\n",
        f"{result['texts']} texts; c {result['c']:.2f}, V(2) {result['V(2)']:.2f}, V(4) {result['V(4)']:.2f}, "
        f"o {result['o']:.2f}; plain {result['tokens a second, plain']:.0f} tokens/s\n",
        "| draft length | drafted a round | tokens a plain step, by counted rounds | by the clock |",
        "|---|---|---|---|",
    ]
    counted, clocked = (result[f"tokens a plain step, by {unit}"] for unit in _UNITS)
    for name, value in counted.items():
        lines.append(f"| {name} | {result['drafted a round'][name]:.2f} | {value:.3f} | {clocked[name]:.3f} |")
    lines.append("")
    interval = "{value:.3f} ({low:.3f}-{high:.3f})"
    for unit, words in _UNITS.items():
        lines.append(f"- default against plain, {words}: " + interval.format(**result[f"against plain, by {unit}"]))
        if best := result.get(f"against the best fixed length, by {unit}"):
            named = f"- default against a length of {best['length']}, the best fixed one, {words}: "
            lines.append(named + interval.format(**best))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

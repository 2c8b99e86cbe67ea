"""The default control against every fixed draft length and against plain decoding: short texts, and useless drafts.

    python benchmarks/control.py --held-out heldout.jsonl --untrained FOLDER --threads 2

Each line of the held-out text has `text` and `kind`. Good drafts are those of the embedded model's exit, over the
README's texts (six beginnings of Python files) and over the first tokens of held-out documents of every kind; and of a
random model with a planted acceptance rate. Useless ones leave an ordinary checkpoint after its first layer, or a
random model with next to no planted acceptance. Arms run in turns. A text counts by its rounds at measured costs (c,
V(m) and o), which a busy machine troubles least, and by the clock. The best fixed length is one for a whole set of
texts. Ratios are of sums over texts; their intervals (95 %) draw texts again. Texts do not end before their last token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kept import RESULTS
from planted_acceptance import SHAPES, plant, random_model
from rich.progress import track
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

import selfspec
from selfspec.api import SelfSpeculative, wrap
from selfspec.environment import environment
from selfspec.measure.costs import MeasuredCosts, measure_costs
from selfspec.measure.embedded import checkpoint_folder
from selfspec.measure.estimate import Estimate
from selfspec.measure.prompts import parse_workloads
from selfspec.model.checkpoint import load_checkpoint
from selfspec.model.registry import find_adapter

_LENGTHS = (1, 2, 3, 4, 5, 6)
_PLAIN, _CONTROL = "plain", "default"
_README, _CONTEXT = 6, 48
# Of the measuring of costs.
_REPEATS = 25


@dataclass(frozen=True)
class Case:
    """A draft and texts.

    Attributes:
        name: what the tables call it.
        model: under test.
        exit: layer that it drafts from.
        temperature: 0 decodes greedily.
        prompts: each `[1, tokens]`.
        useful: whether fixed lengths are run beside.
    """

    name: str
    model: PreTrainedModel
    exit: int
    temperature: float
    prompts: Sequence[Tensor]
    useful: bool = True


@dataclass
class Arm:
    """One way to decode, and for each text what it took.

    Attributes:
        spec: decodes.
        steps: plain steps, by measured costs, one list a text.
        seconds: by the clock, likewise.
        rounds: how many of each draft length there were, in all texts.
    """

    spec: SelfSpeculative
    steps: list[list[float]] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    rounds: Counter[int] = field(default_factory=Counter)

    @property
    def drafted(self) -> float:
        """Tokens drafted in a round that drafts; 0 where none does."""
        drafting = self.rounds.total() - self.rounds[0]
        return sum(length * number for length, number in self.rounds.items()) / max(drafting, 1)

    def means(self, unit: str) -> list[float]:
        """Plain steps, or seconds, of each text."""
        values: list[list[float]] = getattr(self, unit)
        return [sum(each) / len(each) for each in values]


def main() -> None:
    """Run the benchmark."""
    options = _options()
    torch.set_num_threads(options.threads)
    record: list[dict[str, Any]] = []
    costs: dict[tuple[int, int], MeasuredCosts] = {}
    for case in _cases(options):
        key = (id(case.model), case.exit)
        if key not in costs:
            drafter = selfspec.EarlyExit(case.exit)
            costs[key] = measure_costs(case.model, find_adapter(case.model), [drafter], context=64, repeats=_REPEATS)
        record.append(_result(case, costs[key], _measured(case, costs[key], options), options.max_new_tokens))
        print(_table(record[-1]), flush=True)
        _write(record, options)


def _write(record: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    settings = {name: str(value) for name, value in vars(options).items() if name not in ("held_out", "untrained")}
    whole = {"settings": settings, "environment": environment(torch.device("cpu")), "cases": record}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{options.name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    (RESULTS / f"{options.name}.md").write_text("\n".join(_table(each) for each in record))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--untrained", type=Path, help="a checkpoint whose first layer drafts nothing of use")
    parser.add_argument("--planted", choices=SHAPES, help="size of the random model; default: none is run")
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
    code = parse_workloads(f"code={options.held_out}#kind=code")[0]
    readme = code.prompts(embedded.tokenizer, _README, 1, _CONTEXT)
    held_out = _beginnings(options.held_out, embedded.tokenizer, options.prompts)
    for temperature in options.temperatures:
        yield Case("README's texts", embedded.model, options.exit, temperature, readme)
        yield Case("held-out texts", embedded.model, options.exit, temperature, held_out)
    if options.untrained is not None:
        untrained = load_checkpoint(str(options.untrained), "float32", "cpu").model
        prompts = _beginnings(options.held_out, AutoTokenizer.from_pretrained(options.untrained), options.prompts)
        for temperature in options.temperatures:
            yield Case("exit:1 of an untrained model", untrained, 1, temperature, prompts, useful=False)
    if options.planted is not None:
        shape, drawn = SHAPES[options.planted], torch.Generator().manual_seed(2)
        prompts = [torch.randint(shape["vocabulary"], (1, _CONTEXT), generator=drawn) for _ in range(_README)]
        for acceptance in (0.92, 0.01):
            model, exit_layer = random_model(shape), shape["layers"] // 4
            planted = plant(model, exit_layer, acceptance, temperature=0.1)
            name = f"random {options.planted}, an acceptance of {planted:.2f} planted"
            yield Case(name, model, exit_layer, 0.1, prompts, useful=acceptance > 0.5)


def _beginnings(file: Path, tokenizer: Any, number: int) -> list[Tensor]:
    """Of that many documents, spread evenly over the file; of all, if there are fewer."""
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    chosen = [texts[index * len(texts) // number] for index in range(number)] if number < len(texts) else texts
    ids = [tokenizer(text[: 16 * _CONTEXT], return_tensors="pt").input_ids[:, :_CONTEXT] for text in chosen]
    return [each for each in ids if each.shape[1] == _CONTEXT]


def _measured(case: Case, costs: MeasuredCosts, options: argparse.Namespace) -> dict[str, Arm]:
    plain = wrap(case.model)
    drafter = selfspec.EarlyExit(case.exit)
    arms = {_PLAIN: Arm(plain), _CONTROL: Arm(plain.drafting(drafter))}
    arms |= {str(length): Arm(plain.drafting(drafter, length)) for length in _LENGTHS if case.useful}
    names = list(arms)
    for turn in track(range(-options.warm_up, options.turns), f"{case.name}, T {case.temperature:g}", transient=True):
        for number, prompt in enumerate(case.prompts):
            first = (turn + number) % len(names)
            for name in names[first:] + names[:first]:
                arm, seed = arms[name], max(turn, 0) * len(case.prompts) + number
                if turn < 0:
                    list(_rounds(arm, case, prompt, seed, options.max_new_tokens))
                    continue
                if turn == 0:
                    arm.steps.append([])
                    arm.seconds.append([])
                started = time.perf_counter()
                rounds = list(_rounds(arm, case, prompt, seed, options.max_new_tokens))
                arm.seconds[number].append(time.perf_counter() - started)
                arm.steps[number].append(sum(_cost(costs, f"exit:{case.exit}", length) for length in rounds))
                arm.rounds.update(rounds)
    return arms


def _rounds(arm: Arm, case: Case, prompt: Tensor, seed: int, tokens: int) -> Iterator[int]:
    """Draft lengths of the rounds of one generation."""
    sampling: dict[str, Any] = {"do_sample": False}
    if case.temperature > 0:
        sampling = {"do_sample": True, "temperature": case.temperature, "top_k": 0}
    mask = torch.ones_like(prompt)
    for chunk in arm.spec.stream(prompt, mask, max_new_tokens=tokens, eos_token_id=None, seed=seed, **sampling):
        yield len(chunk.rows[0].draft)


def _cost(costs: MeasuredCosts, name: str, length: int) -> float:
    """Plain steps of a round."""
    return 1.0 if length == 0 else costs.of(name).of_round(length, length)


def _result(case: Case, costs: MeasuredCosts, arms: dict[str, Arm], tokens: int) -> dict[str, Any]:
    found = costs.of(f"exit:{case.exit}")
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
    }
    for unit in ("steps", "seconds"):
        taken = {name: arm.means(unit) for name, arm in arms.items()}
        result[f"tokens a plain step, by {unit}"] = {
            name: sum(taken[_PLAIN]) / sum(each) for name, each in taken.items()
        }
        fixed = [name for name in taken if name not in (_PLAIN, _CONTROL)]
        best = min(fixed, key=lambda name: sum(taken[name]), default=None)
        result[f"against plain, by {unit}"] = Estimate.of_ratio(taken[_PLAIN], taken[_CONTROL]).to_dict()
        if best is not None:
            against = Estimate.of_ratio(taken[best], taken[_CONTROL]).to_dict()
            result[f"against the best fixed length, by {unit}"] = {"length": int(best), **against}
    result["tokens a second, plain"] = tokens * len(case.prompts) / sum(arms[_PLAIN].means("seconds"))
    return result


def _table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"## {result['case']}, temperature {result['temperature']:g}\n",
        f"{result['texts']} texts; c {result['c']:.2f}, V(2) {result['V(2)']:.2f}, V(4) {result['V(4)']:.2f}, "
        f"o {result['o']:.2f}; plain {result['tokens a second, plain']:.0f} tokens/s\n",
        "| draft length | drafted a round | tokens a plain step, by counted rounds | by the clock |",
        "|---|---|---|---|",
    ]
    counted, clocked = result["tokens a plain step, by steps"], result["tokens a plain step, by seconds"]
    for name, value in counted.items():
        lines.append(f"| {name} | {result['drafted a round'][name]:.2f} | {value:.3f} | {clocked[name]:.3f} |")
    lines.append("")
    for unit, words in (("steps", "by counted rounds"), ("seconds", "by the clock")):
        plain = result[f"against plain, by {unit}"]
        lines.append(f"- default against plain, {words}: {_shown(plain)}")
        best = result.get(f"against the best fixed length, by {unit}")
        if best is not None:
            lines.append(f"- default against a length of {best['length']}, the best fixed one, {words}: {_shown(best)}")
    return "\n".join(lines) + "\n"


def _shown(estimate: dict[str, float]) -> str:
    return f"{estimate['value']:.3f} ({estimate['low']:.3f}-{estimate['high']:.3f})"


if __name__ == "__main__":
    main()

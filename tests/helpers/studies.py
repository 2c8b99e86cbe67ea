"""What tests of tools share: a small study, counted work, records and profiles that were made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from helpers.saved_folders import checkpoint_folder
from selfspec.control.costs import BatchCosts, Costs
from selfspec.control.profile import Chosen, Profile, Setting
from selfspec.draft import Budget, Draft, RowsView, Stateless
from selfspec.measure.costs import MeasuredCosts
from selfspec.measure.estimate import Estimate
from selfspec.measure.watch import Watch
from selfspec.model.registry import find_adapter
from selfspec.tools.calibrate.calibration import Confirmed
from selfspec.tools.lab.runs import Row
from selfspec.tools.lab.study import StudiedModel, Study

TEXTS, PROMPT = 3, 6


def known(value: float) -> Estimate:
    return Estimate(value, value, value)


def declared(**changes: Any) -> Study:
    return Study.of(
        {
            "models": "stories",
            "drafts": ["exits", "sublayers"],
            "workloads": "given",
            "temperatures": [0.0, 1.0],
            "draft_lengths": [1, 2],
            "texts": TEXTS,
            "prompt_tokens": PROMPT,
            "max_new_tokens": 16,
            "confirm": 0,
            "pricing": "weights",
            **changes,
        }
    )


def stories_loader() -> Callable[[str], StudiedModel]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())
    prompts = torch.randint(3, 400, (TEXTS, PROMPT), generator=torch.Generator().manual_seed(0))
    studied = StudiedModel("stories", model, find_adapter(model), {"given": prompts.split(1)}, tokenizer)
    return lambda name: studied


def text_row(decoder: str, call: int = 0, draft: str | None = None, repeat: int = 0, **columns: Any) -> Row:
    """A text of 16 tokens, timed in turns: one token in the first tenth of a second, a second for the others."""
    own = {} if draft is None else {"judged": [8, 6], "accepted": [6, 4], "shapes": [[2, 2, 8]], "draft_length": 2}
    return {
        **{"run": decoder, "measured": "generation", "model": "tiny", "weights": "1" * 20, "setting": "s"},
        **{"workload": "w", "prompts": "p", "temperature": 0.0, "batch": 1, "context": None, "chat": False},
        **{"max_new_tokens": 16, "turns": "t", "device": "cpu", "threads": 1, "cores": 2, "free": 1.9, "selfspec": "0"},
        **{"decoder": decoder, "arm": draft or decoder, "draft": draft, "runtime": "native", "parts": [], "repeats": 1},
        **{"repeat": repeat, "call": call, "row": 0, "new_tokens": 16, "first_tokens": 1, "rounds": 16, "passes": 16},
        **{"seconds": 1.1, "first_seconds": 0.1, "repeated_share": 0.0, "token_ids": [*range(16)]},
        **own,
        **columns,
    }


@dataclass(frozen=True)
class Guess(Stateless):
    """A drafter that no name says all of: the same tokens again and again."""

    tokens: tuple[int, ...]

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        return Draft.chain(torch.tensor([self.tokens[: budget.depth]] * len(rows.running)))


class Notes(Watch):
    """Notes the steps of work, and interrupts it at one that counts."""

    def __init__(self, interrupted_at: int = 99) -> None:
        self.steps: list[str] = []
        self.expected = 0
        self._interrupted_at = interrupted_at

    def begin(self, steps: int) -> None:
        self.expected = steps

    def step(self, what: str, steps: int = 1) -> None:
        if steps and len(self.steps) >= self._interrupted_at:
            raise KeyboardInterrupt
        self.steps += [what] * steps


COSTS = Costs(draft=0.25, verify=1.1, widening=0.02, overhead=-0.01)
GREEDY = Chosen("lookup+exit:2", 5, BatchCosts((COSTS, replace(COSTS, widening=0.2, rows=4))), 0.0, (1.5, 1.4, 1.6), 4)
SAMPLED = Chosen("exit:1", 3, BatchCosts((replace(COSTS, draft=0.125),)), 0.8, (1.2, 1.1, 1.3))


def profile_of(model: PreTrainedModel, greedy: Chosen = GREEDY, sampled: Chosen = SAMPLED) -> Profile:
    return Profile(Setting.of(model), greedy, sampled, {"settings": {"prompts": 1}})


def calibrated(model: PreTrainedModel) -> Profile:
    """A calibration with one exit, of which greedy decoding made use and sampling did not."""
    estimate = Estimate(1.25, 1.0, 1.5)
    costs = MeasuredCosts(
        step_seconds=estimate,
        draft={"exit:2": estimate, "none": estimate},
        verify={"exit:2": {2: estimate, 4: estimate}, "none": {1: estimate, 2: estimate, 4: estimate}},
        overhead={"exit:2": estimate, "none": estimate},
        context=8,
        batch=1,
        lengths=(1, 4),
    )
    confirmed = [Confirmed("lookup+exit:2", estimate, 0.625, 2.5, 3), Confirmed("lookup", estimate, None, 1.0, 1)]
    kind = {
        "temperature": 0.0,
        "acceptance": {"exit:2": asdict(Estimate(0.75, 0.75, 0.75, n=1))},
        "predictions": {"exit:2": {"draft_length": 3, "speedup": 1.375}},
        "confirmed": [asdict(each) for each in confirmed],
    }
    lost = replace(confirmed[0], speedup=Estimate(0.75, 0.5, 1.0))
    report = {
        "doubts": ["the machine was busy"],
        "costs": costs.to_dict(),
        "in_batches": [replace(costs, batch=4, out_of_step=estimate).to_dict()],
        "greedy": {**kind, "in_batches": {"4": asdict(confirmed[0]), "16": asdict(lost)}},
        "sampled": {**kind, "temperature": 0.8, "in_batches": {}},
    }
    return Profile(Setting.of(model), GREEDY, Chosen("none", 5, None, 0.8, (1.0, 1.0, 1.0)), report)

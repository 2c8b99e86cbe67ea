"""Arms in turns: same tokens, honest counts, no score for an arm that says something else; and until time is up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from selfspec.measure.rounding import Bound
from selfspec.tools.lab import generations
from selfspec.tools.lab.arms import Arm, ArmSpec, Call, Cell, Prompts, StockArm, make_arm
from selfspec.tools.lab.generations import ENDLESS, ArmRun, Pair, differ, measure
from selfspec.tools.lab.table import summarise

GREEDY = Cell("w", 0.0, 1, 6, 16)
SPECS = [
    ArmSpec("generate"),
    ArmSpec("lookup"),
    ArmSpec("plain"),
    ArmSpec("draft", "exit:2", length=3),
    ArmSpec("draft", "exit:1"),
    ArmSpec("draft", "lookup+exit:2"),
    ArmSpec("draft", "exit:2", length=2, nodes=5),
]


def prompts(batch: int = 1, calls: int = 2) -> list[Prompts]:
    return [*map(Prompts.of_one_length, torch.randint(tiny.VOCABULARY, (calls * batch, 6)).split(batch))]


def measured(model: PreTrainedModel, cell: Cell, specs: list[ArmSpec] = SPECS, repeats: int = 2) -> list[Any]:
    ticks: list[int] = []
    given = prompts(cell.batch)
    arms = [make_arm(spec, model) for spec in specs]
    found = measure(model, cell, arms, given, repeats, 1, ticks.append)
    assert sum(ticks) <= len(arms) * len(given) * (1 + repeats)
    return found


@pytest.fixture(scope="module")
def greedy() -> list[Any]:
    return measured(tiny.llama(), GREEDY)


def test_greedy_arms_agree_and_count_what_they_did(greedy: list[Any]) -> None:
    for result in greedy:
        assert result.absence is None
        assert result.refused is False
        assert [len(repeat) for repeat in result.calls] == [2, 2]
        for call in (call for repeat in result.calls for call in repeat):
            assert call.tokens == 16
            assert 0 < call.first_seconds < call.seconds
            assert 0 < call.first_tokens <= 11
            assert 16 / 11 <= call.passes <= 16
    by_name = {result.arm.spec.name: result for result in greedy}
    for plain in ("model.generate", "selfspec plain"):
        assert {(call.passes, call.first_tokens) for call in by_name[plain].calls[0]} == {(16, 1)}


@pytest.mark.tools
def test_shapes_of_rounds_are_what_stats_counted(greedy: list[Any]) -> None:
    for result in greedy[2:]:
        for call in result.calls[0]:
            assert sum(call.rounds.values()) == call.stats.rounds == call.passes
            assert sum(drafted * number for (drafted, _), number in call.rounds.items()) == call.stats.drafted
    fixed = next(each for each in greedy if each.arm.spec.length == 3 and each.arm.spec.draft)
    assert all(steps == drafted <= 3 for call in fixed.calls[0] for drafted, steps in call.rounds)


@pytest.mark.tools
def test_batches_have_no_assisted_generation(llama: PreTrainedModel) -> None:
    found = measured(llama, Cell("w", 0.0, 3, 6, 16))
    absent = [result.arm.spec.kind for result in found if result.absence is not None]
    assert absent == ["lookup"]
    running = [result for result in found if result.absence is None]
    assert all(call.tokens == 48 for result in running for call in result.calls[0])
    assert all(result.refused is False for result in running)


@pytest.mark.tools
def test_sampled_texts_are_not_compared(llama: PreTrainedModel) -> None:
    found = measured(llama, Cell("w", 0.8, 1, 6, 16))
    assert all(result.refused is None for result in found)
    for result in found:
        assert result.calls[0][0].rows != result.calls[1][0].rows


class Slip(StockArm):
    def decode(self, prompts: Prompts, cell: Cell, seed: int) -> Call:
        call = super().decode(prompts, cell, seed)
        call.rows[0][-1] = (call.rows[0][-1] + 1) % tiny.VOCABULARY
        return call


class Broken(StockArm):
    def decode(self, prompts: Prompts, cell: Cell, seed: int) -> Call:
        raise IndexError("no such layer\nand more")


def test_an_arm_that_slips_is_refused_and_one_that_raises_is_absent_or_ends_it(llama: PreTrainedModel) -> None:
    def beside_stock(arm: Arm) -> Any:
        return measure(llama, GREEDY, [make_arm(ArmSpec("generate"), llama), arm], prompts(), 1, 1, lambda _: None)[1]

    assert beside_stock(Slip(ArmSpec("lookup"), llama)).refused is True
    assert beside_stock(Broken(ArmSpec("lookup"), llama)).absence == "IndexError: no such layer"
    with pytest.raises(IndexError):
        beside_stock(Broken(ArmSpec("draft", "exit:1"), llama))


@torch.no_grad()
def test_half_precision_excuses_near_ties_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama(dtype=torch.bfloat16)
    prompt = torch.randint(tiny.VOCABULARY, (1, 6))
    own = make_arm(ArmSpec("generate"), model).decode(Prompts.of_one_length(prompt), GREEDY, 0).rows[0]
    logits = model(torch.cat([prompt, torch.tensor([own[:-1]])], 1)).logits[0, -1]
    asked, said, other = tuple(prompt[0].tolist()), tuple(own), (*own[:-1], int(logits.argmin()))
    assert not differ(model, [Pair(asked, said, said)])
    # The least likely token is no near tie of the likeliest.
    assert differ(model, [Pair(asked, said, said), Pair(asked, said, other)])
    # It would be, if rounding closed as wide a gap.
    gap = float(logits.max() - logits.min())
    monkeypatch.setattr(Bound, "near_tie", property(lambda bound: gap + 1))
    assert not differ(model, [Pair(asked, said, said), Pair(asked, said, other)])
    # A text that stops early is not the other up to rounding.
    assert differ(model, [Pair(asked, said, said[:-1])])
    # In full precision nothing is excused.
    assert differ(tiny.llama(), [Pair((3, 4, 5), (1, 2), (1, 3))])


RACED, SAMPLED = Cell("demo", 0.0, 1, 3, 4), Cell("demo", 0.8, 1, 3, 4)
PROMPTS = [Prompts.of_one_length(torch.tensor([[1, 2, number]])) for number in range(3)]


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeArm:
    """Takes some seconds for four tokens in some passes."""

    clock: Clock
    seconds: float
    passes: int = 4
    tokens: tuple[int, ...] = (5, 6, 7, 8)
    seen: list[tuple[int, Cell, int]] = field(default_factory=list)
    spec: ArmSpec = field(default_factory=lambda: ArmSpec("plain"))

    def decode(self, prompts: Prompts, cell: Cell, seed: int) -> Call:
        self.clock.now += self.seconds
        self.seen.append((int(prompts.ids[0, -1]), cell, seed))
        return Call([list(self.tokens)], self.seconds, self.seconds / 4, 1, self.passes)


def raced(arms: list[FakeArm], until: float, cell: Cell = RACED, model: Any = None) -> list[ArmRun]:
    return measure(model, cell, arms, PROMPTS, ENDLESS, 0, lambda _: None, until=until, clock=arms[0].clock)


def turns_of(found: list[ArmRun]) -> set[int]:
    return {sum(map(len, run.calls)) for run in found}


def test_turns_go_on_while_the_next_one_ends_in_time() -> None:
    clock = Clock()
    arms = [FakeArm(clock, 2.0), FakeArm(clock, 1.0, 2)]
    found = raced(arms, until=14.0)
    assert (turns_of(found), clock.now) == ({4}, 12.0)
    # Each repeat has all prompts, but for the last one.
    assert [len(repeat) for repeat in found[0].calls] == [3, 1]
    # Each turn has a seed.
    assert arms[0].seen == [(0, RACED, 0), (1, RACED, 1), (2, RACED, 2), (0, RACED, 3)]
    # There is one at least.
    for until in (0.0, 5.0):
        clock = Clock()
        assert turns_of(raced([FakeArm(clock, 2.0), FakeArm(clock, 1.0)], until)) == {1}


def test_which_arm_begins_changes() -> None:
    clock, order = Clock(), []

    class Noted(FakeArm):
        def decode(self, prompts: Prompts, cell: Cell, seed: int) -> Call:
            order.append((seed, self.seconds))
            return super().decode(prompts, cell, seed)

    raced([Noted(clock, 2.0), Noted(clock, 1.0)], until=7.0)
    assert [order[0], order[2]] == [(0, 2.0), (1, 1.0)]


def test_rows_are_compared_with_the_first_arms(llama: PreTrainedModel) -> None:
    clock = Clock()
    arms = [
        FakeArm(clock, 2.0, spec=ArmSpec("generate")),
        FakeArm(clock, 1.0),
        FakeArm(clock, 0.5, 2, (5, 6, 7, 9), spec=ArmSpec("draft", "exit:1")),
    ]
    rows = [
        row
        for cell in (RACED, SAMPLED)
        for row in generations.rows_of(llama, "tiny", cell, PROMPTS, raced(arms, clock.now + 50.0, cell, llama))
    ]
    greedy, sampled = (lines for _, lines in summarise(rows).groupby("temperature"))
    assert greedy["equal"].tolist() == [1.0, 1.0, 0.0]
    assert "equal" not in sampled.dropna(axis=1)
    assert sampled["whole_speedup_over_generate"].tolist() == [1.0, 2.0, 4.0]
    assert sampled["speedup"].tolist() == [0.5, 1.0, 2.0]
    assert sampled["mean_accepted_length"].tolist() == [1.0, 1.0, 2.0]
    assert set(sampled["n"]) == {3}


def test_whole_prompts_of_several_lengths_are_one_batch_and_end_where_the_model_ends_them() -> None:
    model = tiny.llama()
    rows = [torch.randint(tiny.VOCABULARY, (1, length)) for length in (3, 7)]
    alone = [
        make_arm(ArmSpec("generate"), model).decode(Prompts.of_one_length(row), Cell("w", 0.0, 1, 7, 12), 0).rows[0]
        for row in rows
    ]
    model.generation_config.eos_token_id = alone[0][3]
    ended = [row[: row.index(alone[0][3]) + 1] if alone[0][3] in row else row for row in alone]
    cell, asked = Cell("w", 0.0, 2, None, 12), [Prompts.padded(rows)]
    assert asked[0].rows == [row[0].tolist() for row in rows]
    specs = [ArmSpec("generate"), ArmSpec("plain"), ArmSpec("draft", "exit:2", length=3)]
    every: list[Any] = measure(model, cell, [make_arm(spec, model) for spec in specs], asked, 1, 1, lambda _: None)
    for found in every:
        assert found.calls[0][0].rows == ended
        assert found.refused is False

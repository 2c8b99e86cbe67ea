"""Arms side by side on a tiny model: same tokens, honest counts, and no score for an arm that says something else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers import tiny
from selfspec.measure.embedded import checkpoint_folder
from selfspec.measure.timing import Call
from selfspec.tools.bench.agreement import Pair, compare
from selfspec.tools.bench.arms import Arm, ArmSpec, StockArm, make_arm
from selfspec.tools.bench.candidates import candidates_of
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.measure import ArmRun, measure

GREEDY = Cell("w", 0.0, 1, 6, 16)
SPECS = [
    ArmSpec("generate"),
    ArmSpec("lookup"),
    ArmSpec("early-exit", exit_layer=2, length=3),
    ArmSpec("plain"),
    ArmSpec("draft", "exit:2", length=3),
    ArmSpec("draft", "exit:1"),
    ArmSpec("draft", "lookup+exit:2"),
    ArmSpec("draft", "exit:2", length=2, nodes=5),
]


def prompts(batch: int = 1, calls: int = 2) -> list[Tensor]:
    """Random ones."""
    return list(torch.randint(tiny.VOCABULARY, (calls * batch, 6)).split(batch))


def measured(model: PreTrainedModel, cell: Cell, specs: list[ArmSpec] = SPECS, repeats: int = 2) -> list[ArmRun]:
    """All arms."""
    ticks: list[None] = []
    given = prompts(cell.batch)
    arms = [make_arm(spec, model) for spec in specs]
    found = measure(model, cell, arms, given, repeats, 1, lambda: ticks.append(None))
    assert len(ticks) <= len(arms) * len(given) * (1 + repeats)
    return found


@pytest.fixture(scope="module")
def greedy() -> list[ArmRun]:
    """All arms, greedily."""
    model = tiny.llama()
    depth = model.config.num_hidden_layers
    found = measured(model, GREEDY)
    # transformers' early exit changes the depth while it drafts.
    assert model.config.num_hidden_layers == depth
    return found


def test_greedy_arms_agree_and_count_what_they_did(greedy: list[ArmRun]) -> None:
    for result in greedy:
        assert result.absence is None
        assert result.agreement is not None
        assert (result.agreement.texts, result.agreement.equal, result.agreement.refused) == (2, 2, False)
        assert [len(repeat) for repeat in result.calls] == [2, 2]
        for call in (call for repeat in result.calls for call in repeat):
            assert call.tokens == 16
            assert 0 < call.first_seconds < call.seconds
            assert 0 < call.first_tokens <= 11
            assert 16 / 11 <= call.passes <= 16
    by_name = {result.arm.spec.name: result for result in greedy}
    for plain in ("model.generate", "selfspec plain"):
        assert {(call.passes, call.first_tokens) for call in by_name[plain].calls[0]} == {(16, 1)}


def test_shapes_of_rounds_are_what_stats_counted(greedy: list[ArmRun]) -> None:
    for result in greedy[3:]:
        for call in result.calls[0]:
            assert call.stats is not None
            assert sum(call.rounds.values()) == call.stats.rounds == call.passes
            assert sum(shape.drafted * number for shape, number in call.rounds.items()) == call.stats.drafted
    fixed = next(each for each in greedy if each.arm.spec.length == 3 and each.arm.spec.draft)
    assert all(shape.steps == shape.drafted <= 3 for call in fixed.calls[0] for shape in call.rounds)


def test_batches_have_no_assisted_generation(llama: PreTrainedModel) -> None:
    found = measured(llama, Cell("w", 0.0, 3, 6, 16))
    absent = [result.arm.spec.kind for result in found if result.absence is not None]
    assert absent == ["lookup", "early-exit"]
    running = [result for result in found if result.absence is None]
    assert all(call.tokens == 48 for result in running for call in result.calls[0])
    assert all(result.agreement is not None and result.agreement.equal == 6 for result in running)


def test_an_assistant_drafts_for_both() -> None:
    name = f"assistant:{checkpoint_folder()}"
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float32)
    specs = [ArmSpec("generate"), ArmSpec("assistant", name), ArmSpec("plain"), ArmSpec("draft", name, length=3)]
    _, stock, _, own = measured(model, GREEDY, specs, repeats=1)
    # The model itself is accepted whole; transformers ends drafts that are not confident.
    for arm, most in ((stock, 15), (own, 4)):
        assert arm.agreement is not None
        assert not arm.agreement.refused
        assert all(call.passes <= most for call in arm.calls[0])


def test_sampled_texts_are_not_compared(llama: PreTrainedModel) -> None:
    found = measured(llama, Cell("w", 0.8, 1, 6, 16))
    assert all(result.agreement is None for result in found)
    for result in found:
        assert result.calls[0][0].rows != result.calls[1][0].rows


class Slip(StockArm):
    """Says something else in its last token."""

    def decode(self, prompts: Tensor, cell: Cell, seed: int) -> Call:
        call = super().decode(prompts, cell, seed)
        call.rows[0][-1] = (call.rows[0][-1] + 1) % tiny.VOCABULARY
        return call


class Broken(StockArm):
    """Cannot."""

    def decode(self, prompts: Tensor, cell: Cell, seed: int) -> Call:
        raise IndexError("no such layer\nand more")


def test_an_arm_that_says_something_else_is_refused(llama: PreTrainedModel) -> None:
    arms: list[Arm] = [make_arm(ArmSpec("generate"), llama), Slip(ArmSpec("lookup"), llama)]
    _, slipped = measure(llama, GREEDY, arms, prompts(), 2, 1, lambda: None)
    assert slipped.agreement is not None
    assert (slipped.agreement.equal, slipped.agreement.refused) == (0, True)


def test_an_arm_of_transformers_that_raises_is_absent_and_says_why(llama: PreTrainedModel) -> None:
    arms: list[Arm] = [make_arm(ArmSpec("generate"), llama), Broken(ArmSpec("early-exit"), llama)]
    _, broken = measure(llama, GREEDY, arms, prompts(), 1, 1, lambda: None)
    assert broken.absence == "IndexError: no such layer"


def test_one_of_selfspec_that_raises_ends_it(llama: PreTrainedModel) -> None:
    arms: list[Arm] = [make_arm(ArmSpec("generate"), llama), Broken(ArmSpec("draft", "exit:1"), llama)]
    with pytest.raises(IndexError):
        measure(llama, GREEDY, arms, prompts(), 1, 1, lambda: None)


def test_half_precision_excuses_near_ties_alone() -> None:
    model = tiny.llama(dtype=torch.bfloat16)
    prompt = torch.randint(tiny.VOCABULARY, (1, 6))
    own = make_arm(ArmSpec("generate"), model).decode(prompt, GREEDY, 0).rows[0]
    logits = model(torch.cat([prompt, torch.tensor([own[:-1]])], 1)).logits[0, -1]
    asked, said, other = tuple(prompt[0].tolist()), tuple(own), (*own[:-1], int(logits.argmin()))
    # The same pair counts once.
    found = compare(model, [Pair(asked, said, said), Pair(asked, said, other), Pair(asked, said, other)])
    assert (found.texts, found.equal) == (2, 1)
    assert found.near_tie is not None
    assert found.widest_gap is not None
    # The least likely token is no near tie of the likeliest.
    assert found.refused
    # The same text with the second choice where the two likeliest are closest would be, if the bound is as wide.
    assert not type(found)(2, 1, widest_gap=found.near_tie, near_tie=found.near_tie).refused


def test_in_full_precision_nothing_is_excused(llama: PreTrainedModel) -> None:
    found = compare(llama, [Pair((3, 4, 5), (1, 2), (1, 3))])
    assert found.refused
    assert found.widest_gap is None


def test_sampled_trees_are_reported_beside_the_best_rule(llama: PreTrainedModel) -> None:
    given, cell = prompts(), Cell("w", 0.8, 1, 6, 16)
    specs = [ArmSpec("plain"), ArmSpec("draft", "exit:2", length=2, nodes=5), ArmSpec("draft", "exit:2", length=2)]
    arms = [make_arm(spec, llama) for spec in specs]
    found = measure(llama, cell, arms, given, 1, 1, lambda: None)
    plain, trees, chains = (candidates_of(llama, cell, each, given) for each in found)
    assert plain == chains == []
    assert [each.count for each in trees] == [1, 2, 4]
    assert all(0 < each.accepted.value <= each.best.value + 0.02 <= 1.02 for each in trees)
    assert candidates_of(llama, GREEDY, found[1], given) == []

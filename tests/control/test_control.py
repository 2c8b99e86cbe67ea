"""Controls: when drafts end, when none is made, and that what is generated stays the model's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import outcome
from helpers.joints import PAIR, THREE, Warp, assert_rows_are_stock, network, p_values
from selfspec.control import Control, Controller, CostAware
from selfspec.draft import Budget, Draft, RowVerdict

CHEAP = selfspec.Costs(draft=0.1)
DEAR = selfspec.Costs(draft=0.9, verify=1.2)


def said(*confidences: float) -> Callable[[], list[float]]:
    """Give the confidence of each row in a draft step, as `goes_on` asks for it."""
    return lambda: list(confidences)


def drafted(controller: Controller, confidences: list[float], remaining: int = 100) -> int:
    """How many tokens a draft gets whose tokens have these confidences."""
    most = controller.budget(remaining, [True]).depth
    if not controller.tries(0):
        return 0
    for count, confidence in enumerate(confidences[:most], 1):
        if count < most and not controller.goes_on(said(confidence)):
            return count
    return most


def learned(controller: Controller, length: int, accepted: int, match: int = 0) -> None:
    """Let a controller learn of a round of one row."""
    draft = Draft.chain(torch.zeros(1, length, dtype=torch.long), steps=0 if match else length, match_length=match)
    controller.learn(draft, [outcome(min(accepted + 1, length), accepted, accepted + 1)])


@pytest.mark.parametrize("remaining", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("control", [selfspec.FixedLength(3), CostAware(3)], ids=str)
def test_no_more_is_drafted_than_can_be_of_use(control: Control, remaining: int) -> None:
    controller = control.begin(CHEAP)
    assert controller.most == Budget.chain(3)
    assert controller.budget(remaining, [True]) == Budget.chain(min(3, remaining - 1))


def test_fewer_nodes_than_levels_bound_the_levels(llama: PreTrainedModel) -> None:
    assert CostAware(nodes=4).begin(CHEAP).most == Budget(4, 4)
    assert CostAware(nodes=11).begin(CHEAP).most == Budget(7, 11)
    assert CostAware(3, nodes=2).begin_by_load(CHEAP).most == Budget(2, 2)
    spec = selfspec.wrap(llama, "recycle", draft_length=CostAware(costs=CHEAP, nodes=4))
    assert_rows_are_stock(llama, spec, [tiny.prompt(7), tiny.prompt(4, seed=1)], max_new_tokens=24)


def test_sure_drafts_continue_and_doubtful_ones_stop() -> None:
    assert drafted(CostAware(6).begin(CHEAP), [0.99] * 6) == 6
    assert drafted(CostAware(6).begin(selfspec.Costs(draft=0.3)), [0.05] * 6) == 1
    # The dearer a step, the sooner it stops.
    assert drafted(CostAware(6).begin(selfspec.Costs(draft=0.5)), [0.7] * 6) == 1
    assert drafted(CostAware(6).begin(CHEAP), [0.7] * 6) > 1


def test_the_larger_the_batch_the_sooner_a_draft_stops() -> None:
    costs = selfspec.Costs(draft=0.1, widening=0.1)
    lengths = []
    for rows in (1, 4, 16):
        controller = CostAware(6).begin(costs)
        most = controller.budget(100, [True] * rows).depth
        lengths.append(next((n for n in range(1, most) if not controller.goes_on(said(*[0.8] * rows))), most))
    assert lengths[0] > lengths[1] > lengths[2]


def test_a_draft_that_is_better_than_fair_is_trusted_at_confidences_not_seen_before() -> None:
    """One whose own scores are flat, and which stands all the same, as a random model's with a planted acceptance."""
    lengths = {}
    for accepted in (0.95, 0.6, 0.2):
        controller = CostAware(6).begin(selfspec.Costs(draft=0.4, verify=1.1))
        for number in range(20):
            drafted(controller, [0.05])
            learned(controller, 1, accepted=number < 20 * accepted)
        lengths[accepted] = drafted(controller, [0.35] * 6)
    assert lengths[0.95] >= 3
    assert lengths[0.95] > lengths[0.6] >= lengths[0.2]


@pytest.mark.parametrize("stand", [True, False])
def test_what_is_accepted_or_rejected_shifts_all_confidences(stand: bool) -> None:
    controller = CostAware(6).begin(selfspec.Costs(draft=0.3))
    before = drafted(controller, [0.75] * 6)
    for _ in range(4):
        drafted(controller, [0.35] * 6)
        learned(controller, 2, accepted=2 * stand)
    controller.budget(100, [True])
    after = next((n for n in range(1, 6) if not controller.goes_on(said(0.75))), 6)
    assert after > before if stand else after < before


@pytest.mark.parametrize("costs", [CHEAP, selfspec.Costs(draft=0.5, verify=1.1)], ids=["cheap", "dearer"])
def test_useless_drafts_lose_a_few_steps_and_half_a_hundredth_of_a_step_a_round(costs: selfspec.Costs) -> None:
    controller = CostAware(4).begin(costs)
    lost, drafts = 0.0, []
    for number in range(1, 601):
        length = drafted(controller, [0.5] * 4)
        if length:
            learned(controller, length, accepted=0)
            drafts.append(number)
            lost += costs.of_round(length, length) - 1
        assert lost <= 3 + number / 200 + costs.of_round(4, 4)
    gaps = [later - earlier for earlier, later in pairwise(drafts)]
    # In a row at first, then now and then to the end.
    assert gaps[:2] == [1, 1]
    assert min(gaps[-2:]) > 5
    assert drafts[-1] > 400


def test_a_draft_that_could_hardly_pay_is_not_tried_before_twice_its_price_is_saved_up() -> None:
    controller = CostAware(4).begin(DEAR)
    rounds = 1
    while not drafted(controller, [0.5] * 4):
        rounds += 1
    assert rounds == pytest.approx(2 * (DEAR.of_round(1, 1) - 1) * 200, abs=1)
    learned(controller, 1, accepted=0)
    assert not any(drafted(controller, [0.5] * 4) for _ in range(rounds - 10))


def test_whether_a_draft_could_pay_is_a_matter_of_the_batch() -> None:
    costs = selfspec.Costs(draft=0.4, verify=1.1, widening=0.05)
    for match, tried in ((0, [True, True, False]), (5, [True, True, False])):
        found = []
        for rows in (1, 2, 32):
            controller = CostAware(4).begin(costs)
            controller.budget(100, [True] * rows)
            found.append(controller.tries(match))
        assert found == tried


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_many_useless_sources_lose_no_more_than_one(rows: int) -> None:
    costs = selfspec.Costs(draft=0.3, verify=1.1, widening=0.05)
    controller, batch = CostAware(4).begin(costs), costs.in_batch(rows)
    lost = 0.0
    for number in range(1, 401):
        length, match = controller.budget(100, [True] * rows).depth, number % 10
        if controller.tries(match):
            draft = Draft.chain(
                torch.zeros(rows, length, dtype=torch.long), steps=0 if match else length, match_length=match
            )
            controller.learn(draft, [outcome(1, 0, 1)] * rows)
            lost += batch.of_round(draft.steps, length) - 1
        assert lost <= 3 + number / 200 + batch.of_round(4, 4)
    assert lost > 1


def test_sources_that_pay_are_not_held_back_by_others_that_do_not() -> None:
    controller = CostAware(4).begin(selfspec.Costs(draft=0.3, verify=1.1, widening=0.05))
    for _ in range(8):
        learned(controller, 4, accepted=4, match=6)
        learned(controller, 4, accepted=0, match=0)
    controller.budget(100, [True])
    assert not controller.tries(0)
    assert controller.tries(6)


def test_bad_luck_at_the_beginning_does_not_end_what_pays() -> None:
    controller = CostAware(1).begin(selfspec.Costs(draft=0.4, verify=1.1))
    committed = cost = 0.0
    for number in range(100):
        length = 1 if controller.budget(9, [True]).depth and controller.tries(0) else 0
        stands = length if number > 2 else 0
        committed, cost = committed + 1 + stands, cost + (1.5 if length else 1.0)
        if length:
            learned(controller, length, accepted=stands)
    assert committed / cost > 1.25


def test_look_ups_are_judged_by_the_length_of_their_match() -> None:
    controller = CostAware(4).begin(CHEAP)
    for _ in range(10):
        learned(controller, 4, accepted=0, match=2)
        learned(controller, 4, accepted=4, match=6)
        learned(controller, 4, accepted=2, match=0)
    controller.budget(9, [True])
    assert controller.prefers(6, [0])
    assert not controller.prefers(2, [0])


@pytest.mark.parametrize("match", [0, 5])
def test_rows_are_kept_in_step_until_a_draft_pays_for_being_out_of_it_and_never_again(match: int) -> None:
    controller = CostAware(4).begin(CHEAP)
    for accepted in (4, 4, 4, 4):
        # Three rounds may be luck.
        assert controller.keeps_lockstep()
        learned(controller, 4, accepted, match)
    assert not controller.keeps_lockstep()
    for _ in range(100):
        learned(controller, 4, 0, match)
    assert not controller.keeps_lockstep()


def test_rows_stay_in_step_for_drafts_that_gain_less_than_passes_out_of_step_cost() -> None:
    for out_of_step, stays in ((1.7, True), (1.6, False)):
        # Three tokens a round, at 1.8 plain steps.
        controller = CostAware(2).begin(selfspec.Costs(draft=0.4, out_of_step=out_of_step))
        for _ in range(50):
            learned(controller, 2, accepted=2)
        assert controller.keeps_lockstep() == stays


def test_tokens_dropped_to_stay_in_step_show_what_a_draft_is_worth_and_are_lost_after_the_trial() -> None:
    draft = Draft.chain(torch.zeros(2, 4, dtype=torch.long), steps=4)
    for first, goes_on in ((outcome(4, 4, 5), True), (outcome(4, 4, 1, dropped=4), False)):
        # Three tokens a row stand, at 2.6 plain steps.
        controller = CostAware(4).begin(selfspec.Costs(draft=0.4, out_of_step=1.1))
        rows = [first, outcome(1, 0, 1)]
        for _ in range(4):
            assert controller.tries(0)
            controller.learn(draft, rows)
            rows.reverse()
        for _ in range(4):
            controller.learn(draft, rows)
            rows.reverse()
        assert controller.tries(0) == goes_on
        assert not controller.keeps_lockstep()


def test_a_batch_whose_slowest_row_gains_nothing_gains_nothing() -> None:
    draft = Draft.chain(torch.zeros(2, 4, dtype=torch.long), steps=4)
    rounds = {}
    for turns in (True, False):
        controller = CostAware(4).begin(selfspec.Costs(draft=0.4))
        controller.budget(100, [True, True])
        rows = [outcome(4, 4, 5), outcome(1, 0, 1)]
        # Three tokens a row at 2.6 plain steps, in turns or all of them in one row.
        rounds[turns] = 0
        while controller.tries(0) and rounds[turns] < 60:
            controller.learn(draft, rows)
            rounds[turns] += 1
            rows = rows[::-1] if turns else rows
    assert rounds[True] == 60
    assert rounds[False] < 10


def test_the_end_of_a_row_is_no_gain_and_no_loss() -> None:
    draft = Draft.chain(torch.zeros(3, 4, dtype=torch.long), steps=4)
    for ended in range(3):
        # A plain step a token, whoever is behind: what is gained then is gained in the rounds that are left.
        controller = CostAware(4).begin(selfspec.Costs(draft=0.0, out_of_step=9.0))
        controller.budget(100, [True] * 3)
        rows: list[RowVerdict | None] = [outcome(4, 4, 5), outcome(2, 1, 2), outcome(1, 0, 1)]
        for _ in range(30):
            controller.learn(draft, rows)
        assert controller.tries(0)
        rows = [outcome(1, 0, 1)] * 3
        rows[ended] = None
        for _ in range(30):
            controller.learn(draft, rows)
            assert controller.tries(0)


def test_a_short_text_has_less_to_lose() -> None:
    drafts = {}
    for tokens in (12, 48, 400):
        controller = CostAware(4).begin(selfspec.Costs(draft=0.3))
        drafts[tokens] = 0
        for left in range(tokens, 1, -1):
            length = drafted(controller, [0.5] * 4, remaining=left)
            drafts[tokens] += length > 0
            if length:
                learned(controller, length, accepted=0)
    assert 0 < drafts[12] < drafts[48] < drafts[400]


def test_one_row_looks_up_all_it_may_and_a_batch_as_much_as_pays() -> None:
    costs = selfspec.Costs(draft=0.3, widening=0.03, each_row=0.05)
    lengths = []
    for rows in (1, 4, 16, 64):
        controller = CostAware(7).begin(costs)
        controller.budget(100, [True] * rows)
        lengths.append(controller.look_up_length(1.0))
    assert lengths[0] == 7
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[2] < 7


def test_rows_with_a_match_must_be_enough_to_pay_for_those_without() -> None:
    # Where each further token costs a third of a plain step, four tokens in five stand in for a fifth.
    controller = CostAware(7).begin(selfspec.Costs(draft=0.3, widening=0.3, out_of_step=1.1, rows=8))
    controller.budget(100, [True] * 8)
    lengths = [controller.look_up_length(matches / 8) for matches in range(1, 9)]
    assert lengths[:3] == [0] * 3
    assert min(lengths[3:]) > 0
    assert lengths == sorted(lengths)
    controller.budget(100, [True])
    assert controller.look_up_length(1.0) == 7


LOOKED_UP = selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(1, 2), selfspec.drafts.EarlyExit(1))


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("control", "draft", "rule"),
    [
        (CostAware(2, costs=CHEAP), "exit:1", "token"),
        (CostAware(2), LOOKED_UP, "block"),
    ],
    ids=["costs", "look-up"],
)
def test_samples_follow_the_exact_joint_where_tokens_decide_how_long_a_draft_is(
    control: Control, draft: str | selfspec.drafts.Drafter, rule: str
) -> None:
    # One row at a time, so that its own tokens decide, and not the mean of many.
    spec = selfspec.wrap(network(seed=1), draft, draft_length=control, accept=rule)
    (fit,) = p_values(spec, Warp(temperature=1.2), tokens=THREE, prompts=[PAIR], rows=1, batches=600).values()
    assert fit > 0.003

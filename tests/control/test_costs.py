"""What the parts of a round cost, and what a prompt shows of a draft before the first round."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.control.cost_aware import CostAware
from selfspec.control.costs import Costs, speedup


def test_a_round_costs_the_sum_of_its_parts() -> None:
    costs = selfspec.Costs(draft=0.25, verify=1.1, widening=0.02, overhead=0.05)
    assert costs.of_round(steps=3, drafted=4) == pytest.approx(0.75 + 1.1 + 0.08 + 0.05)


def test_in_a_batch_a_pass_takes_longer_in_proportion_to_its_tokens() -> None:
    costs = selfspec.Costs(draft=0.25, verify=1.1, widening=0.1, overhead=0.05)
    four = costs.in_batch(4)
    # A plain step of four rows takes 1.3 times as long, and each token more in every row 0.4 of a plain one.
    assert four.widening == pytest.approx(0.4 / 1.3)
    assert four.overhead == pytest.approx(0.05 / 1.3)
    assert (four.draft, four.verify, four.rows) == (costs.draft, costs.verify, 4)
    assert costs.in_batch(1) == costs


def test_more_rows_cost_what_a_further_row_does_and_fewer_what_a_further_token_does() -> None:
    costs = selfspec.Costs(draft=0.25, widening=0.02, each_row=0.1)
    # Six rows take 1.5 times as long as one, and a token more in each of them 0.6 as long as one.
    assert costs.in_batch(6).widening == pytest.approx(0.6 / 1.5)
    assert costs.in_batch(1) == costs
    four = selfspec.Costs(draft=0.25, widening=0.08, rows=4, each_row=0.1)
    assert four.in_batch(2).widening == selfspec.Costs(draft=0.25, widening=0.08, rows=4).in_batch(2).widening
    assert four.in_batch(8).widening > selfspec.Costs(draft=0.25, widening=0.08, rows=4).in_batch(8).widening
    # Rows that cost less than tokens count as tokens do.
    costs = selfspec.Costs(draft=0.25, widening=0.1, each_row=0.05)
    assert costs.in_batch(4).widening == selfspec.Costs(draft=0.25, widening=0.1).in_batch(4).widening


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
def test_costs_of_a_batch_hold_for_other_batches_too(rows: int) -> None:
    costs = selfspec.Costs(draft=0.25, verify=1.1, widening=0.04, overhead=0.05)
    again = costs.in_batch(rows).in_batch(1)
    assert again.widening == pytest.approx(costs.widening)
    assert again.overhead == pytest.approx(costs.overhead)
    assert costs.in_batch(rows).widening < 1


def test_what_a_noisy_measure_says_of_a_batch_stays_possible() -> None:
    # Measured with 16 rows, each further token in all of them as dear as a whole pass and a half.
    one = selfspec.Costs(draft=0.25, widening=1.5, rows=16).in_batch(1)
    assert 0 < one.widening <= 1


MEASURED = selfspec.BatchCosts(
    (
        selfspec.Costs(draft=0.25, verify=1.0, widening=0.02, overhead=0.0),
        selfspec.Costs(draft=0.35, verify=1.2, widening=0.18, overhead=0.1, out_of_step=1.5, rows=4),
        selfspec.Costs(draft=0.25, verify=1.1, widening=0.08, overhead=0.1, out_of_step=1.1, rows=16),
    )
)


def test_between_sizes_of_batches_costs_lie_on_a_line_over_logarithms() -> None:
    assert all(MEASURED.in_batch(costs.rows) == costs for costs in MEASURED.measured)
    two, eight = MEASURED.in_batch(2), MEASURED.in_batch(8)
    assert (two.rows, eight.rows) == (2, 8)
    assert (two.draft, two.verify, two.widening, two.overhead) == pytest.approx((0.3, 1.1, 0.1, 0.05))
    assert (eight.draft, eight.verify, eight.widening, eight.overhead) == pytest.approx((0.3, 1.15, 0.13, 0.1))
    # A single row says nothing about rows at different places.
    assert two.out_of_step == 1.5
    assert eight.out_of_step == pytest.approx(1.3)
    # Beyond those that were measured the nearest one tells.
    assert MEASURED.in_batch(64) == MEASURED.measured[-1].in_batch(64)
    assert selfspec.BatchCosts(MEASURED.measured[1:]).in_batch(2) == MEASURED.measured[1].in_batch(2)


@pytest.mark.parametrize("order", [[], [0, 0], [1, 0]])
def test_costs_of_no_batch_or_of_one_twice_are_refused(order: list[int]) -> None:
    with pytest.raises(selfspec.errors.DraftConfigError, match="once for each number of rows"):
        selfspec.BatchCosts(tuple(MEASURED.measured[index] for index in order))


def test_speedup_is_the_formula() -> None:
    alpha, gamma, costs = 0.7, 3, Costs(draft=0.3, verify=1.2, overhead=0.1)
    expected = (1 - alpha**4) / ((1 - alpha) * (3 * 0.3 + 1.2 + 0.1))
    assert speedup(alpha, gamma, costs) == pytest.approx(expected)
    assert speedup(1.0, gamma, costs) == pytest.approx(4 / 2.2)


def test_a_good_draft_drafts_from_the_first_round(llama: PreTrainedModel) -> None:
    cheap = selfspec.Costs(draft=0.3)
    spec = selfspec.wrap(
        tiny.as_good_as_the_target(), selfspec.drafts.EarlyExit(3), draft_length=CostAware(costs=cheap)
    )
    for sampled in (False, True):
        out = spec.generate(tiny.prompt(20), max_new_tokens=40, do_sample=sampled, seed=1, eos_token_id=None)
        assert out.stats.acceptance_rate == 1
        assert out.stats.mean_accepted_length > 2.5

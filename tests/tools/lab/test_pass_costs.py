"""The parts of a round under the conditions of a cell."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from selfspec.measure.embedded import checkpoint_folder
from selfspec.measure.estimate import Estimate
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, make_arm
from selfspec.tools.lab.pass_costs import PassCosts, costs_of, measure_memory


@pytest.mark.tools
def test_every_arm_that_drafts_has_costs(llama: PreTrainedModel) -> None:
    drafts = ("exit:2", "lookup", "lookup+exit:2")
    specs = [ArmSpec("generate"), ArmSpec("plain"), *(ArmSpec("draft", draft) for draft in drafts)]
    specs.append(ArmSpec("draft", "exit:2", nodes=8))
    prompts = [Prompts.of_one_length(torch.arange(12).view(2, 6))]
    stock, plain, leaving, looking_up, both, tree = costs_of(
        llama, Cell("w", 0.0, 2, 6, 16), [make_arm(spec, llama) for spec in specs], prompts
    )
    assert stock is plain is tree is None
    assert leaving is not None
    assert looking_up is not None
    assert leaving == both
    assert leaving.draft is not None
    assert leaving.draft.value > 0
    assert looking_up.draft is None
    assert looking_up.of_round(3, 3) is None
    for costs, steps in ((leaving, 3), (looking_up, 0)):
        cost = costs.of_round(steps, 3)
        assert cost is not None
        assert 0 < cost.low <= cost.value <= cost.high
    assert looking_up.from_tokens.keys() == {1, 2, 3, 4, 6, 8}
    assert leaving.verify.keys() == {2, 3, 4, 6, 8}


def known(value: float) -> Estimate:
    return Estimate(value, value, value)


def test_costs_lie_on_lines_between_those_timed() -> None:
    resumed = {width: known(value) for width, value in {2: 1.0, 4: 1.2, 8: 2.0}.items()}
    costs = PassCosts(known(0.1), Estimate(0.2, 0.1, 0.4), resumed, {1: known(1.0), 4: known(1.6)})

    def value(steps: int, drafted: int) -> float:
        found = costs.of_round(steps, drafted)
        assert found is not None
        return found.value

    assert value(0, 0) == 1.0
    assert value(2, 2) == pytest.approx(0.4 + 1.1)
    assert value(5, 5) == pytest.approx(1.0 + 1.6)
    assert value(0, 2) == pytest.approx(1.4)
    # Beyond them all is as at the nearest.
    assert value(0, 9) == 1.6
    found = costs.of_round(2, 2)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.2 + 1.1, 0.8 + 1.1))


CELL = Cell("w", 0.0, 2, 8, 16)


@pytest.mark.tools
def test_a_process_of_its_own_weighs_an_arm() -> None:
    prompts = Prompts.of_one_length(torch.arange(10, 26).view(2, 8))
    arm = ArmSpec("draft", "exit:4")
    found = measure_memory(arm, CELL, prompts, str(checkpoint_folder()), torch.float32)
    if found is None:
        pytest.skip("this system does not tell")
    # 9.9M weights in float32, and not much more than what a library or two takes.
    assert 0.8 * 39e6 < found.weights < 39e6 + 60e6
    assert found.peak >= found.weights
    assert found.growth < 60e6
    assert found.counted_by == "system"


@pytest.mark.tools
def test_a_process_that_fails_says_so() -> None:
    prompts = Prompts.of_one_length(torch.tensor([[1, 2]]))
    with pytest.raises(RuntimeError, match=r"memory of selfspec plain could not be measured: .*nowhere"):
        measure_memory(ArmSpec("plain"), CELL, prompts, "./nowhere", torch.float32)

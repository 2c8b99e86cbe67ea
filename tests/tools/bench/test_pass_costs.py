"""The parts of a round under the conditions of a cell."""

from __future__ import annotations

from transformers import PreTrainedModel

from selfspec.tools.bench.arms import ArmSpec, make_arm
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.costs import costs_of


def test_every_arm_that_drafts_has_costs(llama: PreTrainedModel) -> None:
    drafts = ("exit:2", "lookup", "lookup+exit:2")
    specs = [ArmSpec("generate"), ArmSpec("plain"), *(ArmSpec("draft", draft) for draft in drafts)]
    specs.append(ArmSpec("draft", "exit:2", nodes=8))
    stock, plain, leaving, looking_up, both, tree = costs_of(
        llama, Cell("w", 0.0, 2, 6, 16), [make_arm(spec, llama) for spec in specs]
    )
    assert stock is plain is tree is None
    assert leaving is not None
    assert looking_up is not None
    assert leaving == both
    assert leaving.draft is not None
    assert leaving.draft > 0
    assert looking_up.draft is None
    assert looking_up.of_round(3, 3) is None
    for costs, steps in ((leaving, 3), (looking_up, 0)):
        cost = costs.of_round(steps, 3)
        assert cost is not None
        assert cost > 0
    assert looking_up.from_tokens.keys() == {1, 2, 3, 4, 6, 8}
    assert leaving.verify.keys() == {2, 3, 4, 6, 8}

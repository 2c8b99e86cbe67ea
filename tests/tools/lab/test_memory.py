"""Peak memory, by a process of its own for each arm."""

from __future__ import annotations

import pytest
import torch

from selfspec.measure.embedded import checkpoint_folder
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts
from selfspec.tools.lab.pass_costs import measure_memory

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

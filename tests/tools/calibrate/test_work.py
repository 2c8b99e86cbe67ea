"""What a calibration is expected to take is about what it takes, in passes and tokens."""

from __future__ import annotations

import pytest

from helpers import tiny
from helpers.counted_work import counted
from selfspec.draft import EarlyExit
from selfspec.measure.expected_time import TokenTimes
from selfspec.tools.calibrate.calibration import calibrate, work
from selfspec.tools.calibrate.measurements import Measurements

TIMES = TokenTimes(step=11, read=1)


@pytest.mark.tools
def test_it_is_of_the_right_size() -> None:
    model, prompts = tiny.llama(), [tiny.prompt(8), tiny.prompt(12, seed=1)]
    asked, drafts = Measurements(max_new_tokens=24, repeats=2, longest_draft=4, nodes=0), [EarlyExit(2)]
    with counted(model) as found:
        calibrate(model, prompts, drafts, asked)
    expected = TIMES.seconds(work(asked, prompts, len(drafts), {}))
    assert 0.4 < expected / found.seconds < 2.5

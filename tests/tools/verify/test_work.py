"""What a verification is expected to take is about what it takes, in passes and tokens."""

from __future__ import annotations

import pytest

from helpers import tiny
from helpers.counted_work import counted
from selfspec.draft import EarlyExit, LayerSkip, PromptLookup
from selfspec.measure.expected_time import TokenTimes
from selfspec.tools.verify.settings import Settings
from selfspec.tools.verify.verification import verify, work

# A pass as `counted` prices it.
TIMES = TokenTimes(step=11, read=1)


@pytest.mark.tools
@pytest.mark.parametrize("tokens", [16, 48])
def test_it_is_of_the_right_size(tokens: int) -> None:
    model, prompts = tiny.llama(), [tiny.prompt(8), tiny.prompt(12, seed=1)]
    drafts, settings = (
        [EarlyExit(2), LayerSkip(layers=[1]), PromptLookup()],
        Settings(max_new_tokens=tokens, samples=100),
    )
    with counted(model) as found:
        verify(model, prompts, drafts, settings)
    expected = TIMES.seconds(work(settings, prompts, len(drafts), {}))
    assert 0.5 < expected / found.seconds < 2

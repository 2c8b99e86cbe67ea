"""Hybrid and recurrent models: any sequence of rounds leaves the committed text, and nothing of what was rejected."""

from __future__ import annotations

import pytest
import torch

import selfspec
from helpers import tiny
from helpers.any_rounds import AnyShrunkenRounds, any_rounds
from helpers.shrunken import shrunken

TestAnyRounds = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 10, steps=8, architecture="jamba"))
TestAnyRoundsLfm2 = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 10, steps=8, architecture="lfm2"))
# The torch code of these is slow.
TestAnyRoundsFalconH1 = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 2, steps=8, architecture="falcon_h1"))
TestAnyRoundsQwen3Next = pytest.mark.contract(any_rounds(AnyShrunkenRounds, 3, steps=8, architecture="qwen3_next"))
# Nothing but states: no positions, no masks.
TestAnyRoundsMamba2 = pytest.mark.contract(
    any_rounds(AnyShrunkenRounds, 4, steps=8, architecture="mamba2", kernels=("eager",))
)


@pytest.mark.parametrize("architecture", ["jamba", "lfm2", "mamba2"])
def test_prompts_beside_one_of_a_single_token_leave_their_own_states(architecture: str) -> None:
    """Of the single token nothing is read before the first round, so no length is common to all rows."""
    model, prompts = shrunken(architecture), tiny.prompt(7, 3, vocabulary=50)
    lengths = (1, 4, 7)
    mask = torch.stack([torch.arange(7) >= 7 - length for length in lengths]).long()
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    out = spec.generate(prompts, mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    for row, length in enumerate(lengths):
        alone = prompts[row : row + 1, 7 - length :]
        wanted = model.generate(alone, attention_mask=torch.ones_like(alone), max_new_tokens=8, do_sample=False)
        assert out.sequences[row, 7 - length :].tolist() == wanted[0].tolist()


def test_an_mlp_that_is_not_there_cannot_be_skipped() -> None:
    with pytest.raises(selfspec.errors.DraftConfigError, match=r"mlp=\[1\].*no MLP"):
        selfspec.wrap(shrunken("mamba2"), selfspec.drafts.LayerSkip(attention=[0], mlp=[1]), draft_length=4)
    selfspec.wrap(shrunken("mamba2"), selfspec.drafts.LayerSkip(layers=[1]), draft_length=4)

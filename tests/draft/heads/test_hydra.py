"""Hydra heads: what they draft is what they were published for, and what is generated is the target's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import selfspec
from helpers import published_heads, reference_heads, tiny
from helpers.joints import padded
from selfspec.draft.heads.hydra import HydraProposer
from selfspec.errors import HeadError

PROMPTS = [tiny.prompt(length, seed=length).clamp(min=1) for length in (3, 9, 1, 6)]
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
CONTROLS = [5, selfspec.FixedLength(3, nodes=7)]


@pytest.mark.parametrize("control", CONTROLS, ids=str)
@pytest.mark.parametrize(("blocks", "grounded"), [(1, True), (3, True), (2, False)])
def test_heads_draft_what_they_were_published_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, grounded: bool, control: Any
) -> None:
    model = tiny.llama()
    folder = published_heads.hydra(tmp_path, model, blocks=blocks, grounded=grounded)
    found = reference_heads.recorded_drafts(monkeypatch, HydraProposer)
    ids, mask = padded(PROMPTS)
    spec = selfspec.wrap(model, f"hydra:{folder}", draft_length=control)
    spec.generate(ids, attention_mask=mask, max_new_tokens=12, **OPTIONS)
    weights = torch.load(tmp_path / "hydra_lm_head.pt")
    reference_heads.assert_drafts_are(found, reference_heads.hydra(model, weights))
    assert max(each.draft.length for each in found) == 3


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = tiny.llama()
    folder = Path(published_heads.hydra(tmp_path / "a", model))
    for other in (tiny.llama(vocab_size=51), tiny.llama(hidden_size=48)):
        with pytest.raises(HeadError, match="trained for another model"):
            selfspec.wrap(other, f"hydra:{folder}")
    weights = torch.load(folder / "hydra_lm_head.pt")
    torch.save({name: each for name, each in weights.items() if "lm_head.1" not in name}, folder / "hydra_lm_head.pt")
    with pytest.raises(HeadError, match=r"lacks the weight hydra_lm_head\.1\.1\.weight"):
        selfspec.wrap(model, f"hydra:{folder}")
    torch.save({name: each for name, each in weights.items() if "prefix" not in name}, folder / "hydra_lm_head.pt")
    with pytest.raises(HeadError, match="no Hydra heads with a prefix layer"):
        selfspec.wrap(model, f"hydra:{folder}")

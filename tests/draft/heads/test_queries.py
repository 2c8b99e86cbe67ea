"""Gemma 4's assistants: what they draft is what `transformers` computes of them, over keys and values of the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import published_heads, reference_heads, tiny
from helpers.joints import assert_rows_are_stock
from helpers.shrunken import shrunken
from selfspec.draft.heads.queries import QueriesProposer
from selfspec.errors import HeadError

PROMPTS = [tiny.prompt(length, seed=length).clamp(min=3) for length in (3, 14, 1, 6)]
CONTROLS = [4, selfspec.FixedLength(3, nodes=7)]


def reference(model: PreTrainedModel, folder: str) -> Callable[[list[int], list[int]], Tensor]:
    """The assistant by its own forward: what it gives after a text and draft tokens, `[vocab]`."""
    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    @torch.no_grad()
    def logits(text: list[int], drafted: list[int]) -> Tensor:
        read = model.model(torch.tensor([text[:-1]]), return_shared_kv_states=True)
        state = read.last_hidden_state[:, -1:]
        for token in (text[-1], *drafted):
            embedded = model.get_input_embeddings()(torch.tensor([[token]]))
            out = assistant(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=dict(read.shared_kv_states),
            )
            state = out.last_hidden_state
        found: Tensor = out.logits[0, -1]
        return found

    return logits


@pytest.mark.contract
@pytest.mark.parametrize(("groups", "control"), [(False, CONTROLS[0]), (True, CONTROLS[1])], ids=["chain", "groups"])
def test_an_assistant_drafts_what_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: bool, control: Any
) -> None:
    model = shrunken("gemma4_text")
    folder = published_heads.queries(tmp_path, model, groups)
    found = reference_heads.recorded_drafts(monkeypatch, QueriesProposer)
    spec = selfspec.wrap(model, f"queries:{folder}", draft_length=control)
    # Texts are longer than the window.
    assert_rows_are_stock(model, spec, PROMPTS, max_new_tokens=9, eos_token_id=7)
    reference_heads.assert_drafts_are(found, reference(model, folder))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = shrunken("gemma4_text")
    folder = published_heads.queries(tmp_path / "a", model)
    with pytest.raises(HeadError, match="trained for another model"):
        selfspec.wrap(tiny.llama(), f"queries:{folder}")
    with pytest.raises(HeadError, match="write queries:"):
        selfspec.wrap(model, f"eagle:{folder}")
    (tmp_path / "a" / "model.safetensors").write_bytes(b"")
    with pytest.raises(HeadError, match="truncated or corrupt"):
        selfspec.wrap(model, f"queries:{folder}")

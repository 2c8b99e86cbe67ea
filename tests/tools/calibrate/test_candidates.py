"""Vocabularies that a model's own text chooses: few tokens where few are written, and drafts with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from selfspec import Profile, wrap
from selfspec.draft import Drafter, EarlyExit, LowPrecision, ReducedVocabulary
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import ProfileError
from selfspec.measure.estimate import Estimate
from selfspec.measure.own_text import Continuation, continued
from selfspec.model.registry import find_adapter
from selfspec.tools.calibrate import calibration as running
from selfspec.tools.calibrate.calibration import calibrate
from selfspec.tools.calibrate.candidates import Candidate, own_vocabulary, with_own_vocabulary
from selfspec.tools.calibrate.confirm import Confirmed
from selfspec.tools.calibrate.measurements import Measurements

_ROWS, _WRITTEN = 1024, 40


@torch.no_grad()
def _writing_few(few: int = _WRITTEN) -> PreTrainedModel:
    """A model with a large head that writes the first few tokens of its vocabulary."""
    model = tiny.llama(vocab_size=_ROWS, tie_word_embeddings=False)
    head = model.lm_head.weight
    head[:few] *= 40
    head[few:] = 0
    return model


def _prompts() -> list[torch.Tensor]:
    return [tiny.prompt(6, seed=seed) % _WRITTEN for seed in range(4)]


def _texts(model: PreTrainedModel) -> list[list[Continuation]]:
    return [continued(model, _prompts(), 24, temperature) for temperature in (0.0, 0.8)]


def test_the_tokens_that_a_model_writes_are_kept() -> None:
    model = _writing_few()
    tokens = own_vocabulary(model, _texts(model))
    assert tokens is not None
    assert len(tokens) == _ROWS // 16
    assert set(range(_WRITTEN)) <= set(tokens)


def test_tokens_that_are_expected_count_though_none_was_written() -> None:
    model, ids = _writing_few(), torch.tensor([[1, 2, 3, 4]])
    tokens = own_vocabulary(model, [[Continuation(ids, 1)] * 2])
    with torch.no_grad():
        expected = model(ids).logits[0].softmax(-1).sum(0)
    assert tokens is not None
    assert set(expected.topk(8).indices.tolist()) <= set(tokens)


def test_there_is_none_where_a_quarter_is_not_enough_or_nothing_shows_it() -> None:
    flat = tiny.llama(vocab_size=_ROWS)
    assert own_vocabulary(flat, [continued(flat, _prompts(), 24, 1.0)]) is None
    model = _writing_few()
    assert own_vocabulary(model, [[text] for text, *_ in _texts(model)]) is None


def _reduced(model: PreTrainedModel, *drafts: LayerPathDrafter) -> list[str | None]:
    named = {str(each.spelling): each for each in drafts}
    found = with_own_vocabulary(model, find_adapter(model), named, _texts(model), Path("tokens.json"))
    return [each.spelling for each in found]


@pytest.mark.tools
def test_drafts_in_fewer_bits_have_one_where_the_head_is_large() -> None:
    drafts = EarlyExit(2), LowPrecision(8), LowPrecision(4), LowPrecision(8, exit=2)
    assert _reduced(_writing_few(), *drafts) == ["int8+vocab:tokens.json", "int4+vocab:tokens.json"]
    assert _reduced(_writing_few(), EarlyExit(2)) == []
    assert _reduced(tiny.llama(vocab_size=64), *drafts) == []


@pytest.mark.tools
def test_what_is_chosen_is_read_from_the_file_beside_the_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, file = _writing_few().float(), tmp_path / "vocabulary.json"
    name = f"int8+vocab:{file}"

    def confirm(base: Any, candidates: dict[str, Any], *others: Any) -> list[Confirmed]:
        return [Confirmed(name, Estimate(1.5, 1.5, 1.5), 0.9, 2.0, 1)] if name in candidates else []

    def worth(predictions: Any, drafters: dict[str, Drafter], *others: Any) -> dict[str, Any]:
        return {name: Candidate(drafters[name])}

    monkeypatch.setattr(running, "confirm", confirm)
    monkeypatch.setattr(running, "to_confirm", worth)
    settings = Measurements(max_new_tokens=16, repeats=1, longest_draft=1)
    found = calibrate(model, _prompts(), [EarlyExit(3)], settings, vocabulary=file)
    assert found.greedy.draft == found.sampled.draft == name
    found.save(tmp_path / "profile.json")
    spec = wrap(model, draft=Profile.load(tmp_path / "profile.json"))
    drafted = found.choose_draft(greedy=True).draft
    assert isinstance(drafted, ReducedVocabulary)
    out = spec.generate(tiny.prompt(6), max_new_tokens=20, do_sample=False)
    assert torch.equal(out.sequences, model.generate(tiny.prompt(6), max_new_tokens=20, do_sample=False))
    file.unlink()
    with pytest.raises(ProfileError, match=r"greedy\.draft is not understood .*vocabulary\.json"):
        Profile.load(tmp_path / "profile.json")

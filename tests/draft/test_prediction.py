"""Drafts out of predictions: where they are copied from, what is counted, and that they change speed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY
from helpers.encoder_decoders import FRAMES, MELS, encoder_decoder, whisper
from selfspec.draft import RowVerdict
from selfspec.draft.prediction import Prediction, read_predictions
from selfspec.errors import PromptError, UnsupportedOptionError


def follow(prediction: Prediction, tokens: list[int]) -> list[int]:
    """Commit tokens without a draft, and return what is drafted next."""
    prediction.learn(RowVerdict((), tokens=tokens), 64)
    return prediction.following(4)


def test_a_text_is_followed_through_its_prediction() -> None:
    prediction = Prediction(list(range(20)))
    assert prediction.following(3) == [0, 1, 2]
    assert follow(prediction, [0, 1]) == [2, 3, 4, 5]
    # One token differs, and the next one says where the text goes on.
    assert follow(prediction, [99]) == []
    assert follow(prediction, [3]) == [4, 5, 6, 7]
    # Some of it is left out: two tokens say so.
    assert follow(prediction, [4, 5, 15]) == []
    assert follow(prediction, [16]) == [17, 18, 19]
    assert follow(prediction, [17, 18, 19]) == []


def test_of_several_places_the_nearest_to_the_departure_is_taken() -> None:
    line = [7, 8, 9]
    prediction = Prediction([1, *line, 2, *line, 3, *line, 4])
    assert follow(prediction, [1, *line, 2, 60]) == []
    assert follow(prediction, [7, 8]) == [9, 3, 7, 8]
    # A longer match says more than a near one.
    other = Prediction([1, *line, 2, *line, 3, *line, 4])
    assert follow(other, [1, 60, 3, *line]) == [4]


def test_in_a_text_that_repeats_itself_the_place_goes_on_forwards() -> None:
    line = [1, 2, 3, 4]
    text, old = line * 30, [*line * 10, 5, 6, 7, *line * 10, 8, 9, *line * 10]
    prediction, at, rounds = Prediction(old), 0, 0
    while at < len(text):
        drafted = prediction.following(len(text) - at - 1)
        prediction.propose(drafted)
        held = next((n for n, token in enumerate(drafted) if token != text[at + n]), len(drafted))
        prediction.learn(RowVerdict(drafted, tuple(range(held)), held + 1, text[at : at + held + 1]))
        at, rounds = at + held + 1, rounds + 1
    # Two lines that are no longer there cost a draft each, and a round by which the place is found again.
    assert rounds <= 16
    assert prediction.rejected < 40


def test_accepted_drafts_are_doubled_and_counted() -> None:
    prediction = Prediction(list(range(100)))
    for length in (8, 16, 20, 20):
        drafted = prediction.following(99)
        assert len(drafted) == length
        prediction.propose(drafted)
        run = [*drafted, drafted[-1] + 1]
        prediction.learn(RowVerdict(drafted, tuple(range(length)), length, run), 20)
    assert (prediction.accepted, prediction.rejected) == (64, 0)
    drafted = prediction.following(99)
    prediction.propose(drafted)
    prediction.learn(RowVerdict(drafted, (0, 1), 3, [*drafted[:2], 999]), 20)
    assert (prediction.accepted, prediction.rejected) == (66, 18)
    prediction.learn(RowVerdict((), tokens=(70, 71)), 20)
    assert len(prediction.following(99)) == 8


def test_a_prediction_that_fails_is_drafted_from_ever_more_seldom() -> None:
    prediction, drafts = Prediction(list(range(200)) * 2), 0
    for token in range(200):
        drafted = prediction.following(8)
        drafts += bool(drafted)
        prediction.propose(drafted)
        # The text goes on as predicted wherever nothing is drafted, and never where something is.
        prediction.learn(RowVerdict(drafted, (), 1, [500 + token if drafted else token]), 64)
    assert 3 < drafts < 9


def test_the_draft_of_another_source_is_not_counted() -> None:
    prediction = Prediction([1, 2, 3])
    prediction.propose([1, 2, 3])
    prediction.learn(RowVerdict([1, 5, 3], (0,), 2, [1, 6]), 64)
    assert (prediction.accepted, prediction.rejected) == (0, 0)


@pytest.mark.parametrize("draft", [None, "lookup+exit:1", "suffix", "exit:1"])
@pytest.mark.parametrize("options", [GREEDY, {"do_sample": True, "seed": 5, "accept": "coupled"}])
def test_it_changes_speed_alone(llama: PreTrainedModel, draft: str | None, options: dict[str, Any]) -> None:
    spec, ids = selfspec.wrap(llama, draft), tiny.prompt(6, seed=3)
    plain = selfspec.wrap(llama).generate(ids, max_new_tokens=60, **options)
    new = plain.sequences[0, 6:].tolist()
    edited = [*new[:20], *(3, 4, 5), *new[22:40], *new[43:]]
    out = spec.generate(ids, max_new_tokens=60, prediction=edited, **options)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.predicted_accepted > 30
    assert out.stats.rounds < plain.stats.rounds / 2


@pytest.mark.parametrize(
    "control", [None, 3, selfspec.CostAware(5, nodes=9), selfspec.FixedLength(3, nodes=6)], ids=repr
)
def test_rows_have_predictions_of_their_own(llama: PreTrainedModel, control: Any) -> None:
    spec, ids = selfspec.wrap(llama, "exit:1", draft_length=control), tiny.prompt(6, 3, seed=4)
    options: dict[str, Any] = {"max_new_tokens": 40, "seed": 1, "accept": "coupled", "do_sample": True}
    plain = selfspec.wrap(llama).generate(ids, num_return_sequences=2, **options)
    predictions = [plain.sequences[0, 6:], None, plain.sequences[4, 6:].tolist()]
    out = spec.generate(ids, num_return_sequences=2, prediction=predictions, **options)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.predicted_accepted > 0
    assert spec.generate(ids, num_return_sequences=2, **options).stats.predicted == 0


def test_transformers_hands_it_over(llama: PreTrainedModel) -> None:
    ids, spec = tiny.prompt(6, seed=3), selfspec.wrap(llama)
    plain = llama.generate(ids, max_new_tokens=30, do_sample=False)
    out = llama.generate(
        ids,
        max_new_tokens=30,
        do_sample=False,
        custom_generate=spec,
        return_dict_in_generate=True,
        prediction=plain[0, 6:],
    )
    assert torch.equal(out.sequences, plain)
    assert out.stats.predicted_accepted > 20


def test_the_text_of_a_decoder_is_predicted() -> None:
    ids, model = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(3)), encoder_decoder("bart")
    plain = model.generate(ids, max_new_tokens=20, do_sample=False)
    spec = selfspec.wrap(model, "lookup")
    out = spec.generate(ids, max_new_tokens=20, do_sample=False, prediction=list(plain[:, 1:]))
    assert torch.equal(out.sequences, plain)
    assert out.stats.predicted_accepted > 10


def test_speech_that_is_read_in_pieces_goes_on_in_its_prediction() -> None:
    model = whisper()
    heard = torch.randn(1, MELS, 3 * FRAMES, generator=torch.Generator().manual_seed(1))
    asked: dict[str, Any] = {"input_features": heard, "return_timestamps": True}
    asked["attention_mask"] = torch.ones(1, 3 * FRAMES, dtype=torch.long)
    plain = model.generate(**asked)
    spec = selfspec.wrap(model)
    out = spec.generate(**asked, prediction=plain[0])
    assert torch.equal(out.sequences, plain)
    assert 0 < out.stats.predicted_accepted <= out.stats.predicted
    with pytest.raises(UnsupportedOptionError, match="several rows in pieces"):
        spec.generate(input_features=torch.cat([heard, heard])[..., :FRAMES], prediction=[1, 2])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("text", "needs the model's tokenizer"),
        ([[1], [2]], "2 for 3 prompts"),
        ([1.5, 2.5, 3.5], "must be a text or token ids"),
        ([[1], None, {"a": 1}], "must be a text or token ids"),
        ([1, 24], "token id 24 is outside the vocabulary 0..23"),
    ],
)
def test_what_is_no_prediction_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises((UnsupportedOptionError, PromptError), match=said):
        read_predictions(given, 3, 1, 24, None)

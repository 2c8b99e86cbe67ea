"""Predictions of what is to be generated, and the place that a text has reached in its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.arguments import is_whole, shown
from selfspec.draft.draft import RowVerdict
from selfspec.errors import PromptError, UnsupportedOptionError

PredictedText = str | Sequence[int] | Tensor
"""A text that is predicted, or its token ids, `[tokens]`."""

AnyPrediction = PredictedText | Sequence[PredictedText | None] | None
"""A prediction for all prompts, or one for each (None: nothing)."""

LONGEST = 64
"""The most tokens of a draft out of a prediction."""

# Tokens drafted at first and after a rejection; accepted drafts double them.
_FIRST = 8
# A draft pays if one of so many tokens is accepted, and after one that does not, the text must agree for longer.
_PAYS, _LONGEST_WAIT = 8, 64
# Tokens since the text left its prediction by which its place is found again: the longest match of at least two, or of
# one a few tokens behind the place where it left, as after a word that is another one.
_FEWEST, _MOST, _NEAR = 2, 16, 4
# Tokens that must agree behind a place that was found: fewer may do so by chance.
_SURE = 4


class Prediction:
    """Holds the predicted tokens of one row's new text, and the place that the text has reached in them.

    Where the text leaves the prediction, its place is found again by the longest match of what it says from there on:
    the next one behind the place where it left, else the nearest before it. Edits go on in the order of the text, and
    code repeats itself. After a draft that did not pay, more tokens must agree before the next one. Rows keep their
    predictions when they join or leave a batch.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.accepted = self.rejected = 0  # draft tokens out of the prediction that were committed, and rejected
        self._matched = self._needed = 0  # tokens before the place that agree, and that have to for a draft
        self._tokens = np.asarray(tokens, dtype=np.int64)
        self._place: int | None = 0
        self._left_at = self._agreed = 0  # where the text left, and tokens that agreed since its place was found
        self._since: list[int] = []
        self._length = _FIRST
        self._proposed: Sequence[int] = ()

    def following(self, most: int) -> list[int]:
        """Return the tokens to draft next, at most `most`; none where the text's place is not sure."""
        if self._place is None or self._matched < self._needed:
            return []
        found: list[int] = self._tokens[self._place : self._place + min(self._length, max(most, 0))].tolist()
        return found

    def propose(self, tokens: Sequence[int]) -> None:
        """Remember the draft of a round, to learn from its verdict."""
        self._proposed = tokens

    def learn(self, verdict: RowVerdict, longest: int = LONGEST) -> None:
        """Follow the tokens that a round commits; a draft that was accepted whole is doubled, up to `longest`."""
        proposed, self._proposed = self._proposed, ()
        # Another draft may have been taken.
        if proposed and list(verdict.drafted[: len(proposed)]) == list(proposed):
            held = min(len(verdict.path), len(proposed))
            self.accepted += min(held, verdict.accepted_of(len(verdict.tokens)))
            self.rejected += len(proposed) - held
            self._length = min(2 * self._length, longest) if held == len(proposed) else _FIRST
            self._needed = 0 if _PAYS * held >= len(proposed) else min(2 * self._needed + _FEWEST, _LONGEST_WAIT)
        for token in verdict.tokens:
            place = self._place
            if place is not None and place < len(self._tokens) and self._tokens[place] == token:
                self._place, self._matched, self._agreed = place + 1, self._matched + 1, self._agreed + 1
            elif place is not None:
                if self._agreed >= _SURE:
                    self._left_at, self._since = place, []
                self._place, self._matched = None, 0
            self._since = [*self._since, token][-_MOST:]
        if self._place is None:
            self._find()

    def _find(self) -> None:
        """Find the place behind the longest match of what the text says since it left."""
        tokens, since = self._tokens, self._since
        places = np.flatnonzero(tokens[:-1] == since[-1]) + 1
        length = 0
        while len(places):
            length += 1
            best, self._matched = places, length
            if length == len(since):
                break
            places = places[places > length]
            places = places[tokens[places - 1 - length] == since[-1 - length]]
        if not length:
            return
        place = min(best.tolist(), key=lambda place: (place <= self._left_at, abs(place - self._left_at)))
        if self._matched >= _FEWEST or (len(since) > 1 and 0 < place - self._left_at <= _NEAR):
            self._place, self._agreed = int(place), 0


def read_predictions(
    given: PredictedText | Sequence[PredictedText | None],
    prompts: int,
    repeated: int,
    vocabulary: int,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[Prediction | None]:
    """Read what is predicted of all prompts, or of each of them; each prompt has `repeated` rows.

    Raises UnsupportedOptionError if it is neither text nor token ids, there is no tokenizer for a text, or there is not
    one for each prompt, and PromptError for a token id outside the vocabulary.
    """
    listed: Any = given.tolist() if isinstance(given, Tensor) else given
    several = isinstance(listed, list | tuple) and not all(map(is_whole, listed))
    each: Sequence[Any] = listed if several else [listed] * prompts
    if len(each) != prompts:
        raise UnsupportedOptionError(
            f"prediction: {len(each)} for {prompts} prompts; pass one for all, or a list of one for each (None: none)"
        )
    ids = [None if one is None else _ids(one, vocabulary, tokenizer) for one in each]
    return [None if one is None else Prediction(one) for one in ids for _ in range(repeated)]


def _ids(one: Any, vocabulary: int, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(one, str):
        if tokenizer is None:
            raise UnsupportedOptionError(
                "prediction: a text needs the model's tokenizer; pass tokenizer=... as well, or token ids"
            )
        ids: list[int] = tokenizer(one, add_special_tokens=False).input_ids
        return ids
    ids = one.tolist() if isinstance(one, Tensor) else one
    if not isinstance(ids, list | tuple) or not all(map(is_whole, ids)):
        raise UnsupportedOptionError(f"prediction must be a text or token ids, got {shown(one)}")
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise PromptError(f"prediction: token id {wrong} is outside the vocabulary 0..{vocabulary - 1}")
    return list(ids)

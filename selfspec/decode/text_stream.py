"""Turn token ids into text, piece by piece; the pieces joined are the whole text."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A token for one byte of a character. The text of a run of such tokens is known only at its end.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TextStream:
    """Turns the tokens after a prompt into text as they come, with special tokens written out or left out.

    A piece is returned once no later token can change it: a character of several tokens comes with its last token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._left_out = frozenset(() if special else tokenizer.all_special_ids)
        self._ids = list(prompt)
        self._context = 0
        self._given = len(self._ids)

    def push(self, tokens: Sequence[int]) -> str:
        """Take tokens; return the text that is now certain, which may be empty."""
        self._ids += tokens
        fresh = self._fresh()
        return self._give(fresh) if self._certain(fresh) else ""

    def finish(self) -> str:
        """Return the rest of the text, when no more tokens come."""
        return self._give(self._fresh())

    @property
    def whole_characters(self) -> str:
        """Text not yet returned, as if no more tokens came, without an unfinished character."""
        return self._fresh().rstrip(_REPLACEMENT) if self._given < len(self._ids) else ""

    def foresee(self, tokens: Sequence[int]) -> str:
        """Return the text that `tokens` would add if they came next and were the last."""
        other = copy.copy(self)
        other._ids = [*self._ids, *tokens]
        return other._fresh().removeprefix(self._fresh())

    def _fresh(self) -> str:
        """Return the text of all tokens that are not returned yet."""
        # Many tokenizers drop the space at the beginning of a text, so decode after some context.
        before, new = self._ids[self._context : self._given], self._ids[self._given :]
        return continuation(self._tokenizer, before, new, self._special)

    def _give(self, fresh: str) -> str:
        # Without new text the old context stays: only it shows that a text has begun.
        if fresh:
            self._context, self._given = self._given, len(self._ids)
        return fresh

    def _certain(self, fresh: str) -> bool:
        """Return whether no later token can change the text."""
        latest = next((token for token in reversed(self._ids) if token not in self._left_out), None)
        name = "" if latest is None else self._tokenizer.convert_ids_to_tokens(latest)
        within_bytes = isinstance(name, str) and _BYTE_TOKEN.fullmatch(name) is not None
        return not within_bytes and not fresh.endswith(_REPLACEMENT)


def continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: Sequence[int], special: bool = False
) -> str:
    """Return the text of `new` after `prompt`, with or without special tokens."""
    # Cut it from the whole text, since tokens decoded alone may lose their first space.
    known, whole = (
        str(tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))
        for ids in (prompt, [*prompt, *new])
    )
    # A character that begins in the prompt and ends in the new tokens belongs to the new tokens.
    if not whole.startswith(known):
        known = known.rstrip(_REPLACEMENT)
    return whole[len(known) :]


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Count what two texts, or two lists or tuples of tokens, both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low

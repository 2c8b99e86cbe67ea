"""Token ids to text, piece by piece; all pieces together are the text of the whole."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A token that stands for one byte of a character. What a run of them means is known only at its end.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TextStream:
    """Text of the tokens after a prompt, as they come. Special tokens are left out.

    A piece is given out once no later token can change it: characters of several tokens come with their last token.
    Each step decodes the latest tokens alone, with those before them for context, because many tokenizers drop the
    space at the beginning of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._ids = list(prompt)
        self._context = 0
        self._given = len(self._ids)

    def push(self, tokens: Sequence[int]) -> str:
        """Take tokens; return the text that is now certain, which may be empty."""
        self._ids += tokens
        if self._within_a_character():
            return ""
        fresh = self._fresh()
        return "" if fresh.endswith(_REPLACEMENT) else self._give(fresh)

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        return self._give(self._fresh())

    def foresee(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` would have added if they had come and been the last."""
        other = copy.copy(self)
        other._ids = [*self._ids, *tokens]
        return other._fresh().removeprefix(self._fresh())

    def _fresh(self) -> str:
        return continuation(self._tokenizer, self._ids[self._context : self._given], self._ids[self._given :])

    def _give(self, fresh: str) -> str:
        # Without any text the old context stays: it alone tells that a text has begun.
        if fresh:
            self._context, self._given = self._given, len(self._ids)
        return fresh

    def _within_a_character(self) -> bool:
        latest = next((token for token in reversed(self._ids) if token not in self._special), None)
        name = "" if latest is None else self._tokenizer.convert_ids_to_tokens(latest)
        return isinstance(name, str) and _BYTE_TOKEN.fullmatch(name) is not None


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of `new` after `prompt`, without special tokens.

    It is cut from the whole, since a text decoded alone may lose its first space.
    """
    known, whole = (
        str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for ids in (prompt, [*prompt, *new])
    )
    return whole[len(known) :]

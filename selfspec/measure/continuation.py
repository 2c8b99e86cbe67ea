"""A text to judge drafts on, and where judging begins."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Continuation:
    """A text and where drafts would begin to be judged on it.

    Attributes:
        ids: token ids, `[1, tokens]`.
        prompt: tokens of the prompt, at least 1; the tokens after them are judged.
    """

    ids: Tensor
    prompt: int = 1

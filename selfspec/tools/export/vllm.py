"""Drafts of vLLM's requests without a model: look-ups in their own text, as a class that vLLM imports by its name.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "selfspec.tools.export.vllm.LookUps", "num_speculative_tokens": 8}'

vLLM makes the class in each of its workers and asks it for drafts after each step. All workers get the same texts, so
all give the same drafts. Its interface is experimental there; this is the one of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.prompt_lookup import PromptLookup
from selfspec.draft.suffix_index import SuffixIndex


class LookUps:
    """Proposes what followed the last time that a request's text ended as it does now; see `PromptLookup`.

    For other match lengths derive a class in a module of yours, and name that.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Attributes:
        shortest: tokens of the shortest match that counts.
        longest: tokens up to which matches are indexed.
    """

    shortest: int = PromptLookup.shortest
    longest: int = PromptLookup.longest

    def __init__(self, vllm_config: Any) -> None:
        # Refuses match lengths that make no sense.
        PromptLookup(self.shortest, self.longest)
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._context: int = vllm_config.model_config.max_model_len
        self._texts: dict[int, _Text] = {}

    def load_model(self, *args: Any, **options: Any) -> None:
        """Load nothing: vLLM asks every drafter to."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Propose tokens for each request of a step.

        Args:
            sampled_token_ids: what each request's text just gained; nothing while its prompt is being read.
            num_tokens_no_spec: tokens of each text, `[requests or more]`.
            token_ids_cpu: the texts, `[requests or more, context]`.
            slot_mappings: not used.

        Returns:
            Drafts, at most `num_speculative_tokens` each; none where nothing is found.
        """
        # vLLM moves requests to other rows, and says no more of them than their text.
        before, self._texts = self._texts, {}
        drafts: list[list[int]] = []
        for row, gained in enumerate(sampled_token_ids):
            tokens = token_ids_cpu[row, : num_tokens_no_spec[row]]
            text = _taken(before, row, tokens) or _Text(SuffixIndex(self.shortest, self.longest))
            self._texts[row] = text
            text.follow(tokens)
            room = min(self._most, self._context - len(tokens) - 1)
            drafts.append(text.draft(room) if gained and room > 0 else [])
        return drafts


class _Text:
    """A request's text as far as it was seen, and where its suffixes were."""

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index
        self._tokens: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self._tokens)

    def begins(self, tokens: NDArray[np.int32]) -> bool:
        """Whether a text begins with this one."""
        return len(self._tokens) <= len(tokens) and bool((tokens[: len(self._tokens)] == self._tokens).all())

    def follow(self, tokens: NDArray[np.int32]) -> None:
        """Take in what is new."""
        self._index.extend(tokens[len(self._tokens) :].tolist())
        self._tokens = tokens.copy()

    def draft(self, length: int) -> list[int]:
        """What followed where the text ended so before; nothing if it never did."""
        match = self._index.find()
        return [] if match is None else list(self._index.after(match, length))


def _taken(texts: dict[int, _Text], row: int, tokens: NDArray[np.int32]) -> _Text | None:
    """Take out the text that another one goes on from: the one of its row, if that does, or the longest."""
    if row in texts and texts[row].begins(tokens):
        return texts.pop(row)
    fitting = [place for place, text in texts.items() if text.begins(tokens)]
    return texts.pop(max(fitting, key=lambda place: texts[place].length)) if fitting else None

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

from selfspec.draft.prompt_lookup import PromptLookup, following, last_match


class LookUps:
    """Proposes what followed the last time that a request's text ended as it does now; see `PromptLookup`.

    For other match lengths derive a class in a module of yours, and name that.
    """

    shortest: int = PromptLookup.shortest
    longest: int = PromptLookup.longest

    def __init__(self, vllm_config: Any) -> None:
        # Refuses match lengths that make no sense.
        PromptLookup(self.shortest, self.longest)
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._context: int = vllm_config.model_config.max_model_len

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
        drafts: list[list[int]] = []
        for row, gained in enumerate(sampled_token_ids):
            tokens = token_ids_cpu[row, : num_tokens_no_spec[row]]
            room = min(self._most, self._context - len(tokens) - 1)
            match = last_match(tokens, self.shortest, self.longest) if gained and room > 0 else None
            drafts.append([] if match is None else following(tokens, match, room))
        return drafts

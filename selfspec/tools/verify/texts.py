"""Texts of a wrapped model: sampled ones, and given ones read through the passes that verify drafts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from selfspec.accept import TokenLevel
from selfspec.accept.tree_paths import at_parents
from selfspec.api import SelfSpeculative
from selfspec.draft import Draft


def sampled_texts(
    spec: SelfSpeculative,
    ids: Tensor,
    rule: str,
    new_tokens: int,
    *,
    temperature: float = 1.0,
    seed: int,
    mask: Tensor | None = None,
) -> list[list[int]]:
    """Sample the new tokens of each of the prompts, `[rows, prompt]`, with no filter that takes tokens away."""
    output = spec.generate(
        ids,
        torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        seed=seed,
        accept=rule,
    )
    new = output.sequences[:, ids.shape[1] :].tolist()
    return [row[:length] for row, length in zip(new, output.lengths, strict=True)]


def forced_logits(spec: SelfSpeculative, prompt: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits of each new token of a text, by the passes that verify drafts of it.

    Drafts are made to say what the text says, pass by pass as in any generation, and all of them are accepted. A
    drafter that does not choose its tokens by logits says what it would have said.

    Returns:
        The target's own, `[new tokens, vocab]`, float32.
    """
    output = spec.generate(
        prompt,
        torch.ones_like(prompt),
        max_new_tokens=len(tokens),
        do_sample=False,
        accept=_Dictated(),
        logits_processor=LogitsProcessorList([_Dictation([*prompt[0].tolist(), *tokens])]),
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert output.logits is not None
    return torch.cat(output.logits)


class _Dictation(LogitsProcessor):
    """Leaves one token at each place: that of a text, which is given with its prompt."""

    # selfspec then asks it about draft tokens, too.
    stateless = True

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        dictated = torch.full_like(scores, -torch.inf)
        dictated[:, self._text[input_ids.shape[1]]] = 0.0
        return dictated


class _Dictated(TokenLevel):
    """Commits what a one-hot p says, so that no rule under test has a hand in it."""

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        return at_parents(p, draft.tree).gather(-1, draft.tokens[..., None])[..., 0]

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        return p[torch.arange(p.shape[0], device=p.device), place]

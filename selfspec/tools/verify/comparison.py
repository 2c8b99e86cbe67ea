"""Texts by selfspec's passes, compared with the model's own: where they part, and how nearly tied their tokens were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from selfspec.accept import TokenLevel
from selfspec.accept.tree_paths import at_parents
from selfspec.api import SelfSpeculative
from selfspec.draft import Draft
from selfspec.measure.rounding import Bound


class Check(StrEnum):
    """A kind of comparison."""

    FREE_RUNNING = "free-running"
    TEACHER_FORCED = "teacher-forced"
    COUPLED = "coupled"
    PLAIN = "beside plain decoding"


@dataclass(frozen=True)
class Divergence:
    """One place where tokens are not equal; None stands for a text that had ended, or no rule.

    `gap` is the distance of the two from a tie, in logits: greedily the difference of their logits, in coupled sampling
    what one of them would have to rise by for the noise to choose the other.
    """

    check: Check
    draft: str
    rule: str | None
    prompt: int
    position: int
    expected: int | None
    found: int | None
    gap: float | None

    def is_near_tie(self, bound: Bound) -> bool:
        """Return whether rounding explains it."""
        return self.gap is not None and self.gap <= bound.near_tie

    def to_dict(self, bound: Bound) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {**asdict(self), "near_tie": self.is_near_tie(bound)}


@dataclass
class Comparison:
    """Texts compared with the model's own under a rule; None where nothing is accepted or rejected."""

    check: Check
    draft: str
    rule: str | None = None
    texts: int = 0
    tokens: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def equal_texts(self) -> int:
        """Number of texts without any difference, where each is compared until it parts."""
        return self.texts - len(self.divergences)

    @property
    def equal_tokens(self) -> int:
        """Number of tokens that are the model's own."""
        return self.tokens - len(self.divergences)

    def add(self, prompt: int, expected: Sequence[int], found: Sequence[int], gap: Callable[[int], float]) -> None:
        """Compare one more text, token by token: until it parts, or where the text is forced, to the end.

        `gap` is asked for the gap at an index where they differ, if both have a token there.
        """
        self.texts += 1
        for position, (own, other) in enumerate(zip_longest(expected, found)):
            self.tokens += 1
            if own != other:
                tie = None if own is None or other is None else gap(position)
                self.divergences.append(
                    Divergence(self.check, self.draft, self.rule, prompt, position, own, other, tie)
                )
                if self.check is not Check.TEACHER_FORCED:
                    return

    def to_dict(self) -> dict[str, int]:
        """Counts, ready for JSON. Divergences are listed by the report."""
        return {"texts": self.texts, "equal_texts": self.equal_texts, "tokens": self.tokens}


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
    """Return the logits of each new token of a text, `[new tokens, vocab]`, by passes that verify drafts of it.

    Drafts are made to propose the text, pass by pass as in any generation, and all of them are accepted. A drafter that
    does not choose its tokens by logits proposes what it would have proposed.
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
    """Commits the token of a one-hot p, so that no rule under test has a hand in it."""

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        return at_parents(p, draft.tree).gather(-1, draft.tokens[..., None])[..., 0]

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        return p[torch.arange(p.shape[0], device=p.device), place]

"""Teacher forcing through THE loop: drafts are made to say what a text says, and every position's logits are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from selfspec.accept.tree_paths import first_path
from selfspec.api import wrap
from selfspec.cache.tree import Tree
from selfspec.control import Budget
from selfspec.decode.batch import Batch
from selfspec.decode.noise import Noise
from selfspec.decode.processors import Warping
from selfspec.decode.sampling import Sampling
from selfspec.draft import Draft, Drafter
from selfspec.model.adapter import Adapter


class Dictation(Noise):
    """Noise that chooses the token of a text at each place.

    Args:
        text: token ids of the one row, prompt included, `[length]`.
    """

    def __init__(self, text: Tensor) -> None:
        super().__init__(0, [0], text.device)
        self._text = text

    def choose(self, weights: Tensor, positions: Tensor) -> Tensor:
        """The text's token of each place, `[1, tokens]`."""
        return self._text[positions]


class DictatedDrafter(Drafter):
    """Lets a drafter draft as it does in the loop, pass by pass, but say what a text says.

    A drafter that does not choose its tokens by the state's sampling says what it would have said.

    Args:
        drafter: what drafts.
        text: token ids of the one row, prompt included, `[length]`.
    """

    def __init__(self, drafter: Drafter, text: Tensor) -> None:
        self._drafter = drafter
        self._dictated = Sampling(Warping(LogitsProcessorList()), greedy=False, coupled=True)
        self._dictation = Dictation(text)

    def check(self, depth: int) -> None:
        self._drafter.check(depth)

    def propose(self, batch: Batch, budget: Budget) -> Draft:
        draft = self._drafter.propose(replace(batch, sampling=self._dictated, noise=self._dictation), budget)
        return Draft(draft.tokens, draft.tree, None, draft.resume)


class DictatedRule:
    """Commits a text, whatever the target says, and keeps the target's logits. For one generation of one row.

    Args:
        tokens: the new tokens of the text.

    Attributes:
        logits: of each new token, `[tokens of a round, vocab]`, round by round.
    """

    lossless = False
    couples = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self.logits: list[Tensor] = []
        self._tokens = tokens
        self._committed = 0
        self._judged: Tensor

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        """1 where a draft token is the text's, else 0, `[1, drafted]`."""
        self._judged = logits[0]
        tokens = draft.tokens
        expected = self._tokens[self._committed : self._committed + tokens.shape[1]]
        return (tokens == torch.tensor([expected], device=tokens.device, dtype=torch.long)).to(p.dtype)

    def accepted(self, mask: Tensor, tree: Tree) -> Tensor:
        """Place of the last node on the path of first accepted children, `[1]`."""
        return first_path(mask, tree)

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        """One-hot at the text's token after the accepted ones, `[1, vocab]`."""
        accepted = int(place.item())
        upcoming = self._tokens[self._committed + accepted]
        # Without finite logits the loop commits no token here: the next round judges the place again.
        committed = accepted + int(self._judged[accepted].amax().isfinite().item())
        self.logits.append(self._judged[:committed])
        self._committed += committed
        return torch.zeros_like(p[:, 0]).index_fill_(-1, place.new_tensor([upcoming]), 1.0)


def forced_logits(
    model: PreTrainedModel,
    adapter: Adapter,
    drafter: Drafter | None,
    draft_length: int,
    prompt: Tensor,
    tokens: Sequence[int],
) -> Tensor:
    """Logits of each new token of a text, by the passes that selfspec makes to verify drafts of it.

    Args:
        model: the stock model.
        adapter: where its layers are.
        drafter: what drafts; None decodes plainly.
        draft_length: tokens drafted each round.
        prompt: `[1, prompt]`.
        tokens: the new tokens of the text.

    Returns:
        `[new tokens, vocab]`.

    Raises:
        NonFiniteLogitsError: logits became NaN or infinite.
    """
    text = torch.cat([prompt[0], torch.tensor(list(tokens), device=prompt.device)])
    dictated = None if drafter is None else DictatedDrafter(drafter, text)
    rule = DictatedRule(tokens)
    spec = wrap(model, draft=dictated, draft_length=draft_length, accept=rule, adapter=adapter)
    spec.generate(prompt, max_new_tokens=len(tokens), do_sample=False)
    return torch.cat(rule.logits)

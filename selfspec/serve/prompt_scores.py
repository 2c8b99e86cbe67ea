"""Log-probabilities of a prompt's own tokens, for `echo`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from selfspec.decode.logprobs import TokenLogprobs
from selfspec.model.stock_passes import block_logits

# The most places whose logits are in memory at once.
_AT_ONCE = 128


@torch.no_grad()
def prompt_logprobs(model: PreTrainedModel, prompt: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Read a prompt with the stock model.

    Args:
        model: that answers.
        prompt: its tokens.
        top: likeliest tokens to report at each place.

    Returns:
        Of each token but the first.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([list(prompt)], device=device)
    found: list[TokenLogprobs] = []
    following = ids[0, 1:].split(_AT_ONCE)
    for tokens, logits in zip(following, block_logits(model, ids.split(_AT_ONCE, 1)), strict=False):
        scores = logits[: len(tokens)].float().log_softmax(-1)
        own = scores.gather(1, tokens[:, None])[:, 0].tolist()
        best = scores.topk(min(max(top, 1), scores.shape[1]))
        for value, likeliest, values in zip(own, best.indices.tolist(), best.values.tolist(), strict=True):
            found.append(TokenLogprobs(value, tuple(zip(likeliest, values, strict=True))[:top]))
    return found

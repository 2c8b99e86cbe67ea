"""Log-probabilities of a prompt's own tokens, for `echo`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from selfspec.compat import over_cache
from selfspec.decode.rows.logprobs import TokenLogprobs

# Logits of so many places are in memory at once.
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
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    found: list[TokenLogprobs] = []
    for begin in range(0, ids.shape[1] - 1, _AT_ONCE):
        block, following = ids[:, begin : begin + _AT_ONCE], ids[0, begin + 1 : begin + _AT_ONCE + 1]
        logits = model(block, **over_cache(model, cache)).logits[0, : len(following)]
        scores = logits.float().log_softmax(-1)
        own = scores.gather(1, following[:, None])[:, 0].tolist()
        best = scores.topk(min(max(top, 1), scores.shape[1]))
        for value, tokens, values in zip(own, best.indices.tolist(), best.values.tolist(), strict=True):
            found.append(TokenLogprobs(value, tuple(zip(tokens, values, strict=True))[:top]))
    return found

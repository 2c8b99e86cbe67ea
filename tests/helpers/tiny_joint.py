"""A network that costs nothing, and the exact joint of three of its tokens."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from helpers import tiny
from helpers.joints import Warp

PROMPT = (1, 2)


ROWS, BATCHES = 8192, 4


TOKENS = 3


def network(seed: int = 0, width: int = 8) -> PreTrainedModel:
    """Two layers of a small width over five tokens: thousands of rows a second."""
    return tiny.llama(
        vocab_size=5,
        num_hidden_layers=2,
        hidden_size=width,
        intermediate_size=width,
        num_attention_heads=1,
        num_key_value_heads=1,
        initializer_range=0.6,
        seed=seed,
    )


@torch.no_grad()
def joint(model: PreTrainedModel, warp: Warp) -> dict[tuple[int, ...], float]:
    """Probability of every text of `TOKENS` tokens, from plain forward passes."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        logits = model(torch.tensor([PROMPT + text for text in texts])).logits[:, -1]
        texts = {
            (*text, token): chance * probability
            for (text, chance), scores in zip(texts.items(), logits, strict=True)
            for token, probability in enumerate(warp.distribution(scores))
        }
    return texts

"""Committed tokens handed to a streamer of `transformers`, as plain decoding would hand them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

import torch
from torch import Tensor
from transformers.generation import BaseStreamer

from selfspec.decode.output import Round


def streamed(
    rounds: Generator[Round, None, None], prompt: Tensor, streamer: BaseStreamer
) -> Generator[Round, None, None]:
    """The same rounds, each told to a streamer first: the prompt, then token by token, and at last the end.

    The end is told however the rounds end, so that nobody waits for text that does not come.

    Args:
        rounds: of one row; closed when this is.
        prompt: `[1, prompt]`, padding included.
        streamer: gets the prompt `[1, prompt]` and tokens `[1]`, on the CPU.

    Yields:
        What each round committed.
    """
    with closing(rounds):
        try:
            streamer.put(prompt.cpu())
            for committed in rounds:
                for token in committed.tokens:
                    streamer.put(torch.tensor([token]))
                yield committed
        finally:
            streamer.end()

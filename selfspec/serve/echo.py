"""What `echo` gives back of a prompt: its text, what each token wrote of it, and how likely each was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.decode.logprobs import TokenLogprobs
from selfspec.decode.text_stream import TextStream
from selfspec.model.stock_passes import block_logits

# The most places whose logits are in memory at once.
_AT_ONCE = 128


@dataclass(frozen=True)
class PromptText:
    """The text of a prompt.

    Attributes:
        text: as the client sent it; of token ids, what they say, special tokens written out.
        pieces: what each token wrote of it, side by side from the first letter on. A character of several tokens
            belongs to the last; what the tokenizer puts around a text is not in it.
    """

    text: str
    pieces: tuple[str, ...]


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int]) -> PromptText:
    """Read a prompt: text, or token ids."""
    if isinstance(prompt, str) and tokenizer.is_fast:
        spans = tokenizer(prompt, return_offsets_mapping=True).offset_mapping
        return PromptText(prompt, _cut(prompt, spans))
    # Tokenizers in Python do not say where in a text a token stands.
    ids = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
    stream = TextStream(tokenizer, (), special=not isinstance(prompt, str))
    pieces = [piece for token in ids for piece in stream.push_apart([token])] + stream.finish_apart()
    return PromptText("".join(pieces), tuple(pieces))


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Cut a text into what each token wrote: up to its end, but no further than where the next one begins."""
    pieces, at = [], 0
    for index, (start, end) in enumerate(spans):
        if start == end:
            # It stands for nothing in the text.
            pieces.append("")
            continue
        following = next((begin for begin, until in spans[index + 1 :] if until > begin), end)
        until = max(at, min(end, following))
        pieces.append(text[at:until])
        at = until
    return tuple(pieces)


@torch.no_grad()
def prompt_logprobs(model: PreTrainedModel, prompt: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Read a prompt with the stock model: of each token but the first, its log-probability and the `top` likeliest."""
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

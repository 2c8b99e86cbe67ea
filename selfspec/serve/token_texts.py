"""What tokens are as text and as bytes, alone and in a prompt, and how likely those of a prompt are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from selfspec.decode.output import TokenLogprobs
from selfspec.decode.text_stream import TextStream, continuation
from selfspec.model.identity import weight_of
from selfspec.model.stock_passes import block_logits

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The letters in which byte-level vocabularies write bytes.
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
# The most places whose logits are in memory at once.
_AT_ONCE = 128


class TokenTexts:
    """Bytes and text of tokens, each computed once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        # Text in front of a token: decoded alone, a token may lose its first space.
        self._before: list[int] = tokenizer("a", add_special_tokens=False).input_ids
        self._known: dict[int, bytes] = {}

    def raw(self, token: int) -> bytes:
        """The bytes of a token's text."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def text(self, token: int) -> str:
        """Its text; what is no whole character is replaced."""
        return self.raw(token).decode("utf-8", errors="replace")

    def _read(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None or token in self._special:
            return str(name or "").encode()
        byte = _BYTE_TOKEN.fullmatch(name)
        if byte:
            return bytes([int(byte[1], 16)])
        text = continuation(self._tokenizer, self._before, [token])
        if _REPLACEMENT in text and all(letter in _BYTES for letter in name):
            return bytes(_BYTES[letter] for letter in name)
        return text.encode()


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
    """Read a prompt with the stock model: of each token but the first, its log-probability and the `top` likeliest.

    A token that the model reads and its head cannot write has a log-probability of -inf.
    """
    device = weight_of(model.get_input_embeddings()).device
    ids = torch.tensor([list(prompt)], device=device)
    found: list[TokenLogprobs] = []
    following = ids[0, 1:].split(_AT_ONCE)
    for tokens, logits in zip(following, block_logits(model, ids.split(_AT_ONCE, 1)), strict=False):
        scores = logits[: len(tokens)].float().log_softmax(-1)
        # One more place, for all that the head does not know.
        known = pad(scores, (0, 1), value=-torch.inf)
        own = known.gather(1, tokens[:, None].clamp(max=scores.shape[1]))[:, 0].tolist()
        best = scores.topk(min(max(top, 1), scores.shape[1]))
        for value, likeliest, values in zip(own, best.indices.tolist(), best.values.tolist(), strict=True):
            found.append(TokenLogprobs(value, tuple(zip(likeliest, values, strict=True))[:top]))
    return found

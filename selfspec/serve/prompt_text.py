"""A prompt as `echo` gives it back: its text, and what each token wrote of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from selfspec.decode.text_stream import TextStream


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

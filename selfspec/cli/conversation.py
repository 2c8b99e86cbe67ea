"""A conversation over one cache: a turn reads what it has not read before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from selfspec.api import SelfSpeculative
from selfspec.cache.transfer import past_length
from selfspec.decode.generation import Generation
from selfspec.decode.output import Stats
from selfspec.decode.text_stream import TextStream, shared_length
from selfspec.errors import PromptError
from selfspec.model.positions import boundaries
from selfspec.serve.chat.template import ChatTemplate


@dataclass(frozen=True)
class _Read:
    """Tokens that were read, and the cache of their keys and values: one object, so that no interrupt parts them."""

    cache: DynamicCache = field(default_factory=DynamicCache)
    tokens: list[int] = field(default_factory=list)


class Conversation:
    """Messages, and the keys and values of all that was read and written.

    Each turn's prompt is the whole conversation as the template writes it; the cache keeps the tokens that it shares
    with the turn before, so only the others are read. A template that leaves something of earlier turns out, or a text
    that is cut into other tokens than the model wrote it in, costs no more than the tokens from there on.

    `system` is the first message, if any. An answer has at most `max_new_tokens`, or what the context has room for.
    `options` are further keywords of `spec.stream`, without `seed`, `max_new_tokens` and caches.
    """

    def __init__(
        self,
        spec: SelfSpeculative,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        system: str | None,
        max_new_tokens: int,
        options: Mapping[str, Any],
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._template = template
        self._system = system
        self._max_new_tokens = max_new_tokens
        self._options = dict(options)
        config = spec.config.get_text_config(decoder=True)
        limit = None if spec.limits is None else spec.limits.context
        sizes = [getattr(config, "max_position_embeddings", None), limit]
        # The most tokens of a conversation and an answer.
        self._context: int | None = min((size for size in sizes if size is not None), default=None)
        self._boundaries = boundaries(config)
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages: list[dict[str, str]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
        self._read = _Read()

    def ask(self, text: str, seed: int | None = None, prediction: str | None = None) -> ChatTurn:
        """Begin the turn that answers a message: iterate over it for the text, then `close` it. One at a time.

        The answer comes sooner where it is as the `prediction` says. A PromptError: the template refuses the message,
        or the context has no room for an answer.
        """
        question = {"role": "user", "content": text}
        prompt = self._template.prompt([*self.messages, question])
        room = self._max_new_tokens if self._context is None else self._context - len(prompt)
        if room < 1:
            raise PromptError(
                f"the conversation with this message has {len(prompt)} tokens, and the context {self._context}; "
                "start again with /reset, or say less"
            )
        # An answer ends where tables change; the next turn, beyond, reads all anew.
        room = min([room, *(boundary - len(prompt) for boundary in self._boundaries if boundary > len(prompt))])
        self._read = self._keep(prompt)
        ids = torch.tensor([prompt], device=self._spec.device)
        generation = self._spec.stream(
            ids,
            torch.ones_like(ids),
            cache=self._read.cache,
            seed=seed,
            max_new_tokens=min(self._max_new_tokens, room),
            tokenizer=self._tokenizer,
            prediction=prediction,
            **self._options,
        )
        stream = TextStream(self._tokenizer, prompt)
        return ChatTurn(self, generation, question, prompt, len(self._read.tokens), stream)

    def _keep(self, prompt: list[int]) -> _Read:
        """Crop the cache to what the prompt begins with, without its last token."""
        # An interrupt amid the cropping leaves nothing that is half cropped.
        read, self._read = self._read, _Read()
        # The last token is read in any case: the answer follows from it.
        shared = shared_length(read.tokens, prompt[:-1])
        surplus = len(read.tokens) - shared
        # What was read as part of a longer text was rotated for that length.
        if any(shared <= boundary < len(read.tokens) for boundary in self._boundaries):
            return _Read()
        if surplus and all(type(layer) is DynamicLayer for layer in read.cache.layers):
            read.cache.crop(-surplus)
        elif surplus:
            # States cannot go back to what they were some tokens ago.
            return _Read()
        return _Read(read.cache, prompt[:shared])

    def _ended(self, turn: ChatTurn) -> None:
        """Take an answer in."""
        if turn.text:
            self.messages += [turn.question, {"role": "assistant", "content": turn.text}]
        filled, length = turn.prompt + turn.tokens[:-1], past_length(self._read.cache)
        if length == len(filled):
            self._read = _Read(self._read.cache, filled)
        # A turn that broke in a round leaves the cache as it found it; states alone do not say what they have read.
        elif turn.finished or length != len(self._read.tokens) or (turn.tokens and not length):
            self._read = _Read()


@dataclass(eq=False)
class ChatTurn(Iterator[str]):
    """One answer to `question`: its text, piece by piece, as rounds are committed.

    Of the tokens of `prompt`, the conversation up to the answer, `kept` were in the cache before. `finished` is true
    once the answer came to its own end.
    """

    _conversation: Conversation
    _generation: Generation
    question: dict[str, str]
    prompt: list[int]
    kept: int
    _stream: TextStream
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False

    @property
    def stats(self) -> Stats:
        """Counts and, once closed, times."""
        return self._generation.stats

    def __next__(self) -> str:
        """Run a round; return the text that is now certain, which may be empty."""
        try:
            committed = next(self._generation)
        except StopIteration:
            self.finished = True
            raise
        self.tokens += committed.tokens
        piece = self._stream.push(committed.tokens)
        self.text += piece
        return piece

    def close(self) -> str:
        """End the turn here, wherever it is; return the rest of its text. The conversation goes on from it."""
        self._generation.close()
        rest = self._stream.finish()
        self.text += rest
        self._conversation._ended(self)
        return rest

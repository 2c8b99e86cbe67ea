"""The model that is served, and all that answering needs of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.api import SelfSpeculative
from selfspec.decode.logprobs import TokenLogprobs
from selfspec.errors import SelfSpecError
from selfspec.serve.api_error import ApiError, api_error, stopping_error, unknown_model
from selfspec.serve.chat_template import ChatTemplate
from selfspec.serve.engine import Engine
from selfspec.serve.grammar import Grammars
from selfspec.serve.metrics import Metrics
from selfspec.serve.own_thread import in_own_thread
from selfspec.serve.prompt_scores import prompt_logprobs
from selfspec.serve.server_limits import ServerLimits
from selfspec.serve.token_texts import TokenTexts

_Found = TypeVar("_Found")


@dataclass
class Served:
    """A model with its engine.

    Attributes:
        name: clients ask for it by this name.
        engine: runs its rows.
        tokenizer: its own.
        template: writes chats; None: there is none, and chats are refused.
        limits: of requests.
        vocabulary: number of its logits.
        context: the most tokens of a row, prompt included.
        end_tokens: that end an answer.
        scored: the model that reads prompts for `echo` with log-probabilities; None: such requests are refused.
        log_text: whether prompts and answers are written to the log.
        stopping: whether no more requests are taken.
    """

    name: str
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate | None
    limits: ServerLimits
    vocabulary: int
    context: int
    end_tokens: frozenset[int]
    scored: PreTrainedModel | None
    log_text: bool = False
    stopping: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.tokenizer)
        self.grammars = Grammars(self.tokenizer, self.vocabulary, self.end_tokens)
        self.metrics = Metrics(self.name, self.engine.stats)
        # One thread, because tokenizers are not made for several.
        self._reader = ThreadPoolExecutor(1, "selfspec-reader")
        self._scorer = ThreadPoolExecutor(1, "selfspec-scorer")
        # Grammars may take long to compile, and only those who bring them wait for that.
        self._compiler = ThreadPoolExecutor(1, "selfspec-grammars")

    async def read(self, work: Callable[[], _Found], with_grammar: bool = False) -> _Found:
        """Run what reads requests beside the loop that serves them.

        Args:
            work: what to run.
            with_grammar: whether it compiles a grammar.

        Raises:
            ApiError: in place of a typed error.
        """
        threads = self._compiler if with_grammar else self._reader
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        except SelfSpecError as error:
            raise api_error(error) from error

    async def score(self, prompt: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of a prompt's tokens but the first.

        Raises:
            ApiError: the model cannot be asked.
        """
        model = self.scored
        if model is None:
            raise ApiError(400, "echo with logprobs is not supported where layers are streamed; drop one", "echo")
        scored = partial(prompt_logprobs, model, prompt, top)
        return await asyncio.get_running_loop().run_in_executor(self._scorer, in_own_thread, scored)

    def check(self, model: str) -> None:
        """Refuse requests for another model, and all once the server stops."""
        if self.stopping or not self.engine.running:
            raise stopping_error()
        if model != self.name:
            raise unknown_model(model, self.name)

    def created_now(self) -> int:
        """The time of an answer, in seconds since 1970."""
        return int(time.time())

    def close(self) -> None:
        """End the threads that read."""
        for threads in (self._reader, self._scorer, self._compiler):
            threads.shutdown(wait=False, cancel_futures=True)


def serve_model(
    spec: SelfSpeculative,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    template: str | None = None,
    limits: ServerLimits | None = None,
    max_rows: int = 32,
    cache_bytes: int | None = None,
    prefill_tokens: int = 512,
    max_waiting: int = 256,
    log_text: bool = False,
) -> Served:
    """Make what an app serves; its engine starts with the app.

    Args:
        spec: the wrapped model.
        tokenizer: its own.
        name: clients ask for it by this name.
        template: a chat template in place of the tokenizer's own.
        limits: of requests.
        max_rows: see `Engine`.
        cache_bytes: see `Engine`.
        prefill_tokens: see `Engine`.
        max_waiting: see `Engine`.
        log_text: whether prompts and answers are written to the log.

    Raises:
        CheckpointError: the template cannot be rendered.
        UnsupportedModelError, DraftConfigError, UnsupportedOptionError: see `Engine`.
    """
    chat = None
    if template is not None or tokenizer.chat_template:
        chat = ChatTemplate(tokenizer, template)
    engine = Engine(
        spec,
        max_rows=max_rows,
        cache_bytes=cache_bytes,
        prefill_tokens=prefill_tokens,
        max_waiting=max_waiting,
    )
    ends = spec.generation_config.eos_token_id
    config = spec.config.get_text_config(decoder=True)
    return Served(
        name=name,
        engine=engine,
        tokenizer=tokenizer,
        template=chat,
        limits=limits or ServerLimits(),
        vocabulary=int(config.vocab_size),
        context=engine.longest,
        end_tokens=frozenset() if ends is None else frozenset(ends if isinstance(ends, list) else [ends]),
        scored=spec.model if spec.limits is None else None,
        log_text=log_text,
    )

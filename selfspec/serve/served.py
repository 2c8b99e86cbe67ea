"""The model that is served, and all that answering needs of it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from selfspec.decode.output import TokenLogprobs
from selfspec.errors import SelfSpecError
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.serve.api_error import ApiError, api_error, stopping_error, unknown_model
from selfspec.serve.chat_template import ChatTemplate
from selfspec.serve.client_limits import ServerLimits
from selfspec.serve.engine import Engine, in_own_thread
from selfspec.serve.grammar import Grammar, Grammars, Wanted
from selfspec.serve.metrics import Metrics
from selfspec.serve.token_texts import TokenTexts, prompt_logprobs

_Found = TypeVar("_Found")


class Served:
    """A model with its engine, which starts with the app; clients ask for it by its name.

    Args:
        template: a chat template in place of the tokenizer's own.
        log_text: whether prompts and answers are written to the log.
        aliases: further names that clients may ask by.
        engine, tokenizer, name, limits: as the attributes.

    Attributes:
        template: writes chats; None: there is none, and chats are refused.
        vocabulary: number of its logits.
        readable: number of token ids that it reads, which may be more.
        end_tokens: that end an answer.
        stopping: whether no more requests are taken.

    Raises:
        CheckpointError: the template cannot be rendered.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        *,
        template: str | None = None,
        limits: ServerLimits | None = None,
        log_text: bool = False,
        aliases: Sequence[str] = (),
    ) -> None:
        spec = engine.spec
        ends = spec.generation_config.eos_token_id
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.names = (name, *aliases)
        has_template = template is not None or tokenizer.chat_template
        self.template = ChatTemplate(tokenizer, template) if has_template else None
        self.limits = limits or ServerLimits()
        self.log_text = log_text
        self.stopping = False
        self.created = int(time.time())
        self.vocabulary = vocabulary_size(spec.model)
        self.readable: int = weight_of(spec.model.get_input_embeddings()).shape[0]
        self.end_tokens = frozenset() if ends is None else frozenset(ends if isinstance(ends, list) else [ends])
        self.texts = TokenTexts(tokenizer)
        self.grammars = Grammars(tokenizer, self.vocabulary, self.end_tokens)
        self.metrics = Metrics(name, engine.stats)
        # Whoever brings much to read or to compile keeps nobody waiting but those who bring much, too. Tokenizers in
        # Python are not made for several threads.
        self._readers = ThreadPoolExecutor(4 if tokenizer.is_fast else 1, "selfspec-readers")
        self._compilers = {fast: ThreadPoolExecutor(1 + fast, "selfspec-grammars", _give_way) for fast in (True, False)}
        self._submitter = ThreadPoolExecutor(1, "selfspec-submitter")
        self._scorer = ThreadPoolExecutor(1, "selfspec-scorer")
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    async def read(self, work: Callable[[], _Found]) -> _Found:
        """Run what reads text beside the loop that serves requests.

        Raises:
            ApiError: in place of a typed error.
        """
        return await self._run(self._readers, work)

    async def submit(self, work: Callable[[], _Found]) -> _Found:
        """Run what makes rows and hands them to the engine; see `read`."""
        return await self._run(self._submitter, work)

    async def compile(self, wanted: Wanted) -> Grammar:
        """Compile what an answer has to fit; see `read`."""
        fast = await self.read(lambda: self.grammars.compiles_fast(wanted))
        return await self._run(self._compilers[fast], lambda: self.grammars.compiled(wanted))

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[], _Found]) -> _Found:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        except SelfSpecError as error:
            raise api_error(error) from error

    def check_text(self, text: str, field: str) -> None:
        """Refuse a text of a request's field that is far beyond the context, before all of it is tokenised."""
        context = self.engine.longest
        # A token seldom has so many characters; where the first of them take more than the context, all do.
        head = text[: 8 * context]
        if len(text) > context * self._longest_token or (
            len(text) > len(head) and len(self.tokenizer(head).input_ids) > context + 64
        ):
            raise ApiError(
                400,
                f"{field} has {len(text)} characters, which is beyond the context of {context} tokens; shorten it",
                field,
                "context_length_exceeded",
            )

    async def score(self, prompt: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Find the log-probabilities of a prompt's tokens but the first.

        Raises:
            ApiError: the model cannot be asked.
        """
        if self.engine.spec.limits is not None:
            raise ApiError(400, "echo with logprobs is not supported where layers are streamed; drop one", "echo")
        scored = partial(prompt_logprobs, self.engine.spec.model, prompt, top)
        return await asyncio.get_running_loop().run_in_executor(self._scorer, in_own_thread, scored)

    def check(self, model: str) -> None:
        """Refuse requests for another model, and all once the server stops."""
        if self.stopping or not self.engine.running:
            raise stopping_error()
        if model not in self.names:
            raise unknown_model(model, self.name)

    def check_tokens(self, tokens: Sequence[int], field: str, vocabulary: int) -> None:
        """Refuse token ids of a request's field that are outside a vocabulary: what is written, or what is read."""
        wrong = next((token for token in tokens if token >= vocabulary), None)
        if wrong is not None:
            raise ApiError(400, f"{field}: token id {wrong} is outside the vocabulary 0..{vocabulary - 1}", field)

    def close(self) -> None:
        """End the threads that read."""
        for threads in (self._readers, *self._compilers.values(), self._submitter, self._scorer):
            threads.shutdown(wait=False, cancel_futures=True)


def _give_way() -> None:
    """Let other threads have the processors first, where threads have priorities of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)

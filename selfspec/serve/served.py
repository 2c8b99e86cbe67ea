"""The model that is served, and all that answering needs of it: its threads, its limits, the texts of its tokens."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from transformers import PreTrainedTokenizerBase

from selfspec.errors import SelfSpecError
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.serve.api_error import ApiError, api_error, stopping_error, unknown_model
from selfspec.serve.chat.template import ChatTemplate
from selfspec.serve.client_limits import ServerLimits
from selfspec.serve.engine import Engine
from selfspec.serve.grammar import GrammarProcessor, Grammars, Wanted
from selfspec.serve.monitoring import Metrics
from selfspec.serve.schemas import BYTES_PER_ITEM, ModelT, parse_body
from selfspec.serve.transcriber import Transcriber

_Found = TypeVar("_Found")

# Bytes of a body that is read faster than another thread is asked to.
_SMALL_BODY = 2**15


class ServedModel(ABC):
    """A model with its engine, which starts with the app; clients ask for it by its name, or by one of `aliases`.

    With `log_text`, what is asked and answered is logged.
    """

    def __init__(
        self,
        engine: Engine | Transcriber,
        name: str,
        *,
        limits: ServerLimits | None = None,
        log_text: bool = False,
        aliases: Sequence[str] = (),
    ) -> None:
        self.engine, self.name, self.names = engine, name, (name, *aliases)
        self.limits = limits or ServerLimits()
        self.log_text = log_text
        self.stopping = False
        self.created = int(time.time())
        self.metrics = Metrics(name, engine.stats)
        self._threads: Sequence[ThreadPoolExecutor] = ()

    @abstractmethod
    async def parse(self, http: Request, model: type[ModelT]) -> ModelT:
        """Read the body of a request. ApiError: it is refused."""

    def check(self, model: str) -> None:
        """Refuse requests for another model, and all once the server stops."""
        if self.stopping or not self.engine.running:
            raise stopping_error()
        # As Ollama's clients name what has no other tag.
        if model not in self.names and model.removesuffix(":latest") not in self.names:
            raise unknown_model(model, self.name)

    def close(self) -> None:
        """End its own threads."""
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)


class Served(ServedModel):
    """A model that continues texts.

    `template` replaces the tokenizer's own chat template; without either, chats are refused. The model writes tokens
    below `vocabulary` and reads those below `readable`, which may be more. A CheckpointError: the template cannot be
    rendered.
    """

    engine: Engine

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
        super().__init__(engine, name, limits=limits, log_text=log_text, aliases=aliases)
        spec = engine.spec
        ends = spec.generation_config.eos_token_id
        self.tokenizer = tokenizer
        has_template = template is not None or tokenizer.chat_template
        self.template = ChatTemplate(tokenizer, template) if has_template else None
        # Conversations as JSON, by the ids of the answers that they end with; the last used one is last.
        self.stored: OrderedDict[str, str] = OrderedDict()
        self.vocabulary = vocabulary_size(spec.model)
        self.readable: int = weight_of(spec.model.get_input_embeddings()).shape[0]
        self.end_tokens = frozenset() if ends is None else frozenset(ends if isinstance(ends, list) else [ends])
        self.grammars = Grammars(tokenizer, self.vocabulary, self.end_tokens)
        self.texts = TokenTexts(tokenizer, self.grammars)
        # Whoever brings much to read or to compile keeps nobody waiting but those who bring much, too. Tokenizers in
        # Python are not made for several threads.
        self._readers = ThreadPoolExecutor(4 if tokenizer.is_fast else 1, "selfspec-readers")
        self._compilers = ThreadPoolExecutor(2, "selfspec-grammars", _give_way)
        self._parser = ThreadPoolExecutor(1, "selfspec-parser")
        self._submitter = ThreadPoolExecutor(1, "selfspec-submitter")
        self._threads = (self._readers, self._compilers, self._parser, self._submitter)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    async def parse(self, http: Request, model: type[ModelT]) -> ModelT:
        """Read the body of a request, a large one beside the loop; see `read`."""
        # A page of another site may send any other type without asking.
        if "json" not in http.headers.get("content-type", ""):
            said = "the body is read as JSON alone; send content-type: application/json"
            raise ApiError(400, said, None, "invalid_json")
        body = await http.body()
        work = partial(parse_body, body, model, self.limits.body_bytes // BYTES_PER_ITEM)
        return work() if len(body) < _SMALL_BODY else await self._run(self._parser, work)

    async def read(self, work: Callable[[], _Found]) -> _Found:
        """Run what reads text beside the loop that serves requests; a typed error becomes an ApiError."""
        return await self._run(self._readers, work)

    async def submit(self, work: Callable[[], _Found]) -> _Found:
        """Run what makes rows and hands them to the engine; see `read`."""
        return await self._run(self._submitter, work)

    async def compile(self, wanted: Wanted) -> GrammarProcessor:
        """Compile what an answer has to fit; see `read`."""
        return await self._run(self._compilers, lambda: self.grammars.compiled(wanted))

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

    def check_tokens(self, tokens: Sequence[int], field: str, vocabulary: int) -> None:
        """Refuse token ids of a request's field that are not below `vocabulary`."""
        wrong = max(tokens, default=0)
        if wrong >= vocabulary:
            raise ApiError(400, f"{field}: token id {wrong} is outside the vocabulary 0..{vocabulary - 1}", field)


def _give_way() -> None:
    """Let other threads have the processors first, where threads have priorities of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


class TokenTexts:
    """Bytes and text of tokens, as llguidance reads a tokenizer; where it cannot, as tokens decode alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, grammars: Grammars) -> None:
        self._tokenizer, self._read = tokenizer, grammars.tokens

    def raw(self, token: int) -> bytes:
        """Return the bytes of a token's text; of a special token, its name."""
        if self._read is None:
            return str(self._tokenizer.decode([token])).encode()
        return bytes(self._read.decode_bytes([token]))

    def text(self, token: int) -> str:
        """Return a token's text; what is no whole character is replaced."""
        return self.raw(token).decode("utf-8", errors="replace")

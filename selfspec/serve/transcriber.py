"""Transcribes sounds one after another, with the drafts of a wrapped model of speech."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, StoppingCriteria, StoppingCriteriaList

from selfspec.api import SelfSpeculative
from selfspec.decode.generation import Transcript
from selfspec.errors import (
    EngineStoppedError,
    QueueFullError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from selfspec.serve.events import EngineStats

Samples = np.ndarray[Any, np.dtype[np.float32]]
"""Sound of one channel, `[samples]`."""


class LeftError(Exception):
    """Nobody waits for a transcript any more."""


class Hearing(StoppingCriteria):
    """Follows one transcription: hands what is new of its `text` to `said` once it is certain, until it is cancelled.

    `said` is called on the transcriber's thread, and must return at once.
    """

    def __init__(self, said: Callable[[str], object] = lambda text: None) -> None:
        self._said = said
        self.cancelled = False
        # The language that was heard, as a code, and how tokens are read, of which the times have the highest numbers.
        self.language = "en"
        self.read: Callable[[list[int]], str] = str
        self.first_time = 0
        self.text = ""
        # Tokens that are kept of earlier pieces, and those of the piece that is heard.
        self._kept: list[int] = []
        self._piece: list[int] = []

    def cancel(self) -> None:
        """End it at its next token."""
        self.cancelled = True

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Take the tokens of a piece, `[1, tokens]`, as they grow; return False, `[1]`. LeftError: it is cancelled."""
        self.check()
        tokens: list[int] = input_ids[0].tolist()
        # Each piece begins with a time.
        self._piece = tokens[next((at for at, token in enumerate(tokens) if token >= self.first_time), len(tokens)) :]
        self.tell(self.read(self._kept + self._certain(ended=False)))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def next_piece(self, _: Tensor) -> None:
        """Begin another piece."""
        self.check()
        self._kept, self._piece = self._kept + self._certain(ended=True), []

    def check(self) -> None:
        """Raise LeftError where it is cancelled."""
        if self.cancelled:
            raise LeftError

    def tell(self, text: str) -> None:
        """Hand on what is new of the whole text."""
        new, self.text = text[len(self.text) :], text
        if new:
            self._said(new)

    def _certain(self, ended: bool) -> list[int]:
        """Return the tokens of a piece that are kept: up to where a segment ends and another begins, or all.

        Where a piece breaks off within a segment, that is heard again at the beginning of the next piece.
        """
        times = [token >= self.first_time for token in self._piece]
        ends = [at + 1 for at in range(len(times) - 1) if times[at] and times[at + 1]]
        if ended and (not ends or times[-2:] == [False, True]):
            return self._piece
        return self._piece[: ends[-1]] if ends else []


class Transcriber:
    """Runs transcriptions of one wrapped model in a thread of its own. Methods may be called from any thread.

    The checkpoint of this name, on the hub or a folder, says what the model hears of samples. Up to `max_waiting`
    sounds wait. An UnsupportedModelError: the model writes no times.
    """

    def __init__(self, spec: SelfSpeculative, tokenizer: Any, name: str, max_waiting: int = 256) -> None:
        self._config: Any = spec.model.generation_config
        if getattr(self._config, "no_timestamps_token_id", None) is None:
            raise UnsupportedModelError(
                f"{type(spec.model).__name__} has an encoder and writes no times; models that write them are served, "
                "and others generate by selfspec.wrap(model, draft)"
            )
        self.spec, self._tokenizer, self._max_waiting = spec, tokenizer, max_waiting
        self._extractor: Any = AutoFeatureExtractor.from_pretrained(name, trust_remote_code=False)
        self.rate: int = self._extractor.sampling_rate
        self.longest: int = spec.config.max_target_positions
        # One that hears English alone has no tokens of languages.
        self._languages = {token[2:-2]: number for token, number in getattr(self._config, "lang_to_id", {}).items()}
        self._thread = ThreadPoolExecutor(1, "selfspec-transcriber")
        self._open: dict[Future[Transcript], Hearing] = {}
        self._counts = EngineStats()
        self.running = False

    def start(self) -> None:
        """Take sounds."""
        self.running = True

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more sounds, and give up what still runs after `timeout` seconds, or at once without `drain`."""
        self.running = False
        wait(list(self._open), timeout if drain else 0)
        for hearing in list(self._open.values()):
            hearing.cancel()
        self._thread.shutdown()

    def stats(self) -> EngineStats:
        """Count what runs and what was done."""
        there = len(self._open)
        return replace(self._counts, running=min(there, 1), waiting=max(there - 1, 0))

    def submit(
        self, samples: Samples, hearing: Hearing, language: str | None, prompt: str | None, **sampling: Any
    ) -> Future[Transcript]:
        """Take a sound at the model's `rate`, and return at once; None: the language is heard, nothing is prompted.

        An EngineStoppedError: none are taken; a QueueFullError: too many wait; an UnsupportedOptionError: the model
        does not hear the language.
        """
        if not self.running:
            raise EngineStoppedError("the transcriber is stopped")
        if len(self._open) > self._max_waiting:
            raise QueueFullError(f"{len(self._open) - 1} sounds wait, the most that may; try again later")
        code = None if language is None else language.lower()
        if code not in (None, *(self._languages or ("en",))):
            heard = ", ".join(sorted(self._languages)) or "en"
            raise UnsupportedOptionError(f"language: {str(code)[:50]!r} is not heard by this model; it hears {heard}")
        future = self._thread.submit(self._transcribe, samples, hearing, code, prompt, sampling)
        self._open[future] = hearing
        future.add_done_callback(self._open.pop)
        return future

    @torch.no_grad()
    def _transcribe(
        self, samples: Samples, hearing: Hearing, language: str | None, prompt: str | None, sampling: dict[str, Any]
    ) -> Transcript:
        hearing.check()
        model: Any = self.spec.model
        whole = {"truncation": False, "padding": "longest"} if len(samples) > self._extractor.n_samples else {}
        how = {"sampling_rate": self.rate, "return_tensors": "pt", "return_attention_mask": True, **whole}
        heard = self._extractor(samples, **how).to(model.device)
        features = heard.input_features.to(model.dtype)
        options: dict[str, Any] = {}
        if self._languages:
            found = language or model.detect_language(features).item()
            hearing.language = next(code for code, number in self._languages.items() if found in (code, number))
            options = {"language": hearing.language, "task": "transcribe"}
        if prompt:
            options["prompt_ids"] = self._tokenizer.get_prompt_ids(prompt, return_tensors="pt").to(model.device)
        hearing.read = lambda tokens: str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        hearing.first_time = self._config.no_timestamps_token_id + 1
        out = self.spec.generate(
            input_features=features,
            attention_mask=heard.attention_mask,
            return_timestamps=True,
            return_segments=True,
            stopping_criteria=StoppingCriteriaList([hearing]),
            monitor_progress=hearing.next_piece,
            **options,
            **sampling,
        )
        assert isinstance(out, Transcript)
        hearing.tell(hearing.read(out.sequences[0].tolist()))
        for name in ("rounds", "drafted", "accepted"):
            setattr(self._counts, name, getattr(self._counts, name) + getattr(out.stats, name))
        self._counts.committed += out.stats.new_tokens
        self._counts.finished["stop"] += 1
        return out

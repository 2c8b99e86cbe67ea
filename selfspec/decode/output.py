"""The output of a generation: each committed round, and the whole at the end."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from selfspec.compat import OUTPUT_CACHE
from selfspec.decode.stats import Stats


@dataclass(frozen=True)
class RowRound:
    """One row's part of a round.

    Attributes:
        tokens: committed tokens, final: accepted draft tokens and then a token from the residual or the bonus token.
            Empty for a row that was finished before. The last token is missing if the row ends inside its accepted
            draft or lockstep cuts it there.
        draft: the proposed draft tokens, one for each node of a tree.
        accepted: number of draft tokens among `tokens`.
        rejected: draft tokens after the accepted ones; in a tree the first child, its first child, and so on.
    """

    tokens: tuple[int, ...]
    draft: tuple[int, ...]
    accepted: int
    rejected: tuple[int, ...] = ()


@dataclass(frozen=True)
class Round:
    """The committed tokens of one round.

    Attributes:
        rows: one for each row of the batch.
        steps: draft steps; 0 without a draft, and for a look-up.
    """

    rows: tuple[RowRound, ...]
    steps: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Committed tokens of a batch of one row.

        Raises:
            ValueError: the batch has several rows; read `rows` instead.
        """
        if len(self.rows) != 1:
            raise ValueError(f"this round has {len(self.rows)} rows; read chunk.rows[i].tokens")
        return self.rows[0].tokens


def streamed(
    rounds: Generator[Round, None, None], prompt: Tensor, streamer: BaseStreamer
) -> Generator[Round, None, None]:
    """Feed a streamer of `transformers` as plain decoding would: the prompt, each token, and the end.

    The streamer is ended even if the rounds fail or are abandoned, so that no reader waits forever.

    Args:
        rounds: of one row; closed with this generator.
        prompt: `[1, prompt]`, padding included.
        streamer: gets the prompt `[1, prompt]` and tokens `[1]`, on the CPU.

    Yields:
        The same rounds.
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


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """A finished generation: the output of `transformers` with `lengths`, `stats` and `lossless`.

    Attributes, items, slices, tuples and iteration are as in every output of `transformers`: items are the fields that
    are not None, in the order of `GenerateDecoderOnlyOutput`. The fields that selfspec adds are attributes, not items,
    so that code which iterates over an output finds only fields that it knows.

    Attributes:
        sequences: token ids, `[batch, length]`, prompt included as given; rows that ended early are padded right. If
            there is no end token, rows that a stopping criterion has ended continue until all have ended, as in
            `transformers`.
        scores: for each new token the logits after processors and warpers, `[batch, vocab]`, float32; None unless
            `return_dict_in_generate` and `output_scores` ask for them. After the end of a row, 0 for the padding token
            and -inf for all other tokens.
        logits: the full model's own logits in the same form, for `output_logits`.
        cache: keys and values of all tokens except each row's last, for the next turn: the caller's cache, or a new
            one for `return_dict_in_generate`. None otherwise, and before the generation has finished. Its item has the
            name that `transformers` uses: `past_key_values` before 5.24.
        lengths: number of new tokens of each row, up to where it ended.
        stats: counts and times.
        lossless: whether the tokens are distributed exactly as the full model's own; False under a relaxed rule.
    """

    # Declared again for type checkers, which do not read the fields of transformers.
    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    if TYPE_CHECKING:
        cache: Cache | None = None
    # transformers rebuilds outputs from their items, so these need a default.
    lengths: tuple[int, ...] = None  # type: ignore[assignment]
    stats: Stats = None  # type: ignore[assignment]
    lossless: bool = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Return the cache if `transformers` has another name for its field."""
        if name == "cache" != OUTPUT_CACHE:
            return getattr(self, OUTPUT_CACHE)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ATTRIBUTES_ALONE:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in _ATTRIBUTES_ALONE:
            object.__setattr__(self, key, value)
        else:
            super().__setitem__(key, value)


@dataclass
class EncoderDecoderOutput(GenerateOutput, GenerateEncoderDecoderOutput):
    """A finished generation of a model with an encoder.

    Attributes:
        cross_attentions: for timestamps of tokens, the attention weights over the encoder's output, of each pass of
            plain decoding and each layer, `[batch, heads, tokens, places]`; None if no timestamps are asked for.
    """

    cross_attentions: tuple[tuple[Tensor, ...], ...] | None = None


_ATTRIBUTES_ALONE = frozenset({"lengths", "stats", "lossless"})

"""Drafting by counts: the tokens that followed earlier matches of the text's end, merged into one tree."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import shown
from selfspec.draft.draft import Budget, Draft, Offer, TokenPath, Verdict
from selfspec.draft.drafter import Drafter, DraftMemory, drafter
from selfspec.draft.prompt_lookup import MOST_PLACES, NONE, OwnText, Tokens, places_in
from selfspec.draft.rows_view import RowsView
from selfspec.draft.union import MergingProposer
from selfspec.errors import DraftConfigError
from selfspec.files.json_text import DescribedTensors, write_described
from selfspec.model.identity import Vocabulary
from selfspec.runtime.request import PassResult

# Matches that are enough to count. With fewer of one length, shorter matches count too, each with a lower weight.
_ENOUGH, _SHORTER = 8, 0.3
# Matches at least this long have the same trust.
_LONG_MATCH = 12


@drafter("suffix", argument="[:FILE]", help="what followed in earlier texts, and in a corpus by `selfspec index`")
@dataclass(frozen=True)
class Suffixes(Drafter):
    """Drafts from suffixes of earlier text, as in REST (He et al., 2023) and SuffixDecoding (Oliaro et al., 2024).

    Continuations of the longest matches in the text, earlier texts of the wrapper and a corpus form one tree, weighted
    by their counts (arXiv 2311.08252, 2411.04975). Nothing is drawn, so q is one-hot. Under greedy decoding and
    `coupled`, earlier texts (prompts included) change speed alone; with other sampling, a seed repeats its tokens only
    with a new wrapper. Where rows are apart (see `FixedLength`), a row has a chain, and copies nothing from texts that
    end during the call.

    Attributes:
        corpus: a file of `selfspec index`; None: no corpus.
        most_bytes: size of earlier texts, at most 64 MiB, which each round reads; the oldest make room. 0: none.

    Raises:
        DraftConfigError: `most_bytes` is out of range, or the corpus cannot be used.
    """

    corpus: str | None = None
    most_bytes: int = 1 << 20
    _opened: CorpusFile | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if type(self.most_bytes) is not int or not 0 <= self.most_bytes <= 1 << 26:
            raise DraftConfigError(f"most_bytes must be an integer from 0 to {1 << 26}, got {shown(self.most_bytes)}")
        if self.corpus is not None:
            object.__setattr__(self, "_opened", CorpusFile(self.corpus))

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        adapter.check_trees(model)
        if self._opened is not None:
            self._opened.check(Vocabulary.of(model))

    def begin(self, rows: RowsView) -> SuffixProposer:
        memory = rows.memories.setdefault(self, TextMemory(self.most_bytes))
        assert isinstance(memory, TextMemory)
        return SuffixProposer(rows, memory, None if self._opened is None else self._opened.corpus)

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> Suffixes:
        return cls(argument)

    @property
    def spelling(self) -> str | None:
        has_file = self.corpus is not None and self == Suffixes(self.corpus)
        return f"suffix:{self.corpus}" if has_file else super().spelling


class SuffixProposer(MergingProposer):
    """Counts continuations in each row's text, in earlier texts of the wrapper, and in the corpus if there is one."""

    def __init__(self, rows: RowsView, memory: TextMemory, corpus: SortedCorpus | None) -> None:
        super().__init__(rows)
        self._memory, self._corpus, self._at_first = memory, corpus, memory.tokens
        self._texts = [OwnText(rows.source(row)) for row in range(rows.size)]

    @property
    def nbytes(self) -> int:
        return self._memory.tokens.nbytes

    def join(self, other: SuffixProposer) -> None:
        self._texts.extend(other._texts)

    def select(self, rows: Sequence[int]) -> None:
        self._texts[:] = [self._texts[row] for row in rows]

    def offers(self, rows: RowsView, budget: Budget) -> list[tuple[Offer, ...]]:
        return [(self._offer(rows, row, rows.budget_of(row, budget).depth),) for row in rows.running]

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        super().learn(rows, draft, target, verdict)
        for row, found in verdict.rows.items():
            if found.ended:
                self._memory.add([*rows.text(row), *found.tokens])

    @property
    def _earlier(self) -> Tokens:
        return self._at_first if self.rows_apart else self._memory.tokens

    def _offer(self, rows: RowsView, row: int, depth: int) -> Offer:
        own = self._texts[row]
        own.extend(rows.text(row, own.length))
        context: list[int] = own.tokens[-LONGEST:].tolist()
        # A loop that reaches the end of the text continues with its beginning.
        found = [_Found(own.tokens, places_in(own.tokens, context, LONGEST), goes_round=True)]
        found.append(_Found(self._earlier, places_in(self._earlier, context, LONGEST)))
        if self._corpus is not None:
            found.append(_Found(self._corpus.tokens, self._corpus.places(context, LONGEST)))
        longest = max(len(each.places) for each in found)
        shares = counted(_weighted(found, longest, depth))
        return Offer(min(longest, _LONG_MATCH), shares)


@dataclass(frozen=True)
class _Found:
    """Holds a context's places in a text; if it `goes_round`, continuations start again at the text's end."""

    tokens: Tokens
    places: Sequence[np.ndarray]
    goes_round: bool = False

    def continuations(self, length: int, depth: int) -> Counter[tuple[int, ...]]:
        """Count the continuations, of up to `depth` tokens, of matches of exactly `length` tokens."""
        if length > len(self.places):
            return Counter()
        places = self.places[length - 1]
        if length < len(self.places):
            places = np.setdiff1d(places, self.places[length], assume_unique=True)
        steps = np.arange(depth)
        if self.goes_round:
            steps = steps % (len(self.tokens) - places[:, None])
        # Every other text ends with `NONE`.
        reads = np.minimum(places[:, None] + steps, len(self.tokens) - 1)
        return Counter(map(_up_to_end, self.tokens[reads].tolist()))


def _up_to_end(tokens: list[int]) -> tuple[int, ...]:
    return tuple(tokens[: tokens.index(NONE)] if NONE in tokens else tokens)


def _weighted(found: Sequence[_Found], longest: int, depth: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield continuations of the longest matches, and of shorter ones until there are enough."""
    places = 0
    for length in range(longest, 0, -1):
        for each in found:
            counts = each.continuations(length, depth)
            places += counts.total()
            for tokens, count in counts.items():
                yield count * _SHORTER ** (longest - length), tokens
        if places >= _ENOUGH:
            break


def counted(continuations: Iterable[tuple[float, Sequence[int]]]) -> dict[TokenPath, float]:
    """Return each token's probability by counts, with method C (Witten and Bell, 1991) for unseen tokens."""
    counts: dict[TokenPath, float] = {(): 0.0}
    kinds: dict[TokenPath, int] = {}
    for weight, tokens in continuations:
        counts[()] += weight
        for length in range(1, len(tokens) + 1):
            path = tuple(tokens[:length])
            if path not in counts:
                counts[path] = 0.0
                kinds[path[:-1]] = kinds.get(path[:-1], 0) + 1
            counts[path] += weight
    return {path: count / (counts[path[:-1]] + kinds[path[:-1]]) for path, count in counts.items() if path}


class TextMemory(DraftMemory):
    """Keeps the latest texts that fit into its bytes, with `NONE` after each. A search reads all of them."""

    def __init__(self, nbytes: int) -> None:
        self._most = nbytes // 4
        self.tokens: Tokens = np.empty(0, dtype=np.int32)

    def add(self, text: Sequence[int]) -> None:
        """Add a text, and drop the oldest tokens that no longer fit."""
        if not self._most:
            return
        # Adding makes a new array, so that the old one stays as it is.
        kept = np.concatenate([self.tokens, text, [NONE]]).astype(np.int32)
        self.tokens = kept[max(len(kept) - self._most, 0) :]


_ABOUT = "corpus"
_REWRITE = "write it again: selfspec index"
LONGEST = 16
"""Tokens of a context that places are sorted by."""


@dataclass(frozen=True)
class _About:
    format: Literal[2]
    vocabulary: Vocabulary


class CorpusFile(DescribedTensors[_About]):
    """Maps a corpus of `write_corpus` into memory, to be read in parts; raises DraftConfigError for a bad file."""

    def __init__(self, file: str | Path) -> None:
        super().__init__(file, "a corpus", _ABOUT, _About, _REWRITE)
        self.check_names(("tokens", "ends"))
        tokens, ends = self.read("tokens"), self.read("ends")
        within = _is_within(tokens, NONE) and _is_within(ends, 1, len(tokens))
        if not within or len(ends) != len(tokens):
            raise DraftConfigError(f"{file} holds no corpus of token ids and their order; {_REWRITE}")
        self.corpus = SortedCorpus(tokens.numpy(), ends.numpy())

    def check(self, vocabulary: Vocabulary) -> None:
        """Refuse a model with other tokens by a DraftConfigError."""
        if not self.about.vocabulary.is_same(vocabulary):
            raise DraftConfigError(
                f"{self.source} holds token ids of another tokenizer than the model's; {_REWRITE} MODEL with this model"
            )


def _is_within(numbers: Tensor, least: int, most: int | None = None) -> bool:
    if numbers.dtype != torch.int32 or numbers.ndim != 1 or not len(numbers):
        return False
    smallest, largest = numbers.aminmax()
    return least <= int(smallest) and (most is None or int(largest) <= most)


def write_corpus(file: str | Path, texts: Iterable[Sequence[int]], vocabulary: Vocabulary) -> int:
    """Write a corpus of texts of token ids, in one piece or not at all; return its number of tokens.

    Raises DraftConfigError if the texts hold no tokens, StorageError if the file cannot be written.
    """
    between = np.array([NONE], dtype=np.int32)
    parts: list[Tokens] = [each for text in texts for each in (np.asarray(text, dtype=np.int32), between)]
    tokens = np.concatenate(parts) if parts else between
    if len(tokens) == len(parts) // 2:
        raise DraftConfigError("a corpus needs texts with tokens; give others")
    ends = sorted_ends(tokens, LONGEST)
    parts_of_it = {"tokens": torch.from_numpy(tokens), "ends": torch.from_numpy(ends)}
    write_described(Path(file), _ABOUT, asdict(_About(2, vocabulary)), parts_of_it)
    return len(tokens) - len(parts) // 2


class SortedCorpus:
    """Holds texts with `NONE` between them, and their places sorted by `sorted_ends`, for binary search of contexts."""

    def __init__(self, tokens: Tokens, ends: Tokens) -> None:
        self.tokens = tokens
        self._ends = ends

    def places(self, context: Sequence[int], longest: int) -> list[NDArray[np.int64]]:
        """Find a context as `places_in` does; of many places, return evenly spread ones."""
        found: list[NDArray[np.int64]] = []
        low, high = 0, len(self._ends)
        for length, token in enumerate(reversed(context[-longest:]), 1):

            def before(place: int, back: int = length) -> int:
                start = int(self._ends[place]) - back
                return int(self.tokens[start]) if start >= 0 else NONE

            within = range(low, high)
            low, high = (low + cut(within, token, key=before) for cut in (bisect_left, bisect_right))
            if low >= high:
                break
            chosen = np.linspace(low, high - 1, min(high - low, MOST_PLACES)).astype(np.int64)
            found.append(self._ends[chosen].astype(np.int64))
        return found


def sorted_ends(tokens: Tokens, longest: int) -> Tokens:
    """Sort the places after each token of a text by the tokens before them, the nearest first; `[tokens]`.

    Ranks by some tokens sort by twice as many (doubling; Manber and Myers, 1993). Places with at least `longest` equal
    tokens keep the text's order.
    """
    ranks, known = tokens.astype(np.int64) - NONE + 1, 1
    while True:
        keys = ranks * (int(ranks.max(initial=0)) + 1)
        keys[known:] += ranks[:-known]
        order = np.argsort(keys, kind="stable")
        if 2 * known >= longest:
            return (order + 1).astype(np.int32)
        ordered = keys[order]
        ranks[order] = np.cumsum(np.diff(ordered, prepend=ordered[:1]) != 0) + 1
        known *= 2

"""Drafting by counts: the tokens that followed wherever a text ended as this one does, merged into one tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import shown
from selfspec.draft.corpus_file import LONGEST, CorpusFile
from selfspec.draft.declaration import drafter
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import Drafter
from selfspec.draft.merging import MergingProposer
from selfspec.draft.offer import Offer, counted
from selfspec.draft.rows_view import RowsView
from selfspec.draft.text_places import NONE, OwnText, SortedCorpus, TextMemory, Tokens, places_in
from selfspec.draft.verdict import Verdict
from selfspec.errors import DraftConfigError
from selfspec.model.vocabulary import Vocabulary
from selfspec.runtime.runner import PassResult

# Matches that are enough to count. With fewer of one length, shorter matches count too, each with a lower weight.
_ENOUGH, _SHORTER = 8, 0.3
# Matches at least this long have the same trust.
_LONG_MATCH = 12


@drafter(
    "suffix",
    argument="[:FILE]",
    help="what followed in earlier texts, and in a corpus by `selfspec index`",
)
@dataclass(frozen=True)
class Suffixes(Drafter):
    """Drafts from suffixes of earlier text, as in REST (He et al., 2023) and SuffixDecoding (Oliaro et al., 2024).

    Continuations of the longest matches in the prompt, the output, earlier texts of the wrapper and a corpus are merged
    into one tree, weighted by how often each was found (arXiv 2311.08252, 2411.04975). Nothing is drawn, so q is
    one-hot at each node.

    Earlier texts belong to the wrapper, prompts included. Under greedy decoding and under `coupled` they change speed
    alone; with other sampling, a seed repeats its tokens only with a new wrapper. Where rows are apart (see
    `FixedLength`), a row has a chain, and copies nothing from texts that end during the call.

    Attributes:
        corpus: a file of `selfspec index`; None: no corpus.
        most_bytes: size of earlier texts, at most 64 MiB; the oldest make room. 0: none are kept. Each round reads
            through all of them.

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
    """Counts continuations in each row's text, in earlier texts of the wrapper and in the corpus, if there is one."""

    def __init__(self, rows: RowsView, memory: TextMemory, corpus: SortedCorpus | None) -> None:
        super().__init__(rows)
        self._memory = memory
        self._corpus = corpus
        self._texts = [OwnText(rows.source(row)) for row in range(rows.size)]
        self._at_first = memory.tokens

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
        """Texts that ended before; where rows are apart, only those before this generation."""
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
    """Holds the places of a context in a text, as `places_in` returns them.

    Attributes:
        goes_round: whether a continuation that reaches the end of the text starts again at its place.
    """

    tokens: Tokens
    places: Sequence[np.ndarray]
    goes_round: bool = False

    def continuations(self, length: int, depth: int) -> Counter[tuple[int, ...]]:
        """Count the continuations, up to `depth` tokens, after places that match in exactly `length` tokens."""
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
    """Yield continuations of the longest matches, and of shorter matches until there are enough."""
    places = 0
    for length in range(longest, 0, -1):
        for each in found:
            counts = each.continuations(length, depth)
            places += counts.total()
            for tokens, count in counts.items():
                yield count * _SHORTER ** (longest - length), tokens
        if places >= _ENOUGH:
            break

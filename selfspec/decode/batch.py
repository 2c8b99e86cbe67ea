"""The batch of running rows: every step of the loop reads it, and commit advances it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.control import Controller
from selfspec.decode.group import BatchSampling, Group, JudgedScores, proper
from selfspec.decode.noise import Noise, Purpose
from selfspec.device import on_host, to_device
from selfspec.draft import Drafter, Proposer
from selfspec.draft.draft import Draft
from selfspec.draft.prediction import Prediction
from selfspec.draft.rows_view import DrawnToken
from selfspec.model.gated_view import Point
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.request import Draws, Races
from selfspec.runtime.runner import ModelRunner


@dataclass
class Batch:
    """Holds rows that run side by side, in groups that join and leave between rounds; drafters see it as a `RowsView`.

    Rows are numbered across all groups. Tensors hold the running rows, in the order of their numbers.
    """

    runner: ModelRunner
    cache: SharedCache  # keys and values of all committed tokens except each row's last, which no pass has read yet
    groups: Sequence[Group]
    noise: Noise
    controller: Controller
    last_tokens: Tensor  # last committed token of each running row, `[rows, 1]`
    first_logits: Tensor | None = None  # of prompts' last tokens, `[rows, 1, vocab]`, until the first round has them
    first_embeddings: Tensor | None = None  # prompts' last, `[rows, 1, hidden]`, until the first round reads them
    # With logits not finite after a draft token: they get a round without a draft before ending.
    nonfinite_rows: list[int] = field(default_factory=list)
    memories: dict[Hashable, object] = field(default_factory=dict)
    programs: GraphCache | None = None
    prefill_width: int | None = None  # tokens of each prompt that one pass may read; None: all
    taps: tuple[Point, ...] = ()  # points of the target whose states the drafters ask for
    proposers: dict[int, Proposer] = field(default_factory=dict)  # by the `id` of their drafter
    sampling: BatchSampling = field(init=False)
    committed: list[list[int]] = field(init=False)
    unfinished: set[int] = field(init=False)
    running: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._number()

    def _number(self) -> None:
        """Number the rows again after rows joined or left."""
        self._rows = [(group, row) for group in self.groups for row in range(len(group.committed))]
        self.sampling = BatchSampling(self.groups)
        self.committed = [group.committed[row] for group, row in self._rows]
        self.unfinished = {number for number, (group, row) in enumerate(self._rows) if row in group.unfinished}
        self.running = [number for number, (group, row) in enumerate(self._rows) if row in group.running]

    @property
    def size(self) -> int:
        return len(self._rows)

    @property
    def greedy(self) -> bool:
        return self.sampling.greedy

    @property
    def chains_only(self) -> bool:
        return self.sampling.in_order

    @property
    def reads_prefixes(self) -> bool:
        return self.sampling.reads_prefixes

    @property
    def are_text(self) -> bool:
        return all(group.sequences.are_text for group in self.groups)

    @property
    def needs_lockstep(self) -> bool:
        """True if processors or stopping criteria need all unfinished rows at one length in every round."""
        return any(group.needs_lockstep for group in self.groups)

    @property
    def in_lockstep(self) -> bool:
        """True if several unfinished rows commit as many tokens as the slowest one; constant in a round."""
        places = {place for row, place in zip(self.running, self.cache.seq_lens, strict=True) if row in self.unfinished}
        # A pass over rows at different places needs a mask and scattered writes.
        chosen = len(self.unfinished) > 1 and len(places) == 1 and self.controller.keeps_lockstep()
        return self.needs_lockstep or chosen

    def text(self, row: int, start: int = 0) -> list[int]:
        group, own = self._rows[row]
        return group.sequences.text_from(own, start)

    def source(self, row: int) -> list[int]:
        source = self.cache.source
        return [] if source is None or source.text is None else source.text[self.running.index(row)]

    def prediction(self, row: int) -> Prediction | None:
        group, own = self._rows[row]
        return group.predictions[own] if group.predictions else None

    def text_length(self, row: int) -> int:
        group, own = self._rows[row]
        return group.sequences.text_length(own)

    def open_block(self, tree: Tree) -> None:
        self.cache.open(tree)

    @property
    def longest(self) -> int:
        return max(self.cache.seq_lens) + 1

    def remaining(self, row: int) -> int:
        group, own = self._rows[row]
        return group.remaining(own)

    @property
    def pacing(self) -> set[int]:
        """Numbers of the slowest rows of each group, whose progress decides when the group ends."""
        slowest = {g: min(len(g.committed[row]) for row in g.unfinished) for g in self.groups if g.unfinished}
        return {row for row in self.unfinished if len(self.committed[row]) == slowest[self._rows[row][0]]}

    @property
    def draft_slots(self) -> int:
        return self.cache.draft_slots

    def no_draft(self) -> Draft:
        return Draft.chain(self.last_tokens[:, :0])

    def draft_scores(self, logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        return self.sampling.draft_scores(logits, drafted)

    def draw_draft(self, scores: Tensor, node: int, place: int) -> DrawnToken:
        if self.greedy:
            return DrawnToken(scores.argmax(-1), None)
        q = proper(self.sampling.probabilities(scores))
        decided = self.sampling.decide(q, self.cache.cursors.positions(1, node) + 1, self.noise)
        return DrawnToken(self.sampling.draw(decided, self.noise, Purpose.DRAFT, place), q)

    def draws(self, steps: int) -> Draws | Races | None:
        alike, vocabulary = self.sampling.alike(), self.runner.vocabulary
        if alike is None:
            return None
        if not on_host(self.last_tokens.device):
            race = None if alike.greedy else partial(self.noise.race, Purpose.DRAFT)
            return Races(alike.choice, alike.drawn, race, steps, vocabulary)
        return Draws(alike.choice, torch.stack(self.noise.lots(Purpose.DRAFT, 0, steps, vocabulary)), vocabulary)

    def begin(self, drafter: Drafter) -> Proposer:
        """Begin drafting by a drafter, before the rows' first pass, and return its proposer."""
        if id(drafter) not in self.proposers:
            self.taps = tuple(dict.fromkeys([*self.taps, *drafter.features(self.runner.depth)]))
            self.proposers[id(drafter)] = drafter.begin(self)
        return self.proposers[id(drafter)]

    def shortened(self, runs: Sequence[Sequence[int]]) -> list[list[int]]:
        """Cut each row's run of tokens at its end token and its maximal length."""
        parts = self._by_group(runs)
        found = [g.stopping.shortened(g.sequences, part) for g, part in zip(self.groups, parts, strict=True)]
        return [run for part in found for run in part]

    @property
    def keeps_scores(self) -> bool:
        """True if scores or logits of committed tokens are recorded."""
        return any(group.records.wanted for group in self.groups)

    def ends(self, runs: Sequence[Sequence[int]], judged: JudgedScores | None) -> list[int | None]:
        """Record scores and logits, None where nothing is recorded, and return where rows end; see `Group.ends`."""
        sizes, parts = [len(group.running) for group in self.groups], self._by_group(runs)
        each: Sequence[JudgedScores | None] = [None] * len(parts)
        if judged is not None:
            each = list(map(JudgedScores, judged.scores.split(sizes), judged.logits.split(sizes)))
        return [end for part in map(Group.ends, self.groups, parts, each) for end in part]

    def _by_group(self, runs: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
        left = iter(runs)
        return [[next(left) for _ in group.committed] for group in self.groups]

    def end(self, row: int) -> None:
        """End a row with the tokens that it has committed."""
        group, own = self._rows[row]
        group.unfinished.discard(own)
        self.unfinished.discard(row)

    def fail(self, row: int) -> None:
        """End a row because the target's logits were not finite."""
        group, own = self._rows[row]
        group.failed.append(own)
        self.end(row)

    def drop_finished(self) -> None:
        """Stop running finished rows once they are half of the running rows, so that copying the rest pays off."""
        kept = [index for index, row in enumerate(self.running) if row in self.unfinished]
        if not kept or 2 * len(kept) > len(self.running):
            return
        for group in self.groups:
            group.running[:] = [row for row in group.running if row in group.unfinished]
        self.cache.narrow(kept)
        self.last_tokens = self.last_tokens[to_device(kept, self.last_tokens.device)]
        self.noise = self.noise.narrowed(kept)
        self._number()

    @property
    def row_bytes(self) -> int:
        """Bytes of keys, values and states, including those of drafters."""
        return self.cache.nbytes + sum(proposer.row_bytes for proposer in self.proposers.values())

    def hold(self, rows: int, tokens: int) -> None:
        """Make storage for `rows` rows of `tokens` committed tokens each and a draft after them."""
        self.cache.hold(rows, tokens)
        for proposer in self.proposers.values():
            proposer.hold(rows, tokens)

    def join(self, other: Batch) -> None:
        """Add the rows of another batch, which is not to be used again; raise ValueError if they find no storage."""
        self.cache.join(other.cache)
        self.noise = self.noise.joined(other.noise)
        self.last_tokens = torch.cat([self.last_tokens, other.last_tokens])
        self.groups = [*self.groups, *other.groups]
        for number, proposer in self.proposers.items():
            proposer.join(other.proposers[number])
        self._number()

    def keep(self, groups: Sequence[int]) -> None:
        """Keep one or more groups of one row each, in the order given; rows may only move towards the front."""
        self.cache.keep(groups)
        self.noise = self.noise.narrowed(groups)
        self.last_tokens = self.last_tokens[to_device(groups, self.last_tokens.device)]
        self.groups = [self.groups[index] for index in groups]
        self.nonfinite_rows = [new for new, row in enumerate(groups) if row in self.nonfinite_rows]
        for proposer in self.proposers.values():
            proposer.select(groups)
        self._number()

    def part(self, groups: Sequence[int]) -> BatchPart:
        """Return a part of the batch with some of its groups, to judge their round."""
        chosen = [self.groups[index] for index in groups]
        numbers = [number for number, (group, _) in enumerate(self._rows) if group in chosen]
        rows = [index for index, number in enumerate(self.running) if number in numbers]
        batch = replace(
            self,
            cache=self.cache.cursors_of(rows),
            groups=chosen,
            noise=self.noise.narrowed(rows),
            last_tokens=self.last_tokens[to_device(rows, self.last_tokens.device)],
        )
        return BatchPart(batch, numbers, rows)


@dataclass(frozen=True)
class BatchPart:
    """Some groups of a batch, without passes; the numbers of their rows, and the indices in its tensors."""

    batch: Batch
    numbers: Sequence[int]
    rows: Sequence[int]

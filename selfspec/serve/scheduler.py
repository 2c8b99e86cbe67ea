"""Which rows run, which are read and which wait; one step reads some tokens of prompts and runs one round."""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from selfspec.decode.batch import Batch
from selfspec.decode.group import Group
from selfspec.decode.loop import Prefill
from selfspec.decode.output import Round, RowRound
from selfspec.errors import EngineStoppedError, RowError, SelfSpecError
from selfspec.serve.cache_budget import FEWEST, CacheBudget, PrefixCache, Storage
from selfspec.serve.events import Committed, EngineStats, Event, Finished, Reason, Ticket
from selfspec.serve.row_decoder import LogprobRecords, RowDecoder

_LOG = logging.getLogger(__name__)
# Short prompts that are read before a long one that has waited longer, at most.
_PASS = 8
# The longest that a piece of a prompt should take while rows run, and the fewest tokens that are read at once.
_PIECE_SECONDS, _FEWEST_READ = 0.5, 32
# Rounds in a row that may fail of several rows of which none fails alone.
_UNEXPLAINED = 3


@dataclass(eq=False)
class Entry:
    """A request on its way, with the draft tokens that were proposed to it and committed so far.

    Its `number` is that of its arrival: the lower, the longer it has waited. Kept caches held `cached` tokens of its
    prompt. `passed` requests with short prompts overtook it; its caller was `told` so many tokens. `prefill` reads its
    text, once that has begun; it is a `suspect` since a round with its row failed, until it has run in another. It runs
    beside others that draft, or do not, as its own does.
    """

    number: int
    ticket: Ticket
    row: Group
    prompt_tokens: int
    drafts: bool = True
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    passed: int = 0
    told: int = 0
    prefill: Prefill | None = None
    suspect: bool = False


class Scheduler:
    """Runs requests, the longest-waiting first. Used by one thread at a time, but for `stats`.

    Before each round `prefill_tokens` of prompts are read. A few prompts of no more tokens than that pass a longer one,
    which would take many rounds. Where the running rows outgrow the cache, the one that came
    last gives its own back and waits again, before all that came after it. It is read again later, prompt and committed
    tokens, and goes on where it was.

    Where a round of several rows fails, each of them is read again and runs a round alone: the one that fails there
    ends, and the others go on together.
    """

    def __init__(self, decoder: RowDecoder, budget: CacheBudget, prefill_tokens: int, kept_bytes: int = 0) -> None:
        self._decoder = decoder
        self._budget = budget
        self._prefill_tokens = prefill_tokens
        self._waiting: list[Entry] = []
        # Whose prompt is being read, into a cache of its own.
        self._reading: Entry | None = None
        # In the order in which the batch holds their rows.
        self._running: list[Entry] = []
        self._batch: Batch | None = None
        self._unexplained = 0
        self._kept = PrefixCache(kept_bytes if decoder.resumes else 0)
        # Counted here; `stats` adds what others count.
        self._counts = EngineStats(cache_bound=budget.bound)
        # Of a prompt, as it was read last.
        self._token_seconds = 0.0

    def add(self, entry: Entry) -> None:
        """Let a request wait for its turn."""
        insort(self._waiting, entry, key=lambda each: each.number)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """True while there is anything left to do."""
        return bool(self._waiting or self._running or self._reading)

    def step(self) -> None:
        """Read some tokens of prompts, and run one round of the rows that run."""
        self._leave_cancelled()
        try:
            self._admit()
            # A round may cost the rows that came last.
            while self._batch is not None and not self._hold(len(self._running)):
                self._preempt_last()
            committed = None if self._batch is None else self._decoder.round(self._batch, self._running[0].drafts)
        except Exception as error:
            # Whatever state the batch was left in, no row can go on from it.
            self._find_failing(error)
            committed = None
        if committed is not None:
            for entry in self._running:
                entry.suspect = False
            if len(self._running) > 1:
                self._unexplained = 0
            self._report(committed)
            if any(entry.suspect for entry in self._waiting):
                self._wait_again(self._running)
        if not self.busy:
            self._decoder.rest()

    def end_all(self) -> None:
        """End all that waits, is read or runs, since the engine stops."""
        entries = [*self._active, *self._waiting]
        self._running, self._waiting, self._batch, self._reading = [], [], None, None
        for entry in entries:
            self._finish(entry, "error", EngineStoppedError("the engine was stopped before the row had ended"))
        self._decoder.rest()

    def stats(self, incoming: int = 0) -> EngineStats:
        """Count what there is, and requests that are about to be added. Other threads may ask."""
        counts, reading = self._decoder.stats, self._reading
        prefill = None if reading is None else reading.prefill
        return replace(
            self._counts,
            running=len(self._running),
            prefilling=int(prefill is not None),
            waiting=len(self._waiting) + incoming,
            cache_bytes=self._batch_bytes + (prefill.batch.row_bytes if prefill else 0),
            kept_bytes=self._kept.nbytes,
            rounds=counts.rounds,
            plain_rounds=self._decoder.plain_rounds,
            committed=counts.new_tokens,
            drafted=counts.drafted,
            accepted=counts.accepted,
            finished=self._counts.finished.copy(),
        )

    @property
    def _active(self) -> list[Entry]:
        """Requests that hold a cache, those that run first."""
        return [*self._running, *([self._reading] if self._reading else [])]

    @property
    def _batch_bytes(self) -> int:
        return 0 if self._batch is None else self._batch.row_bytes

    def _leave_cancelled(self) -> None:
        for entry in [entry for entry in self._waiting if entry.ticket.cancelled]:
            self._waiting.remove(entry)
            self._finish(entry, "cancelled")
        if self._reading is not None and self._reading.ticket.cancelled:
            entry, self._reading = self._reading, None
            self._finish(entry, "cancelled")
        self._leave([(entry, "cancelled", None) for entry in self._running if entry.ticket.cancelled])

    # Reading.

    def _admit(self) -> None:
        """Read prompts, the longest-waiting first, and let the rows that are read join."""
        left = self._piece
        while left > 0:
            entry = self._reading or self._begin_next()
            if entry is None:
                return
            prefill, begun = entry.prefill, time.perf_counter()
            assert prefill is not None
            try:
                read = prefill.read(left)
            except Exception as error:
                self._reading = None
                self._finish(entry, "error", _failed("reading its prompt failed", error))
                continue
            if read:
                self._token_seconds = (time.perf_counter() - begun) / read
            self._counts.prompt_tokens += read
            left -= read
            if prefill.left <= 0:
                self._join(entry, prefill.batch)

    @property
    def _piece(self) -> int:
        """Tokens of prompts to read before the next round: rows that run wait no longer than `_PIECE_SECONDS`."""
        most = self._prefill_tokens
        if not self._running or not self._token_seconds:
            return most
        return min(most, max(_FEWEST_READ, int(_PIECE_SECONDS / self._token_seconds)))

    def _begin_next(self) -> Entry | None:
        """Begin to read the next request; None: there is none, or no room for the one that has waited longest."""
        while self._reading is None:
            alone = any(entry.suspect for entry in (*self._running, *self._waiting))
            if not self._waiting or len(self._running) >= (1 if alone else self._budget.most_rows):
                return None
            first = next((entry for entry in self._waiting if entry.suspect), self._waiting[0])
            # One that waits for room is not passed.
            if not self._admits(first):
                return None
            entry = self._passing(first)
            first.passed += entry is not first
            self._waiting.remove(entry)
            try:
                entry.prefill, self._reading = self._begun(entry), entry
            except Exception as error:
                self._finish(entry, "error", _failed("it could not be begun", error))
        if self._batch is not None:
            # Roomy storage gives way to what the row is read into.
            self._hold(len(self._running))
        return self._reading

    def _admits(self, entry: Entry) -> bool:
        """Return whether a request may be read beside the rows that run."""
        longest = max((each.row.length for each in self._running), default=0)
        if longest and self._decoder.tables(longest) != self._decoder.tables(entry.row.length):
            return False
        if any(each.drafts != entry.drafts for each in self._running):
            return False
        return self._budget.admits(len(self._running), longest, entry.row.length, entry.row.remaining(0))

    def _passing(self, first: Entry) -> Entry:
        """Return the request to read next where `first` has waited longest: a short one where that one is long."""

        def is_short(entry: Entry) -> bool:
            return entry.row.length <= self._prefill_tokens

        if is_short(first) or first.passed >= _PASS or first.suspect:
            return first
        return next((entry for entry in self._waiting if is_short(entry) and self._admits(entry)), first)

    def _begun(self, entry: Entry) -> Prefill:
        """Begin a row with what a kept cache holds of its text."""
        text = entry.row.sequences.text_from(0, 0)
        tables = self._decoder.tables
        known = self._kept.find(text, lambda tokens: tables(tokens) == tables(len(text))) if self._kept.bound else None
        # It is in use until it is copied; the others make room for the copy.
        self._kept.shrink(self._budget.bound - self._batch_bytes - self._budget.sizes.of(1, len(text)))
        self._counts.asked_tokens += len(text)
        cache, tokens = known or (None, 0)
        if not entry.row.committed[0]:
            entry.cached = tokens
        self._counts.cached_tokens += tokens
        return self._decoder.begin(entry.row, cache, tokens)

    def _keep(self, entry: Entry, batch: Batch, index: int) -> None:
        """Keep the cache of a row of a batch, where there is room beside the batch that runs."""
        if not self._kept.bound or entry.row.error is not None or entry.row.failed:
            return
        length = batch.cache.seq_lens[index]
        needed, tables = self._budget.sizes.of(1, length), self._decoder.tables
        room = self._budget.bound - self._batch_bytes
        room -= 0 if self._reading is None else self._budget.sizes.of(1, self._reading.row.length)
        if length < FEWEST or needed > min(room, self._kept.bound) or tables(length) != tables(entry.row.length):
            return
        self._kept.shrink(min(room, self._kept.bound) - needed)
        self._kept.keep(tuple(entry.row.sequences.text_from(0, 0)[:length]), self._decoder.kept(batch, index))

    def _join(self, entry: Entry, read: Batch) -> None:
        """Let the row that was read run, with what it was read into."""
        while self._batch is not None and not self._hold(len(self._running) + 1):
            self._preempt_last()
            if self._reading is None:
                return
        text = entry.row.sequences.text_from(0, 0)
        if any(each.row.sequences.text_from(0, 0) == text for each in self._waiting):
            # Several answers to one prompt read it once.
            self._keep(entry, read, 0)
        if self._batch is None:
            self._batch = read
        else:
            self._batch.join(read)
        self._running.append(entry)
        self._reading = entry.prefill = None

    # Room.

    def _hold(self, rows: int) -> bool:
        """Give the running batch storage for this number of rows and one in prefill; return whether there is room."""
        assert self._batch is not None
        cache, held = self._batch.cache, [entry.row for entry in self._active[:rows]]
        # What a row was read into is free once the row is copied: until then both count.
        beside = 0 if self._reading is None else self._budget.sizes.of(1, self._reading.row.length)
        longest, most = max(row.length for row in held), max(row.longest for row in held)
        now = Storage(cache.cursors.held, cache.cursors.room)
        chosen = self._budget.storage(now, rows, longest, most, beside)
        if chosen is None:
            return False
        self._kept.shrink(self._budget.bound - beside - self._budget.sizes.of(chosen.rows, chosen.tokens))
        if chosen != now:
            self._batch.hold(chosen.rows, chosen.tokens)
        return True

    def _preempt_last(self) -> None:
        """Take the cache of the row that came last, running or read, and let it wait."""
        last = max(self._active, key=lambda entry: entry.number)
        self._counts.preemptions += 1
        if last is self._reading:
            self._reading = last.prefill = None
            self.add(last)
        else:
            self._wait_again([last])

    def _wait_again(self, entries: Sequence[Entry]) -> None:
        """Let running rows wait, to be read again."""
        places = {self._running.index(entry): entry for entry in entries}
        for index, entry in places.items():
            assert self._batch is not None
            entry.row.noise = self._batch.noise.narrowed([index])
            self.add(entry)
        self._remove(set(places))

    # Rounds.

    def _find_failing(self, error: Exception) -> None:
        """Let each row that holds a cache run a round alone after one that failed, and end the row that ran alone."""
        entries, running, batch = self._active, self._running, self._batch
        self._running, self._batch, self._reading = [], None, None
        alone = len(entries) == 1
        self._unexplained = 0 if alone else self._unexplained + 1
        moved = batch is not None and list(batch.groups) != [entry.row for entry in running]
        again = not alone and not moved and self._unexplained <= _UNEXPLAINED
        if not alone:
            _LOG.error("a round of %d rows failed", len(entries), exc_info=error)
        for index, entry in enumerate(entries):
            # What was committed before it failed is final.
            end = self._tell(entry, RowRound(tuple(entry.row.committed[0][entry.told :]), (), 0))
            # What was shown to processors and is not committed cannot be taken back.
            if end is None and (not again or entry.row.ahead):
                end = "error", _failed("its round failed" if alone else "the running batch failed", error)
            if end is not None:
                self._finish(entry, *end)
                continue
            if batch is not None and index < len(running):
                entry.row.noise = batch.noise.narrowed([index])
            entry.suspect, entry.prefill = True, None
            self.add(entry)

    def _report(self, committed: Round) -> None:
        """Tell callers what a round committed, and let rows leave that ended."""
        batch, running = self._batch, list(self._running)
        assert batch is not None
        ended: list[tuple[Entry, Reason, SelfSpecError | None]] = []
        again: list[Entry] = []
        for index, (entry, row) in enumerate(zip(running, committed.rows, strict=True)):
            end = self._tell(entry, row)
            if end is not None:
                ended.append((entry, *end))
            elif index not in batch.unfinished:
                again.append(entry)
        self._leave(ended)
        self._wait_again(again)

    def _tell(self, entry: Entry, row: RowRound) -> tuple[Reason, SelfSpecError | None] | None:
        """Tell the caller of a row what a round committed to it, and return why it ended; None: it goes on."""
        entry.drafted += len(row.draft)
        entry.accepted += row.accepted
        records = entry.row.records
        try:
            logprobs = records.take(row.tokens) if isinstance(records, LogprobRecords) else None
        except Exception as error:
            return "error", _failed("its log-probabilities could not be told", error)
        if row.tokens:
            entry.told += len(row.tokens)
            told = next((each for each in entry.row.predictions if each is not None), None)
            counts = (0, 0) if told is None else (told.accepted, told.rejected)
            self._deliver(entry, Committed(row.tokens, logprobs, len(row.draft), row.accepted, entry.cached, *counts))
        return None if 0 in entry.row.unfinished or self._decoder.goes_on(entry.row) else _end_of(entry.row)

    def _leave(self, ended: Sequence[tuple[Entry, Reason, SelfSpecError | None]]) -> None:
        """Free what rows hold that have ended, and then tell their callers."""
        for entry, _, _ in ended:
            if self._batch is not None:
                self._keep(entry, self._batch, self._running.index(entry))
        self._remove({self._running.index(entry) for entry, _, _ in ended})
        for entry, reason, error in ended:
            self._finish(entry, reason, error)

    def _remove(self, indices: set[int]) -> None:
        """Take rows out of the running batch."""
        if not indices:
            return
        kept = kept_rows(len(self._running), indices)
        self._running = [self._running[index] for index in kept]
        if not kept:
            self._batch = None
        elif self._batch is not None:
            self._batch.keep(kept)

    def _finish(self, entry: Entry, reason: Reason, error: SelfSpecError | None = None) -> None:
        self._counts.finished[reason] += 1
        self._deliver(
            entry,
            Finished(reason, error, entry.prompt_tokens, len(entry.row.committed[0]), entry.drafted, entry.accepted),
        )

    def _deliver(self, entry: Entry, event: Event) -> None:
        try:
            entry.ticket.deliver(event)
        except Exception:
            # Nobody listens any more.
            _LOG.exception("the callback of a request raised; the request is cancelled")
            entry.ticket.cancel()


def kept_rows(rows: int, gone: set[int]) -> list[int]:
    """Return the rows that stay, moving as few as possible: the last of them fill the gaps."""
    stay = rows - len(gone)
    last = iter([row for row in range(stay, rows) if row not in gone])
    return [next(last) if place in gone else place for place in range(stay)]


def _end_of(row: Group) -> tuple[Reason, SelfSpecError | None]:
    """Return why a row ended in the last round."""
    if row.error is not None:
        return "error", _failed("a logits processor or stopping criterion of it failed", row.error)
    tokens = row.committed[0]
    if row.failed:
        return "error", RowError(
            f"the full model's logits became NaN or infinite after {len(tokens)} new tokens, or processors left "
            "no token to choose. Check the weights and the dtype: fp16 overflows where bf16 or fp32 do not"
        )
    stopped = tokens[-1] in row.stopping.eos or row.remaining(0) > 0
    return "stop" if stopped else "length", None


def _failed(what: str, error: Exception) -> RowError:
    """Make the error of a row, with its cause."""
    found = RowError(f"the row ended because {what}: {type(error).__name__}: {' '.join(str(error).split())}")
    found.__cause__ = error
    return found

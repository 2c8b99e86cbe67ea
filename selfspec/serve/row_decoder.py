"""Run requests that join and leave, of one wrapped model: read them, begin their batches, and run rounds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from selfspec.accept import default_rule
from selfspec.arguments import shown
from selfspec.cache.shared_cache import SharedCache
from selfspec.control.controller import Controller
from selfspec.decode.batch import Batch
from selfspec.decode.generation import JoiningRows
from selfspec.decode.group import Group
from selfspec.decode.loop import PhaseClock, Prefill, run_round
from selfspec.decode.noise import Noise
from selfspec.decode.output import Round, ScoreRecords, Stats
from selfspec.decode.request import read_request
from selfspec.decode.stopping import Sequences
from selfspec.draft.draft import Budget
from selfspec.draft.drafter import OwnBytes
from selfspec.errors import UnsupportedOptionError
from selfspec.model.identity import vocabulary_size
from selfspec.model.positions import boundaries, tables_of
from selfspec.model.tensor_parallel import check_on_one_process
from selfspec.runtime.runner import ModelRunner, runner_for
from selfspec.serve.by_load import LoadGate
from selfspec.serve.events import TokenLogprobs
from selfspec.serve.row_request import RowRequest

_NO_CONTEXT = 1 << 20


@dataclass(frozen=True)
class LogprobRecords(ScoreRecords):
    """Keeps a row's log-probabilities of a round until its tokens are known, and reports the `top` likeliest."""

    top: int = 0
    _kept: list[Tensor] = field(default_factory=list)

    def keep(
        self, scores: Tensor, logits: Tensor, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, ...] | None:
        self._kept.append(logits[0, : counts[0]].float().log_softmax(-1))
        return super().keep(scores, logits, rows, starts, counts)

    def take(self, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities at the places of the committed tokens, and drop what was kept."""
        kept = [*self._kept]
        self._kept.clear()
        if not tokens:
            return ()
        places = torch.cat(kept)[: len(tokens)]
        own = places.gather(1, torch.tensor(tokens, device=places.device)[:, None])[:, 0].tolist()
        best = places.topk(min(self.top, places.shape[1]))
        each = zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True)
        return tuple(
            TokenLogprobs(token, value, tuple(zip(*likeliest, strict=True))) for token, value, *likeliest in each
        )


@dataclass(frozen=True)
class CacheSizes:
    """Bytes that the cache of a model takes."""

    slot: int  # keys and values of one token, in all layers including those of drafters
    row: int  # states of one row, including those of a round's nodes and of drafters; 0 if there are none
    slack: int  # slots of each row after its committed tokens, for drafts

    def of(self, rows: int, tokens: int) -> int:
        """Return the bytes of `rows` rows with room for `tokens` committed tokens each."""
        return rows * ((tokens + self.slack) * self.slot + self.row)


class RowDecoder:
    """Runs rows of one wrapped model; only `row` may be called by several threads at once.

    `context` is the most tokens of a row.
    """

    def __init__(self, rows: JoiningRows) -> None:
        target, limits = rows.target, rows.target.limits
        check_on_one_process(target.model, "an engine of requests that come and go")
        if limits is not None and limits.cache != "exact":
            raise UnsupportedOptionError(
                f"an engine of requests that come and go keeps exact keys and values on the model's device; load the "
                f"model without cache={limits.cache!r}"
            )
        self._target = target
        self._drafting = rows.drafting
        self._gates = {greedy: LoadGate() if each.yields_to_load else None for greedy, each in rows.drafting.items()}
        self._plain = Controller(Budget.chain(0))
        self._rule, self._check = rows.rule, rows.check
        self._config = target.model.config.get_text_config(decoder=True)
        self.context: int = getattr(self._config, "max_position_embeddings", None) or _NO_CONTEXT
        self._slack = max(each.controller.most.nodes for each in self._drafting.values())
        self._runner: ModelRunner | None = None
        self.limits = limits
        self.stats = Stats()
        # Use the host's clock: events of a device would pile up as long as the engine runs.
        self._clock = PhaseClock(torch.device("cpu"))
        self.plain_rounds = 0

    def row(self, asked: RowRequest) -> Group:
        """Check a request as `generate` does, and make a group of one row, from any thread.

        A PromptError: the prompt is empty, has ids outside the vocabulary, or leaves no room in the context; an
        UnsupportedOptionError names an option that cannot be honoured.
        """
        if not isinstance(asked, RowRequest):
            raise UnsupportedOptionError(
                f"a request is a RowRequest, got {shown(asked)}; write RowRequest(input_ids=(1, 2), max_new_tokens=16)"
            )
        asked.check(vocabulary_size(self._target.model))
        ids = torch.tensor([asked.input_ids], dtype=torch.long).reshape(1, -1)
        # Rows are never padded, but transformers warns if a model has no padding token.
        beside = {"pad_token_id": 0, "max_length": None, "max_new_tokens": int(asked.max_new_tokens)}
        request = read_request(
            self._target.model,
            self._target.adapter,
            ids,
            torch.ones_like(ids),
            None,
            {**asked.options, **beside},
            asked.prediction,
            text_alone=True,
        )
        seed, top = asked.seed, asked.logprobs
        couples = seed is not None or (self._rule is not None and self._rule.couples)
        noise = Noise(int(torch.randint(2**62, ()).item()) if seed is None else seed, [0], self._device)
        return Group(
            sequences=Sequences(request.input_ids, request.pad, request.text_mask),
            sampling=request.sampling.coupled() if couples else request.sampling,
            stopping=request.stopping,
            noise=noise,
            records=ScoreRecords() if top is None else LogprobRecords(top=top),
            kind=asked.kind,
            predictions=request.predictions,
            isolated=True,
            whole=request.stopping,
        )

    def tables(self, length: int) -> int:
        """Return the number of the rotary tables for a text of this length, which rows of a batch must share."""
        return tables_of(self._config, length)

    def goes_on(self, row: Group) -> bool:
        """Return whether a row that has ended must begin again with other rotary tables, and if so prepare it."""
        tokens = row.committed[0]
        assert row.whole is not None
        if row.error or row.failed or row.remaining(0) or row.whole.ends(len(tokens), tokens[-1]):
            return False
        row.unfinished.add(0)
        return True

    @property
    def resumes(self) -> bool:
        """True if a row may begin with an earlier row's keys and values: no drafter needs more of its states."""
        drafters = [each.drafter for each in self._drafting.values() if each.drafter is not None]
        depth = len(self._target.adapter.decoder_layers(self._target.model))
        return not any(each.features(depth) or each.own_bytes(self._target.model).token for each in drafters)

    def kept(self, batch: Batch, row: int) -> SharedCache:
        """Return a copy of the cache of a row that is about to leave."""
        cache = self._cache(batch.cache.cursors.limit)
        cache.hold(1, batch.cache.seq_lens[row])
        cache.take(batch.cache, row, batch.cache.seq_lens[row])
        return cache

    def begin(self, row: Group, past: SharedCache | None = None, known: int = 0) -> Prefill:
        """Begin to read a row's text but its last token, into a cache of its own, after `known` tokens of `past`."""
        self._check()
        # As in `model.generate`, a row is read again when its rotary tables change. Not even scrap slots after its end
        # may lie beyond that place, since the tables would change for all rows.
        limit = next((each for each in boundaries(self._config) if row.length <= each), self.context)
        assert row.whole is not None
        part = min(row.whole.max_new_tokens, limit + 1 - row.sequences.width)
        row.stopping = row.whole if limit == self.context else replace(row.whole, max_new_tokens=part)
        cache = self._cache(limit)
        if self._runner is None:
            self._runner = self._target.runner(cache)
        text = row.sequences.text_from(0, 0)
        batch = Batch(
            runner=self._runner.over(cache),
            cache=cache,
            groups=[row],
            noise=row.noise,
            controller=self._drafting[row.sampling.greedy].controller,
            last_tokens=torch.tensor([text[-1:]], dtype=torch.long, device=self._device),
            memories=self._target.memories,
            programs=self._target.programs,
        )
        for each in self._drafting.values():
            if each.drafter is not None:
                batch.begin(each.drafter)
        batch.hold(1, row.length)
        if past is not None:
            cache.take(past, 0, known)
        # With other tables than those of the shortest texts, read everything at once, including the last token, which
        # selects the tables.
        at_once = self.tables(len(text)) > 0
        tokens = torch.tensor([text[known:] if at_once else text[known:-1]], dtype=torch.long)
        return Prefill(batch, tokens, [len(text) - 1 - known], at_once)

    def rest(self) -> None:
        """Drop the runner while no row runs, so that the model may be changed before the next row."""
        self._runner = None

    @torch.no_grad()
    def round(self, batch: Batch, may_draft: bool = True) -> Round:
        """Run a round of a batch with room for it, and return the tokens that each row committed."""
        greedy = sum(group.sampling.greedy for group in batch.groups)
        mostly = 2 * greedy >= len(batch.groups)
        drafting, rows = self._drafting[mostly], len(batch.running)
        predicts = any(any(group.predictions) for group in batch.groups)
        few = drafting.most_rows is None or rows <= drafting.most_rows
        # Nothing stops drafts while a row has a prediction.
        gate = self._gates[mostly] if may_draft and few and not predicts else None
        drafts = may_draft and (predicts or (few and (gate is None or gate.opens(rows))))
        batch.controller = drafting.controller if drafts else self._plain
        rule = default_rule(greedy=True) if batch.sampling.decided else self._rule or default_rule(greedy=False)
        drafted, began = self.stats.drafted, time.perf_counter()
        proposer = None if drafting.drafter is None else batch.proposers[id(drafting.drafter)]
        committed = run_round(batch, proposer, rule, self.stats, self._clock)
        tokens = sum(len(row.tokens) for row in committed.rows)
        self.plain_rounds += self.stats.drafted == drafted
        if gate is not None:
            gate.count(rows, tokens, time.perf_counter() - began)
        return committed

    @torch.no_grad()
    def measured(self) -> CacheSizes:
        """Measure the bytes of a token and of a row in the cache, drafters included, by a pass over one token."""
        cache = self._cache(self.context)
        runner = runner_for(self._target.model, self._target.adapter, cache, None, self._target.substitutes)
        cache.hold(1, 1)
        runner.prefill(torch.zeros(1, 1, dtype=torch.long, device=self._device), [1])
        slots = cache.nbytes - cache.state_bytes
        cache.commit([1])
        states = cache.state_bytes * (self._slack + 2)
        drafters = {each.drafter for each in self._drafting.values() if each.drafter is not None}
        own = sum((drafter.own_bytes(self._target.model) for drafter in drafters), OwnBytes())
        return CacheSizes(slots // cache.cursors.capacity + own.token, states + own.row, self._slack)

    @property
    def _device(self) -> torch.device:
        return self._target.device or torch.device("cpu")

    def _cache(self, limit: int) -> SharedCache:
        return self._target.cache(1, limit, self._slack, self._device)

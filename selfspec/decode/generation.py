"""One call of `generate` or `stream`: iterate over it for its rounds, or ask for its output so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, MaxTimeCriteria

from selfspec.accept import Rule
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.transfer import check_kinds, is_callers
from selfspec.compat import OUTPUT_CACHE
from selfspec.control import Controller
from selfspec.decode.batch import Batch
from selfspec.decode.encoder_inputs import cross_attentions
from selfspec.decode.group import Group
from selfspec.decode.loop import rounds
from selfspec.decode.noise import Noise
from selfspec.decode.output import EncoderDecoderOutput, GenerateOutput, Round, streamed
from selfspec.decode.request import Request
from selfspec.decode.score_record import ScoreRecord, ScoreRecords
from selfspec.decode.sequences import Sequences
from selfspec.decode.stats import Stats
from selfspec.decode.target import Target
from selfspec.draft import Drafter
from selfspec.errors import NonFiniteLogitsError, UnsupportedOptionError
from selfspec.model.tensor_parallel import ranks_of


class Generation(Iterator[Round]):
    """One call of `generate` or `stream`. Each iteration runs one round.

    It may be abandoned after any round.

    Attributes:
        stats: counts so far. Times and bytes are filled in when the generation ends or is closed.
        lossless: whether the tokens are distributed exactly as the full model's own; False under a relaxed rule and if
            keys and values are kept in fewer bits.
    """

    def __init__(
        self,
        target: Target,
        request: Request,
        *,
        draft: Drafter | None,
        control: Controller,
        rule: Rule,
        seed: int | None,
    ) -> None:
        device = target.device or request.input_ids.device
        rows = request.input_ids.shape[0]
        longest = max(request.lengths) + request.stopping.max_new_tokens
        if target.limits is not None:
            target.limits.check(rows, longest)
        # No draft is deeper than the tokens left to generate, whatever the controller allows.
        slack = control.most.within(request.stopping.max_new_tokens).nodes + (draft.own_nodes if draft else 0)
        cache = target.cache(rows, longest, slack, device)
        cache.source = request.source
        if request.offsets is not None:
            cache.shift(request.offsets)
        if seed is None:
            seed = int(torch.randint(2**62, ()).item())
        ranks = ranks_of(target.model)
        if ranks is not None:
            _check_no_clock(request)
            seed = ranks.of_first(seed)
        self.stats = Stats()
        self._request = request
        self.lossless = rule.lossless and cache.lossless
        self._past = _past_to_fill(request, cache)
        # Only the rounds refer to the batch, and through it to the cache, so its memory is freed when they end.
        self._group = Group(
            sequences=Sequences(request.input_ids, request.pad, request.text_mask),
            sampling=request.sampling.coupled() if rule.couples else request.sampling,
            stopping=request.stopping,
            noise=Noise(seed, range(rows), device),
            records=ScoreRecords(
                scores=ScoreRecord(request.pad) if request.scores else None,
                logits=ScoreRecord(request.pad) if request.logits else None,
            ),
        )
        batch = Batch(
            runner=target.runner(cache),
            cache=cache,
            groups=[self._group],
            noise=self._group.noise,
            controller=control,
            # Embeddings end with no token id; the first round reads them, and not these zeros.
            last_tokens=(torch.zeros(rows, 1, dtype=torch.long) if request.embeddings else request.read[:, -1:]).to(
                device
            ),
            first_embeddings=request.read[:, -1:].to(device) if request.embeddings else None,
            memories=target.memories,
            programs=target.programs,
            prefill_width=request.prefill_width,
        )
        proposer = None if draft is None else batch.begin(draft)
        self._rounds = rounds(batch, request, proposer, rule, self.stats, self._past)
        if request.streamer is not None:
            self._rounds = streamed(self._rounds, request.input_ids, request.streamer)
        self._inference = torch.is_inference_mode_enabled()

    def __next__(self) -> Round:
        """Run one round.

        Raises:
            NonFiniteLogitsError: after the last round, if a row ended because logits were not finite.
        """
        # Tensors of one mode cannot be written in the other, and the caller's mode may have changed.
        with torch.inference_mode(self._inference), torch.no_grad():
            for committed in self._rounds:
                return committed
        self._check_finite()
        raise StopIteration

    def close(self) -> None:
        """Stop here and complete `stats`; nothing else requires this call."""
        with torch.inference_mode(self._inference):
            self._rounds.close()

    def finish(self) -> GenerateOutput:
        """Run all remaining rounds and return the output.

        Raises:
            NonFiniteLogitsError: a row ended because the target's logits became NaN or infinite.
        """
        with torch.inference_mode(self._inference), torch.no_grad():
            deque(self._rounds, maxlen=0)
        self._check_finite()
        return self.output()

    def _check_finite(self) -> None:
        failed = tuple(sorted(self._group.failed))
        self._group.failed.clear()
        if failed:
            raise NonFiniteLogitsError(self.output(), failed)

    def answer(self) -> GenerateOutput | Tensor:
        """Run all remaining rounds and return what `model.generate` would return.

        Returns:
            The sequences, `[batch, length]`; the whole output if `return_dict_in_generate` is set.

        Raises:
            NonFiniteLogitsError: a row ended because the target's logits became NaN or infinite.
        """
        output, request = self.finish(), self._request
        if isinstance(output, EncoderDecoderOutput) and request.source is not None and request.aligns is not None:
            output.cross_attentions = cross_attentions(request.aligns, request.source, request.mask, output.sequences)
        return output if request.whole else output.sequences

    def output(self) -> GenerateOutput:
        """Return the output generated so far."""
        committed, records = self._group.committed, self._group.records
        longest = max(len(tokens) for tokens in committed)
        padded = [tokens + [self._request.pad] * (longest - len(tokens)) for tokens in committed]
        prompts = self._request.input_ids
        new = torch.tensor(padded, dtype=torch.long, device=prompts.device).reshape(len(padded), longest)
        lengths = tuple(len(tokens) for tokens in committed)
        text = tuple(self._group.sequences.text_ends.get(row, length) for row, length in enumerate(lengths))
        made = GenerateOutput if self._request.source is None else EncoderDecoderOutput
        return made(
            sequences=torch.cat([prompts, new], 1),
            lengths=text,
            stats=self.stats,
            lossless=self.lossless,
            scores=None if records.scores is None else records.scores.padded(lengths),
            logits=None if records.logits is None else records.logits.padded(lengths),
            **{OUTPUT_CACHE: self._handed_out() if self._past and not self._group.unfinished else None},
        )

    def _handed_out(self) -> Cache | None:
        """Return the cache as `transformers` does: together with the encoder's, if there is one."""
        source = self._request.source
        return self._past if source is None or self._past is None else source.beside(self._past)


def _past_to_fill(request: Request, cache: SharedCache) -> Cache | None:
    """Return the cache that receives keys and values at the end: the caller's or a new one; None: no cache does."""
    if request.past is not None:
        check_kinds(request.past, cache)
    if request.past is None or not is_callers(request.past):
        return DynamicCache() if request.whole else None
    stopping = request.stopping
    apart = len(request.lengths) > 1 and bool(stopping.eos or stopping.criteria) and not stopping.fills
    if apart and not cache.rolls_back_by_cursor:
        raise UnsupportedOptionError(
            "a cache is not supported for several rows of a recurrent model that may end at different places, "
            "for its states would be those of different lengths; pass one row at a time"
        )
    return request.past


def _check_no_clock(request: Request) -> None:
    """Refuse a time limit, which would stop one process of a model and leave the other processes waiting.

    Raises:
        UnsupportedOptionError: the request has a time limit.
    """
    if any(isinstance(criterion, MaxTimeCriteria) for criterion in request.stopping.criteria):
        raise UnsupportedOptionError(
            "max_time is not supported where a model lies on several processes, whose clocks differ; bound the text by "
            "max_new_tokens"
        )

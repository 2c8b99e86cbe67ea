"""One call of `generate` or `stream`: iterate over it for its rounds, or ask for its output so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from inspect import currentframe
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)

from selfspec.accept import Rule
from selfspec.architecture import Adapter
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.shared_layer import CacheKind
from selfspec.cache.transfer import check_kinds, is_callers
from selfspec.compat import OUTPUT_CACHE
from selfspec.control import Controller
from selfspec.decode.batch import Batch
from selfspec.decode.group import Group
from selfspec.decode.inputs import cross_attentions
from selfspec.decode.loop import rounds
from selfspec.decode.noise import Noise
from selfspec.decode.options import check_not_dropped, unsupported
from selfspec.decode.output import (
    EncoderDecoderOutput,
    GenerateOutput,
    Round,
    ScoreRecord,
    ScoreRecords,
    Stats,
    streamed,
)
from selfspec.decode.request import Prepared, Request, prepared_request
from selfspec.decode.stopping import Sequences
from selfspec.draft import Drafter
from selfspec.draft.prediction import AnyPrediction, read_predictions
from selfspec.errors import NonFiniteLogitsError, PromptError, UnsupportedOptionError
from selfspec.model.identity import weight_of
from selfspec.model.registry import has_encoder
from selfspec.model.substitutes import Substitutes
from selfspec.model.tensor_parallel import ranks_of
from selfspec.model.view import view_with
from selfspec.runtime.graph_cache import BoundPrograms, GraphCache
from selfspec.runtime.runner import ModelRunner, runner_for


class Generation(Iterator[Round]):
    """Runs one call of `generate` or `stream`: each iteration runs one round, and it may be abandoned after any round.

    Attributes:
        stats: counts so far; times and bytes are filled in when the generation ends or is closed.
        lossless: True if tokens have exactly the full model's distribution: no relaxed rule, no cache in fewer bits.
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
        slack = control.most.within(request.stopping.max_new_tokens).nodes
        cache = target.cache(rows, longest, slack, device)
        cache.source = request.source
        if request.offsets is not None:
            cache.cursors.offsets = list(request.offsets)
        if seed is None:
            seed = int(torch.randint(2**62, ()).item())
        ranks = ranks_of(target.model)
        if ranks is not None:
            if any(isinstance(criterion, MaxTimeCriteria) for criterion in request.stopping.criteria):
                # It would stop one process and leave the others waiting.
                raise UnsupportedOptionError(
                    "max_time is not supported where a model lies on several processes, whose clocks differ; bound the "
                    "text by max_new_tokens"
                )
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
            predictions=request.predictions,
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
        """Run all remaining rounds and return what `model.generate` would: sequences, `[batch, length]`, or the output.

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
        past, source, made = self._past or None, self._request.source, GenerateOutput
        if source is not None:
            # As in `transformers`, the cache comes together with the encoder's.
            past, made = None if past is None else source.beside(past), EncoderDecoderOutput
        return made(
            sequences=torch.cat([prompts, new], 1),
            lengths=text,
            stats=self.stats,
            lossless=self.lossless,
            scores=None if records.scores is None else records.scores.padded(lengths),
            logits=None if records.logits is None else records.logits.padded(lengths),
            **{OUTPUT_CACHE: None if self._group.unfinished else past},
        )


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


@dataclass(frozen=True)
class Limits:
    """Numbers of tokens that memory is reserved for, over all rows of a batch, and how keys and values are kept."""

    context: int  # tokens of prompts and texts
    at_once: int  # tokens of prompts that one pass reads
    cache: CacheKind = "exact"

    def check(self, rows: int, tokens: int) -> None:
        """Refuse a batch of `rows` rows of up to `tokens` tokens if the cache has no room for it."""
        if rows * tokens > self.context:
            raise PromptError(
                f"{rows} x {tokens} tokens (rows x prompt and max_new_tokens) are beyond the {self.context} that the "
                f"memory budget has room for; ask for fewer new tokens, or raise context to {rows * tokens}"
            )


@dataclass(frozen=True)
class Target:
    """A wrapped model as generations run it, with the drafters' `memories`; `limits` apply under a memory budget.

    `known` are the programs of the model as it is now, if a call has looked them up.
    """

    model: PreTrainedModel
    adapter: Adapter
    programs: GraphCache
    substitutes: Substitutes
    memories: dict[Hashable, object]
    limits: Limits | None
    known: BoundPrograms | None = None

    @property
    def device(self) -> torch.device | None:
        """Device of token ids and logits; None: all weights are offloaded, and the prompt's device is used."""
        device: torch.device = weight_of(self.model.get_input_embeddings()).device
        return None if device.type == "meta" else device

    def cache(self, rows: int, limit: int, slack: int, device: torch.device) -> SharedCache:
        """Make a cache for rows of up to `limit` committed tokens, and `slack` more for drafts."""
        kept = "exact" if self.limits is None else self.limits.cache
        bucket = self.programs.runtime.bucket
        return self.adapter.shared_cache(self.model, rows, limit, slack, device=device, bucket=bucket, kept=kept)

    def runner(self, cache: SharedCache) -> ModelRunner:
        """Make a runner of passes over a cache."""
        return runner_for(self.model, self.adapter, cache, self.programs, self.substitutes, self.known)


@dataclass(frozen=True)
class JoiningDraft:
    """Says how up to `most_rows` rows that come and go draft; `yields_to_load`: measured times may stop drafts."""

    drafter: Drafter | None
    controller: Controller
    yields_to_load: bool = False
    most_rows: int | None = None


@dataclass(frozen=True)
class JoiningRows:
    """Holds what decodes rows that come and go. `drafting` goes by whether the majority of rows is greedy.

    `rule` judges rows that are sampled and not coupled. `check` refuses a drafter that no longer fits the model.
    """

    target: Target
    drafting: Mapping[bool, JoiningDraft]
    rule: Rule | None
    check: Callable[[], None]


# Seeds of pieces differ by multiples of this, so that neighbouring seeds do not give two pieces the same noise.
_APART = 0x9E3779B97F4A7C15


@dataclass
class Transcript(GenerateOutput):
    """Output of a model's own `generate` for all pieces of its input; `stats` add up all its calls, repeated ones too.

    Attributes:
        sequences: token ids as that `generate` returns them, `[batch, length]`: for speech the text alone.
        lengths: tokens of each row without the padding at its end.
        segments: segments of each row, if that `generate` returns them; its documentation describes them.
        token_timestamps: seconds of each token, `[batch, length]`, if `return_token_timestamps` asks for them.
    """

    segments: list[list[dict[str, Any]]] | None = None
    token_timestamps: Tensor | None = None


def has_own_generate(model: PreTrainedModel) -> bool:
    """Return whether a model with an encoder has a `generate` of its own."""
    return has_encoder(model) and type(model).generate is not GenerationMixin.generate


def generate_in_pieces(
    model: PreTrainedModel,
    adapter: Adapter,
    begin: Callable[[Request, int | None], Generation],
    seed: int | None,
    inputs: Tensor | None,
    options: Mapping[str, Any],
    prediction: AnyPrediction = None,
) -> GenerateOutput:
    """Run a model's own `generate` of `inputs` or options, with selfspec's decoding in each call of the common one.

    `begin` begins such a call: the first one with `seed`, later ones with seeds derived from it. Raises
    UnsupportedOptionError for an option that cannot be honoured, and the errors of the model's `generate`.
    """
    if options.get("output_attentions"):
        raise unsupported("output_attentions")
    parts: list[Generation] = []
    # The text goes on in the same prediction from piece to piece.
    readable, tokenizer = weight_of(model.get_input_embeddings()).shape[0], options.get("tokenizer")
    predictions = [] if prediction is None else read_predictions(prediction, 1, 1, readable, tokenizer)

    def decode(
        asking: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> GenerateOutput | Tensor:
        check_not_dropped(currentframe())
        prepared = Prepared(
            input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor, model_kwargs
        )
        request = prepared_request(asking, adapter, prepared)
        if predictions and len(request.lengths) > 1:
            raise UnsupportedOptionError(
                f"prediction: the generate of {type(model).__name__} reads several rows in pieces of its own; pass one"
            )
        request = replace(request, predictions=predictions)
        own_seed = None if seed is None else (seed + len(parts) * _APART + 2**63) % 2**64 - 2**63
        parts.append(begin(request, own_seed))
        return parts[-1].answer()

    given = () if inputs is None else (inputs,)
    # For timestamps of tokens Whisper sets another kernel and keeps it, while other threads may run the model.
    asked = _set_apart(model) if options.get("return_token_timestamps") else model
    result = type(model).generate(asked, *given, **options, custom_generate=decode)
    return _together(model, result, parts)


def _set_apart(model: PreTrainedModel) -> PreTrainedModel:
    """Make a view of a model with its own config and hooks: `transformers` adds hooks to return attentions."""
    config = copy(model.config)

    def apart(module: nn.Module) -> nn.Module:
        view = view_with(module, {name: apart(child) for name, child in module._modules.items() if child is not None})
        view.__dict__["_forward_hooks"] = module._forward_hooks.copy()
        if view.__dict__.get("config") is model.config:
            view.__dict__["config"] = config
        return view

    return cast(PreTrainedModel, apart(model))


def _together(model: PreTrainedModel, result: Any, parts: list[Generation]) -> GenerateOutput:
    """Add lengths, stats and lossless to the output of the model's own `generate`."""
    if isinstance(result, GenerateOutput):
        found = result
    else:
        found = Transcript(**({"sequences": result} if isinstance(result, Tensor) else dict(result)))
    config = model.generation_config
    pad = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
    filling = torch.isin(found.sequences, torch.tensor([] if pad is None else pad, device=found.sequences.device))
    # Count the tokens before the padding at the end.
    found.lengths = tuple((~filling).flip(1).cumsum(1).gt(0).sum(1).tolist())
    found.stats = Stats.together([part.stats for part in parts]) if parts else Stats()
    found.lossless = all(part.lossless for part in parts)
    return found

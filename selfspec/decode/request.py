"""Read a call of `generate` into a `Request` and check it, before any forward pass.

The call goes through `model.generate` with a `custom_generate` that stores its arguments, so that defaults,
`GenerationConfig`, overrides and warpers mean the same. Options that cannot be honoured are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation import BaseStreamer, StoppingCriteriaList, StopStringCriteria

from selfspec.architecture import Adapter, takes
from selfspec.arguments import check_callables, check_kind, check_methods
from selfspec.cache.source import Source
from selfspec.cache.transfer import check_past, check_rows, is_callers, past_length, past_of
from selfspec.compat import CACHE_NAMES, cache_argument
from selfspec.decode.group import Sampling
from selfspec.decode.inputs import (
    beside_text,
    change_nothing,
    checked_embeddings,
    checked_ids,
    checked_mask,
    decoder_inputs,
    first_inputs,
    moves_positions,
    read_by_stock,
    read_source,
)
from selfspec.decode.options import (
    Scope,
    check_keywords,
    check_model_inputs,
    check_options,
    check_values,
    unsupported,
    value_in_call,
)
from selfspec.decode.processors import read_processing, widened
from selfspec.decode.stopping import Stopping, read_stopping
from selfspec.draft.prediction import AnyPrediction, Prediction, read_predictions
from selfspec.errors import PromptError, UnsupportedModelError, UnsupportedOptionError
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.positions import tables_change
from selfspec.model.registry import has_encoder
from selfspec.model.sizes import context_of


@dataclass(frozen=True)
class Request:
    """One call, ready to run."""

    input_ids: Tensor  # text that processors see and that is returned, `[batch, prompt]`; empty with embeddings alone
    read: Tensor  # prefilled: ids, `[batch, columns]`, or embeddings, `[..., hidden]`; may lack columns of `past`
    mask: Tensor  # which columns hold a token, those of `past` included, `[batch, columns]`, bool
    lengths: tuple[int, ...]  # tokens of each prompt, without padding
    sampling: Sampling
    stopping: Stopping
    pad: int
    whole: bool  # True if `return_dict_in_generate` asks for an output object
    scores: bool
    logits: bool
    streamer: BaseStreamer | None = None
    past: Cache | None = None  # keys and values of the first columns; a caller's receives those of new tokens, too
    offsets: tuple[int, ...] | None = None  # position ids of new tokens minus index, if the stock model read prompts
    prefill_width: int | None = None  # most tokens of a prompt in one pass (`prefill_chunk_size`); None: any number
    anew: bool = False  # True if the tokens of `past` are read again, since other rotary tables apply to them now
    source: Source | None = None
    aligns: PreTrainedModel | None = None  # gives cross-attentions for timestamps of tokens; None: not asked for
    predictions: Sequence[Prediction | None] = ()  # of the rows' new texts; empty: none

    @property
    def known(self) -> tuple[int, ...]:
        """Number of tokens of each prompt that `past` holds, so that they are not read."""
        if self.past is None or self.anew:
            return (0,) * len(self.lengths)
        return tuple(self.mask[:, : past_length(self.past)].sum(1).tolist())

    @property
    def embeddings(self) -> bool:
        """True if prompts are embeddings, so that their last position has no token id."""
        return self.read.is_floating_point()

    @property
    def text_mask(self) -> Tensor | None:
        """Mask of the columns of `input_ids` that hold a token; None if more than these ids is read."""
        return None if self.embeddings or self.mask.shape != self.input_ids.shape else self.mask


@dataclass(frozen=True)
class Prepared:
    """Holds what a `custom_generate` callable gets; `inputs_tensor` is the encoder's input, before repeated rows."""

    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    inputs_tensor: Tensor | None
    model_kwargs: Mapping[str, Any]


def read_request(
    model: PreTrainedModel,
    adapter: Adapter,
    inputs: Tensor | None,
    attention_mask: Tensor | None,
    generation_config: GenerationConfig | None,
    options: Mapping[str, Any],
    prediction: AnyPrediction = None,
    *,
    text_alone: bool = False,
) -> Request:
    """Check a call of `generate` before `transformers` reads it, and return it as a `Request`.

    `inputs` are prompts, `[batch, prompt]`, padded left; without a mask, `transformers` finds the padding. `text_alone`
    refuses inputs such as images. Raises PromptError for a prompt or mask that does not fit the model or its context,
    and UnsupportedOptionError for an option that cannot be honoured.
    """
    check_kind("generation_config", generation_config, GenerationConfig, "write GenerationConfig(max_new_tokens=64)")
    encodes = has_encoder(model)
    embeddings = options.get("inputs_embeds")
    # The input of an encoder may not be text.
    other = encodes and isinstance(inputs, Tensor) and inputs.is_floating_point()
    input_ids = inputs if inputs is None or other else checked_ids(model, inputs)
    read = input_ids if embeddings is None or encodes else checked_embeddings(model, embeddings)
    options = dict(options)
    if encodes and read is None:
        names = (model.main_input_name, "inputs_embeds", "encoder_outputs")
        read = next((options[name] for name in names if options.get(name) is not None), None)
        # Of an encoder's output, take its states.
        read = read if read is None or isinstance(read, Tensor) else read[0]
    if read is None:
        raise PromptError("no prompt: pass input_ids, a LongTensor of shape [batch, prompt]")
    past = _taken_cache(options)
    if past is not None:
        check_past(past)
        options[cache_argument(model)] = past
    masks = {}
    if attention_mask is not None and encodes:
        options["attention_mask"] = attention_mask
    elif attention_mask is not None:
        masks["attention_mask"] = checked_mask(attention_mask, read, past)
    # transformers does not pass these two to a callable.
    streamer, tokenizer = options.pop("streamer", None), options.pop("tokenizer", None)
    # It matters only if code from the model's folder generates, which is not the case here.
    options.pop("trust_remote_code", None)
    if options.get("custom_generate") is None:
        options.pop("custom_generate", None)
    check_keywords(model, generation_config, options)
    check_methods("streamer", streamer, ("put", "end"), "pass a TextStreamer of transformers")
    value_of = partial(value_in_call, options=options, configs=(generation_config, model.generation_config))
    check_values(value_of, _scope(model, read))
    if value_of("token_healing"):
        raise unsupported("token_healing")
    asked, strings = model, value_of("stop_strings")
    if strings is not None:
        # Make their criterion here, since `transformers` would lack the tokenizer.
        criteria = [*(options.get("stopping_criteria") or ()), _stop_criterion(strings, tokenizer)]
        options |= {"stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}
        # Copies: the model's own defaults are read in any case, and must not change.
        asked = copy(model)
        asked.generation_config = _without_strings(model.generation_config)
        generation_config = None if generation_config is None else _without_strings(generation_config)
    handed: list[Prepared] = []

    # transformers passes on the input of the encoder if a parameter has this name.
    def receive(
        _model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor,
        **kwargs: Any,
    ) -> None:
        handed[:] = [Prepared(input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor, kwargs)]

    # Use the class's `generate`: a model loaded with one from its folder has another on the instance. The `generate` of
    # a class with an encoder may call the common one several times, and this is one of the calls.
    generate = GenerationMixin.generate if encodes else type(model).generate
    try:
        generate(asked, input_ids, generation_config=generation_config, custom_generate=receive, **masks, **options)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise UnsupportedOptionError(f"transformers refuses these generation options: {error}") from error
    if not handed:
        raise UnsupportedModelError(
            f"{type(model).__name__} has a generate of its own, which does not hand over to others; wrap the causal LM "
            "inside it"
        )
    prepared = handed[0]
    inferred = prepared.model_kwargs.get("attention_mask")
    if not masks and not encodes and isinstance(inferred, Tensor) and bool((inferred.diff(dim=1) < 0).any()):
        raise PromptError(
            "the padding token is within the text, and without a mask `transformers` takes it for padding there: pass "
            "attention_mask=torch.ones_like(input_ids) if it is text, or a mask with zeros where it is none"
        )
    # num_return_sequences repeats rows; their masks have to follow.
    rows = prepared.input_ids.shape[0]
    repeated = {name: mask.repeat_interleave(rows // mask.shape[0], 0) for name, mask in masks.items()}
    prepared = replace(prepared, model_kwargs={**prepared.model_kwargs, **repeated})
    request = prepared_request(model, adapter, prepared, prediction, tokenizer, text_alone=text_alone)
    if streamer is not None and request.input_ids.shape[0] > 1:
        raise UnsupportedOptionError(
            f"streamer: it takes one row, this batch has {request.input_ids.shape[0]}; iterate over spec.stream(...) "
            "for what each row commits"
        )
    return replace(request, streamer=streamer)


def _taken_cache(options: dict[str, Any]) -> Cache | None:
    """Remove the cache from keywords of `generate`, under any of its names, and return it."""
    given = {name: options.pop(name) for name in CACHE_NAMES if name in options}
    caches = {name: cache for name, cache in given.items() if cache is not None}
    if len(caches) > 1:
        raise UnsupportedOptionError(f"{' and '.join(caches)} name the same argument; pass cache alone")
    return next(iter(caches.values()), None)


def _without_strings(config: GenerationConfig) -> GenerationConfig:
    config = deepcopy(config)
    config.stop_strings = None
    return config


def _stop_criterion(strings: str | list[str], tokenizer: PreTrainedTokenizerBase | None) -> StopStringCriteria:
    if tokenizer is None:
        raise UnsupportedOptionError("stop_strings needs the model's tokenizer: pass tokenizer=... as well")
    check_methods("tokenizer", tokenizer, ("get_vocab",), "pass the model's own, as AutoTokenizer loads it")
    try:
        return StopStringCriteria(tokenizer, strings)
    # It cannot look into the tokens of every kind of vocabulary.
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise UnsupportedOptionError(
            f"transformers cannot look for stop_strings in the tokens of {type(tokenizer).__name__} ({error}); end "
            "rows by a criterion of your own: stopping_criteria=[...]"
        ) from error


def prepared_request(
    model: PreTrainedModel,
    adapter: Adapter,
    prepared: Prepared,
    prediction: AnyPrediction = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    text_alone: bool = False,
) -> Request:
    """Check what `transformers` hands to a `custom_generate` callable, and return it as a `Request`.

    Inputs beside the text are read, and what depends on the inputs that `transformers` has prepared is checked.
    """
    check_callables("logits_processor", prepared.logits_processor)
    check_callables("stopping_criteria", prepared.stopping_criteria)
    input_ids, generation_config = prepared.input_ids, prepared.generation_config
    model_kwargs = dict(prepared.model_kwargs)
    check_values(lambda name: getattr(generation_config, name, None), _scope(model, input_ids))
    if input_ids.numel() or model_kwargs.get("inputs_embeds") is None or has_encoder(model):
        input_ids = checked_ids(model, input_ids)
    aligns = has_encoder(model) and bool(getattr(generation_config, "return_token_timestamps", False))
    if aligns:
        # Whisper's generate, which asks for timestamps, reads the cross-attentions alone.
        generation_config = copy(generation_config)
        generation_config.output_attentions = model_kwargs["output_attentions"] = None
    check_options(model, generation_config)
    inputs, source = first_inputs(model, input_ids, model_kwargs), None
    if has_encoder(model):
        if text_alone:
            raise UnsupportedOptionError(
                f"{type(model).__name__} has an encoder, and models loaded within a budget read text alone; load it "
                "whole"
            )
        source, inputs = read_source(model, adapter, inputs, prepared.inputs_tensor), decoder_inputs(inputs)
    embeddings = inputs.get("inputs_embeds")
    read = checked_embeddings(model, embeddings) if embeddings is not None else inputs["input_ids"].long()
    if len(input_ids) != len(read):
        raise PromptError(f"input_ids hold {len(input_ids)} rows, inputs_embeds {len(read)}; they must agree")
    past = past_of(inputs)
    if past is not None:
        check_past(past)
        check_rows(past, read.shape[0])
    mask = inputs.get("attention_mask")
    if mask is None:
        columns = _columns(read, past, generation_config)
        mask = torch.ones(read.shape[0], columns, dtype=torch.long, device=read.device)
    mask = checked_mask(mask, read, past)
    config = model.config.get_text_config(decoder=True)
    # `transformers` passes no position_ids if the forward does not name them; rotary models use only differences.
    counted = takes(model, "position_ids") and inputs.get("position_ids") is None and not has_encoder(model)
    if counted and not getattr(config, "rope_parameters", None) and not bool(mask.all()):
        raise UnsupportedOptionError(
            f"padded rows: the forward of {type(model).__name__} names no position_ids, so that transformers counts "
            "padding as positions; name them in its signature, or pass rows of one length, or one row at a time"
        )
    offsets: tuple[int, ...] | None = None
    moved = moves_positions(model, inputs, mask)
    if moved or (beside_text(inputs) and not change_nothing(model, adapter, inputs, mask)):
        if text_alone:
            raise UnsupportedOptionError(
                f"{', '.join(beside_text(inputs) or ['position_ids'])}: rows that come and go, and models loaded "
                "within a budget, read text alone; call generate of a model that is loaded whole"
            )
        past, offsets = read_by_stock(model, adapter, inputs, mask)
        # The stock model has used the positions; those of new tokens were compared with its own.
        inputs = {**inputs, "position_ids": None if inputs.get("position_ids") is None else mask.cumsum(1) - 1}
    check_model_inputs(config, {**inputs, "attention_mask": mask}, read.shape[1], generation_config)
    # transformers has chosen the padding token.
    pad = generation_config._pad_token_tensor
    stopping = read_stopping(prepared.stopping_criteria, input_ids.shape[1], generation_config.max_length)
    max_new_tokens = stopping.max_new_tokens
    context = context_of(config)
    lengths = tuple(mask.sum(1).tolist())
    whole = bool(generation_config.return_dict_in_generate)
    ends = [length + max(offset, 0) for length, offset in zip(lengths, offsets or (0,) * len(lengths), strict=True)]
    if context is not None and max(ends) + max_new_tokens > context:
        room = context - max(ends)
        remedy = f"ask for at most {room} new tokens or shorten the prompt" if room > 0 else "shorten the prompt"
        raise PromptError(
            f"prompt ({max(ends)} tokens) plus max_new_tokens ({max_new_tokens}) is beyond the model's context of "
            f"{context}; {remedy}"
        )
    scope = _scope(model, read)
    held = mask[:, : 0 if past is None else past_length(past)].sum(1).tolist()
    # Later passes may rotate by other tables than those that the cache was made with.
    anew = past is not None and offsets is None and tables_change(config, min(held), max(lengths) - 1)
    if anew and read.shape[1] < mask.shape[1]:
        raise UnsupportedOptionError(
            f"the cache holds {max(held)} tokens that were rotated by other tables than this text of "
            f"{max(lengths)}, so they must be read again; pass the whole conversation as input_ids"
        )
    # The rows of a prompt are predicted alike.
    repeated, readable = generation_config.num_return_sequences or 1, scope.readable
    predictions = (
        ()
        if prediction is None
        else read_predictions(prediction, len(lengths) // repeated, repeated, readable, tokenizer)
    )
    # The padding id may be no token if nothing is padded; processors still need a valid one.
    padding = 0 if pad is None else int(pad.flatten()[0])
    return Request(
        input_ids=input_ids,
        read=read,
        mask=mask.bool(),
        lengths=lengths,
        sampling=Sampling(
            read_processing(
                widened(prepared.logits_processor, scope.readable - scope.vocabulary),
                stopping.eos,
                input_ids.shape[1] + max_new_tokens,
            ),
            greedy=not generation_config.do_sample,
        ),
        stopping=stopping,
        pad=padding if 0 <= padding < scope.readable else 0,
        whole=whole,
        scores=whole and bool(generation_config.output_scores),
        logits=whole and bool(generation_config.output_logits),
        past=past,
        offsets=offsets,
        prefill_width=generation_config.prefill_chunk_size,
        anew=anew,
        source=source,
        aligns=model if aligns else None,
        predictions=predictions,
    )


def _columns(read: Tensor, past: Cache | None, generation_config: GenerationConfig) -> int:
    """Return the number of columns of the mask of ones that `transformers` left out."""
    if past is not None and not is_callers(past):
        return past_length(past) + read.shape[1]
    if past is not None and not read.is_floating_point():
        return int(getattr(generation_config, "_mask_length", read.shape[1]))
    return read.shape[1]


def _scope(model: PreTrainedModel, read: Tensor) -> Scope:
    return Scope(vocabulary_size(model), weight_of(model.get_input_embeddings()).shape[0], len(read))

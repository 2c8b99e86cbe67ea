"""What a caller asked for, checked and in one form, before any forward pass.

`transformers` itself reads the arguments: the call goes through `model.generate` with a `custom_generate` that hands
back what it was given. So defaults, `GenerationConfig`, overrides and logits warpers mean what they mean there. What
cannot be honoured is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer, StoppingCriteriaList, StopStringCriteria

from selfspec.arguments import check_callables, check_kind, check_methods
from selfspec.errors import PromptError, UnsupportedOptionError
from selfspec.option_values import Scope, check_values, value_in_call
from selfspec.options import check_keywords, check_options, unsupported
from selfspec.past import check_past
from selfspec.processing import read_processing
from selfspec.prompt import check_mask, checked_prompt
from selfspec.sampling import Sampling
from selfspec.stopping import Stopping, read_stopping


@dataclass(frozen=True)
class Returned:
    """What a caller of `transformers`' `generate` asks back.

    Attributes:
        whole: an output object rather than the sequences alone (`return_dict_in_generate`).
        scores: the scores of each new token in it.
        logits: the logits of each new token in it.
    """

    whole: bool
    scores: bool
    logits: bool


@dataclass(frozen=True)
class Request:
    """One call, ready to run.

    Attributes:
        input_ids: prompts as given, left-padded, `[batch, prompt]`.
        lengths: true length of each prompt.
        sampling: how logits become probabilities.
        stopping: where rows end.
        pad: token id that fills rows which ended early.
        returned: what is to be returned besides the sequences.
        streamer: gets the prompt and then each token as it is committed; None: nobody listens.
        past: the caller's own cache: keys and values of the first columns are read from it, and all are left in it.
    """

    input_ids: Tensor
    lengths: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    pad: int
    returned: Returned
    streamer: BaseStreamer | None = None
    past: Cache | None = None

    @property
    def padding(self) -> tuple[int, ...]:
        """Columns of padding on the left of each row."""
        return tuple(self.input_ids.shape[1] - length for length in self.lengths)


def read_request(
    model: PreTrainedModel,
    inputs: Tensor | None,
    attention_mask: Tensor | None,
    generation_config: GenerationConfig | None,
    options: Mapping[str, Any],
) -> Request:
    """Check a call of `generate` and bring it into one form.

    Args:
        model: the model that will run.
        inputs: prompts, `[batch, prompt]`, left-padded where their lengths differ.
        attention_mask: 1 for tokens and 0 for padding, of the same shape; None: no padding. Never guessed from ids.
        generation_config: as in `model.generate`.
        options: further keywords of `model.generate`; `streamer` and `tokenizer` among them.

    Raises:
        PromptError: empty prompt, ids outside the vocabulary, a mask that does not fit, or no room in the context.
        UnsupportedOptionError: an option that cannot be honoured, by name.
    """
    if inputs is None:
        raise PromptError("no prompt: pass input_ids, a LongTensor of shape [batch, prompt]")
    check_kind("generation_config", generation_config, GenerationConfig, "write GenerationConfig(max_new_tokens=64)")
    input_ids, mask = checked_prompt(model, inputs, attention_mask)
    # transformers drops these two where it hands over to a callable.
    options = dict(options)
    streamer, tokenizer = options.pop("streamer", None), options.pop("tokenizer", None)
    past = options.pop("past_key_values", None)
    check_keywords(generation_config, options)
    check_methods("streamer", streamer, ("put", "end"), "pass a TextStreamer of transformers")
    value_of = partial(value_in_call, options=options, configs=(generation_config, model.generation_config))
    check_values(value_of, _scope(model, input_ids))
    call = _Call(model, generation_config, options).with_stop_strings_as_criterion(tokenizer)
    handed_over: dict[str, Any] = {}

    def hand_over(_model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> None:
        handed_over.update(prepared, input_ids=input_ids)

    try:
        # The class's own: a model loaded with a `generate` from its folder has another on the instance.
        type(model).generate(
            call.model,
            input_ids,
            attention_mask=mask,
            generation_config=call.generation_config,
            custom_generate=hand_over,
            **call.options,
        )
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise UnsupportedOptionError(f"transformers refuses these generation options: {error}") from error
    # Rows may have been repeated for num_return_sequences; their masks with them.
    repeats = handed_over["input_ids"].shape[0] // mask.shape[0]
    request = prepared_request(
        model,
        handed_over["input_ids"],
        mask.repeat_interleave(repeats, 0),
        handed_over["generation_config"],
        handed_over["logits_processor"],
        handed_over["stopping_criteria"],
    )
    if streamer is not None and request.input_ids.shape[0] > 1:
        raise UnsupportedOptionError(
            f"streamer: it takes one row, this batch has {request.input_ids.shape[0]}; iterate over spec.stream(...) "
            "for what each row commits"
        )
    return request_with_past(replace(request, streamer=streamer), past)


@dataclass(frozen=True)
class _Call:
    """A call of `generate`, as it goes to `transformers` to be read."""

    model: PreTrainedModel
    generation_config: GenerationConfig | None
    options: dict[str, Any]

    def with_stop_strings_as_criterion(self, tokenizer: PreTrainedTokenizerBase | None) -> _Call:
        """The same with the criterion made here, for which `transformers` would miss the tokenizer.

        Raises:
            UnsupportedOptionError: there are stop strings and no tokenizer.
        """
        strings = value_in_call("stop_strings", self.options, (self.generation_config, self.model.generation_config))
        if strings is None:
            return self
        if tokenizer is None:
            raise UnsupportedOptionError("stop_strings need the model's tokenizer: pass tokenizer=... as well")
        check_methods("tokenizer", tokenizer, ("get_vocab",), "pass the model's own, as AutoTokenizer loads it")
        # A twin, because the model's own defaults are not to be touched, and come in whatever else is said.
        model = copy(self.model)
        model.generation_config = _without_stop_strings(self.model.generation_config)
        criteria = [*(self.options.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
        return _Call(
            model,
            None if self.generation_config is None else _without_stop_strings(self.generation_config),
            {**self.options, "stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)},
        )


def _without_stop_strings(config: GenerationConfig) -> GenerationConfig:
    config = deepcopy(config)
    config.stop_strings = None
    return config


def prepared_request(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
) -> Request:
    """Check what `transformers` prepared and hands to a `custom_generate` callable.

    Raises:
        PromptError: see `read_request`.
        UnsupportedOptionError: an option that cannot be honoured, by name.
    """
    input_ids, mask = checked_prompt(model, input_ids, attention_mask)
    check_callables("logits_processor", logits_processor)
    check_callables("stopping_criteria", stopping_criteria)
    check_values(lambda name: getattr(generation_config, name, None), _scope(model, input_ids))
    check_options(generation_config)
    # transformers has settled what pads.
    pad = generation_config._pad_token_tensor
    stopping = read_stopping(stopping_criteria, input_ids.shape[1], generation_config.max_length)
    max_new_tokens = stopping.max_new_tokens
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    lengths = tuple(mask.sum(1).tolist())
    whole = bool(generation_config.return_dict_in_generate)
    if context is not None and max(lengths) + max_new_tokens > context:
        raise PromptError(
            f"prompt ({max(lengths)} tokens) plus max_new_tokens ({max_new_tokens}) is beyond the model's context of "
            f"{context}; ask for at most {max(context - max(lengths), 0)} new tokens or shorten the prompt"
        )
    return Request(
        input_ids=input_ids,
        lengths=lengths,
        sampling=Sampling(
            read_processing(logits_processor, stopping.eos, input_ids.shape[1] + max_new_tokens),
            greedy=not generation_config.do_sample,
        ),
        stopping=stopping,
        # A negative one, which an end that never comes may leave, fills nothing.
        pad=0 if pad is None else max(int(pad.flatten()[0]), 0),
        returned=Returned(
            whole,
            scores=whole and bool(generation_config.output_scores),
            logits=whole and bool(generation_config.output_logits),
        ),
    )


def _scope(model: PreTrainedModel, input_ids: Tensor) -> Scope:
    return Scope(model.get_input_embeddings().num_embeddings, input_ids.shape[0])


def request_with_past(request: Request, past: Cache | None) -> Request:
    """The same request, with a cache of the caller's own.

    Raises:
        PromptError, UnsupportedOptionError: see `check_past`.
    """
    if past is None:
        return request
    check_past(past, request.input_ids.shape[0], request.input_ids.shape[1])
    return replace(request, past=past)


def check_model_inputs(model_kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs of the model that a `custom_generate` callable is handed and selfspec does not pass on.

    `transformers` adds default positions of its own; only what differs from these was asked for.

    Raises:
        PromptError: the attention mask holds something else than zeros and ones.
        UnsupportedOptionError: naming the input.
    """
    # Positions follow from the mask, and where that is broken it is the mask that has to be mended.
    if model_kwargs.get("attention_mask") is not None:
        check_mask(model_kwargs["attention_mask"])
    for name, value in model_kwargs.items():
        if value is None or name in ("attention_mask", "use_cache", "logits_to_keep", "past_key_values"):
            continue
        if name == "position_ids" and _are_default(value, model_kwargs.get("attention_mask")):
            continue
        raise unsupported(name)


def _are_default(position_ids: Tensor, attention_mask: Tensor | None) -> bool:
    mask = torch.ones_like(position_ids) if attention_mask is None else attention_mask.to(position_ids.device)
    if mask.shape != position_ids.shape:
        return False
    return bool(((position_ids == mask.cumsum(-1) - 1) | (mask == 0)).all())

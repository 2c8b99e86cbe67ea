"""What a caller asked for, checked and in one form, before any forward pass.

`transformers` itself reads the arguments: the call goes through `model.generate` with a `custom_generate` that hands
back what it was given. So defaults, `GenerationConfig`, overrides and logits warpers mean what they mean there. What
cannot be honoured is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer, StoppingCriteriaList, StopStringCriteria

from selfspec.errors import PromptError, UnsupportedOptionError
from selfspec.past import check_past
from selfspec.processing import read_processing
from selfspec.sampling import Sampling
from selfspec.stopping import Stopping, read_stopping

_HONOURED = frozenset(
    {
        "max_length",
        "max_new_tokens",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "num_return_sequences",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "return_dict_in_generate",
        "output_scores",
        "output_logits",
        # Read by transformers, which makes logits processors and stopping criteria of them.
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "sequence_bias",
        "min_length",
        "min_new_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "renormalize_logits",
        "remove_invalid_values",
        "watermarking_config",
        "top_h",
        "guidance_scale",
        "max_time",
        "stop_strings",
        # Only read by other decoding methods, or by transformers before it hands over.
        "early_stopping",
        "length_penalty",
        "decoder_start_token_id",
        "transformers_version",
        "disable_compile",
    }
)

_REMEDIES = {
    "num_beams": "selfspec samples or decodes greedily; use model.generate for beam search",
    "penalty_alpha": "use model.generate for contrastive search",
    "dola_layers": "use model.generate for DoLa",
    "prompt_lookup_num_tokens": "the model drafts for itself; drop it",
    "assistant_early_exit": "write selfspec.wrap(model, draft=selfspec.EarlyExit(layer=...)) instead",
    "assistant_model": "the model drafts for itself; drop it",
    "use_cache": "the shared cache is what selfspec is about; leave use_cache on",
    "cache_implementation": "selfspec keeps its own cache; drop it",
    "inputs_embeds": "pass input_ids",
    "negative_prompt_ids": "it is read with guidance_scale alone; pass that too, or drop it",
    "position_ids": "positions follow from the attention mask; drop it",
    "output_hidden_states": "call model.generate for hidden states",
    "output_attentions": "call model.generate for attentions",
}


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
    input_ids, mask = _checked_prompt(model, inputs, attention_mask)
    # transformers drops these two where it hands over to a callable.
    options = dict(options)
    streamer, tokenizer = options.pop("streamer", None), options.pop("tokenizer", None)
    past = options.pop("past_key_values", None)
    _check_keywords(generation_config, options)
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
    except (ValueError, TypeError) as error:
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
        configs = [config for config in (self.generation_config, self.model.generation_config) if config is not None]
        given = [self.options.get("stop_strings"), *(config.stop_strings for config in configs)]
        strings = next((strings for strings in given if strings is not None), None)
        if strings is None:
            return self
        if tokenizer is None:
            raise UnsupportedOptionError("stop_strings need the model's tokenizer: pass tokenizer=... as well")
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
    input_ids, mask = _checked_prompt(model, input_ids, attention_mask)
    _check_options(generation_config)
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
        pad=0 if pad is None else int(pad.flatten()[0]),
        returned=Returned(
            whole,
            scores=whole and bool(generation_config.output_scores),
            logits=whole and bool(generation_config.output_logits),
        ),
    )


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
        UnsupportedOptionError: naming the input.
    """
    for name, value in model_kwargs.items():
        if value is None or name in ("attention_mask", "use_cache", "logits_to_keep", "past_key_values"):
            continue
        if name == "position_ids" and _are_default(value, model_kwargs.get("attention_mask")):
            continue
        raise _unsupported(name)


def check_not_dropped(frame: FrameType | None) -> None:
    """Refuse what `model.generate` was given and does not hand over to a `custom_generate` callable.

    `transformers` drops some arguments without a word. They can still be seen where it calls: among the variables of
    its `generate`. Where Python keeps no frames, or `generate` is not the caller, there is nothing to see.

    Args:
        frame: of the callable that `generate` calls.

    Raises:
        UnsupportedOptionError: naming the argument.
    """
    caller = None if frame is None else frame.f_back
    if caller is None or caller.f_code.co_name != "generate":
        return
    for name in ("streamer", "assistant_model", "synced_gpus"):
        if caller.f_locals.get(name):
            raise UnsupportedOptionError(
                f"{name} is dropped by transformers where it hands over to custom_generate; "
                + _REMEDIES.get(name, "call spec.generate(...) instead")
            )


def _are_default(position_ids: Tensor, attention_mask: Tensor | None) -> bool:
    mask = torch.ones_like(position_ids) if attention_mask is None else attention_mask.to(position_ids.device)
    if mask.shape != position_ids.shape:
        return False
    return bool(((position_ids == mask.cumsum(-1) - 1) | (mask == 0)).all())


def _checked_prompt(model: PreTrainedModel, inputs: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if not isinstance(inputs, Tensor) or inputs.dtype not in (torch.int64, torch.int32):
        raise PromptError("input_ids must be a LongTensor of shape [batch, prompt]; tokenize with return_tensors='pt'")
    input_ids = inputs.long()
    if input_ids.ndim != 2:
        raise PromptError(
            f"input_ids has shape {list(inputs.shape)}, not [batch, prompt]; for a single prompt write input_ids[None]"
        )
    if input_ids.numel() == 0:
        raise PromptError(f"the prompt is empty (input_ids of shape {list(inputs.shape)}); give at least the bos token")
    vocabulary = model.get_input_embeddings().num_embeddings
    lowest, highest = input_ids.min().item(), input_ids.max().item()
    if lowest < 0 or highest >= vocabulary:
        raise PromptError(
            f"token id {int(lowest if lowest < 0 else highest)} is outside the vocabulary 0..{vocabulary - 1}; "
            "is this the model's own tokenizer?"
        )
    if attention_mask is None:
        return input_ids, torch.ones_like(input_ids)
    if not isinstance(attention_mask, Tensor):
        raise PromptError(f"attention_mask must be a tensor of the shape of input_ids, got {attention_mask!r}")
    if attention_mask.shape != input_ids.shape:
        raise PromptError(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}; they must agree"
        )
    mask = (attention_mask.to(input_ids.device) != 0).long()
    if not bool(mask.any(1).all()):
        rows = (~mask.any(1).bool()).nonzero().flatten().tolist()
        raise PromptError(f"row(s) {rows} of the attention mask are all zero; drop these rows or give them a token")
    if bool((mask.diff(dim=1) < 0).any()):
        raise PromptError(
            "the attention mask has zeros after ones; pad on the left: AutoTokenizer.from_pretrained(..., "
            "padding_side='left')"
        )
    return input_ids, mask


def _check_keywords(generation_config: GenerationConfig | None, options: Mapping[str, Any]) -> None:
    """Refuse what `transformers` would drop for a `custom_generate`, or fail over, without a word about selfspec."""
    fields = _defaults().keys() | {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"}
    if (options.get("guidance_scale") or getattr(generation_config, "guidance_scale", None)) is not None:
        fields |= {"negative_prompt_ids", "negative_prompt_attention_mask"}
    for name, value in options.items():
        if name not in fields and value is not None and value is not False:
            raise _unsupported(name)
    for name in ("max_new_tokens", "max_length"):
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UnsupportedOptionError(f"{name}={value!r} is no positive integer")
    cache = options.get("cache_implementation") or getattr(generation_config, "cache_implementation", None)
    if cache is not None:
        raise _unsupported("cache_implementation", cache)


def _defaults() -> dict[str, Any]:
    return {**GenerationConfig().to_dict(), **GenerationConfig._get_default_generation_params()}


def _check_options(generation_config: GenerationConfig) -> None:
    given = generation_config.to_dict()
    for name, default in _defaults().items():
        value = given.get(name, default)
        if name.startswith("_") or name in _HONOURED or value in (None, False, default):
            continue
        raise _unsupported(name, value)
    if generation_config.use_cache is False:
        raise _unsupported("use_cache", False)


def _unsupported(name: str, value: object = ...) -> UnsupportedOptionError:
    shown = name if value is ... else f"{name}={value!r}"
    return UnsupportedOptionError(f"{shown} is not supported: {_REMEDIES.get(name, 'drop it or use model.generate')}")

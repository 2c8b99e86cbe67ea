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
from transformers.generation import BaseStreamer, GenerationMode, StoppingCriteriaList, StopStringCriteria

from selfspec.errors import PromptError, UnsupportedOptionError
from selfspec.first_inputs import first_inputs
from selfspec.past import check_past, check_rows, is_callers, past_length, past_of
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
        "watermarking_config",
        "top_h",
        "max_time",
        "stop_strings",
        "remove_invalid_values",
        # Only read by other decoding methods, or by transformers before it hands over.
        "early_stopping",
        "length_penalty",
        "diversity_penalty",
        "num_beam_groups",
        "low_memory",
        "decoder_start_token_id",
        "transformers_version",
        "disable_compile",
        # Only read beside an assistant, a `cache_implementation` or in continuous batching.
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
        "speculation_type",
        "max_matching_ngram_size",
        "cache_config",
        "max_cache_len",
        "compile_config",
        "continuous_batching_config",
    }
)

# Names of caches among the inputs of a model.
_CACHES = ("past_key_values", "cache_params")
# Inputs of the model that a call may bring along.
_MODEL_INPUTS = frozenset({"inputs_embeds", "position_ids", *_CACHES})
# What is computed for nobody unless the whole output is returned.
_ONLY_RETURNED = frozenset({"output_attentions", "output_hidden_states"})

_REMEDIES = {
    "num_beams": "selfspec samples or decodes greedily; use model.generate for beam search",
    "penalty_alpha": "use model.generate for contrastive search",
    "dola_layers": "use model.generate for DoLa",
    "prompt_lookup_num_tokens": "the model drafts for itself; drop it",
    "assistant_early_exit": "write selfspec.wrap(model, draft=selfspec.EarlyExit(layer=...)) instead",
    "assistant_model": "the model drafts for itself; drop it",
    "use_cache": "the shared cache is what selfspec is about; leave use_cache on",
    "cache_implementation": "selfspec keeps its own cache; drop it",
    "guidance_scale": "it keeps a cache of its own that cannot take back a draft; use model.generate for guidance",
    "position_ids": "positions follow from the attention mask, and these do not; drop it",
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
        input_ids: the text that new tokens are added to, `[batch, prompt]`: what is returned before them, and what
            logits processors see. Of no columns where a prompt is given as embeddings alone.
        read: what the prefill reads of the prompts: ids `[batch, columns]`, or embeddings `[batch, columns, hidden]`.
            Either may lack the first columns of `mask`, those that `past` holds.
        mask: which columns of the prompts hold a token, those that `past` holds included, `[batch, columns]`, bool.
        lengths: true length of each prompt.
        sampling: how logits become probabilities.
        stopping: where rows end.
        pad: token id that fills rows which ended early.
        returned: what is to be returned besides the sequences.
        streamer: gets the prompt and then each token as it is committed; None: nobody listens.
        past: keys and values of the first columns are read from it. If it is the caller's own, all are left in it.
    """

    input_ids: Tensor
    read: Tensor
    mask: Tensor
    lengths: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    pad: int
    returned: Returned
    streamer: BaseStreamer | None = None
    past: Cache | None = None

    @property
    def embeddings(self) -> bool:
        """Whether prompts are read as embeddings, so that their last position has no token id."""
        return self.read.is_floating_point()


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
    embeddings = options.get("inputs_embeds")
    input_ids = None if inputs is None else _checked_ids(model, inputs)
    read = input_ids if embeddings is None else _checked_embeddings(model, embeddings)
    if read is None:
        raise PromptError("no prompt: pass input_ids, a LongTensor of shape [batch, prompt]")
    past = next((options[name] for name in _CACHES if options.get(name) is not None), None)
    if past is not None:
        check_past(past)
    mask = read.new_ones(read.shape[:2], dtype=torch.long) if attention_mask is None else attention_mask
    mask = _checked_mask(mask, read, past)
    # transformers drops these two where it hands over to a callable.
    options = dict(options)
    streamer, tokenizer = options.pop("streamer", None), options.pop("tokenizer", None)
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
    handed_over["attention_mask"] = mask.repeat_interleave(repeats, 0)
    request = prepared_request(model, **handed_over)
    if streamer is not None and request.input_ids.shape[0] > 1:
        raise UnsupportedOptionError(
            f"streamer: it takes one row, this batch has {request.input_ids.shape[0]}; iterate over spec.stream(...) "
            "for what each row commits"
        )
    return replace(request, streamer=streamer)


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
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Request:
    """Check what `transformers` prepared and hands to a `custom_generate` callable.

    Args:
        model: the model that will run.
        input_ids: the text, `[batch, prompt]`.
        logits_processor: all of them.
        stopping_criteria: all of them.
        generation_config: with all defaults filled in.
        **model_kwargs: what else goes to the model: mask, positions, embeddings, caches.

    Raises:
        PromptError: see `read_request`.
        UnsupportedOptionError: an option that cannot be honoured, by name.
    """
    _check_options(model, generation_config)
    inputs = first_inputs(model, input_ids, model_kwargs)
    embeddings = inputs.get("inputs_embeds")
    if embeddings is None or input_ids.numel():
        input_ids = _checked_ids(model, input_ids)
    read = _checked_embeddings(model, embeddings) if embeddings is not None else inputs["input_ids"].long()
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
    mask = _checked_mask(mask, read, past)
    _check_model_inputs({**inputs, "attention_mask": mask}, read.shape[1], generation_config)
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
        read=read,
        mask=mask.bool(),
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
        past=past,
    )


def _check_model_inputs(inputs: Mapping[str, Any], width: int, generation_config: GenerationConfig) -> None:
    """Refuse inputs of the model that selfspec does not pass on.

    `transformers` adds caches and default positions of its own; only what differs from these was asked for.

    Args:
        inputs: of the model, the mask of all columns among them.
        width: columns that the prefill reads.
        generation_config: says whether more than the sequences is returned.

    Raises:
        UnsupportedOptionError: naming the input.
    """
    read = {"input_ids", "inputs_embeds", "attention_mask", "use_cache", "logits_to_keep"}
    if not generation_config.return_dict_in_generate:
        read |= _ONLY_RETURNED
    for name, value in inputs.items():
        if value is None or name in read or isinstance(value, Cache):
            continue
        if name == "position_ids" and _follow_from(value, inputs["attention_mask"], width):
            continue
        raise _unsupported(name)
    if inputs.get("position_ids") is None and bool((inputs["attention_mask"].diff(dim=1) < 0).any()):
        raise UnsupportedOptionError(
            "padding between a past or soft prompt and the text counts as positions here, since position_ids do not "
            "come with it; pass rows of one length, or one row at a time"
        )


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


def _follow_from(position_ids: Tensor, mask: Tensor, width: int) -> bool:
    """Whether positions, of all columns or of the last `width`, are those that count the tokens of a mask."""
    if position_ids.ndim != 2 or position_ids.shape[1] not in (width, mask.shape[1]):
        return False
    if len(position_ids) not in (1, len(mask)):
        return False
    columns = slice(-position_ids.shape[1], None)
    expected = (mask.cumsum(-1) - 1)[:, columns]
    return bool(((position_ids.to(mask.device) == expected) | (mask[:, columns] == 0)).all())


def _checked_ids(model: PreTrainedModel, inputs: Tensor) -> Tensor:
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
    return input_ids


def _checked_embeddings(model: PreTrainedModel, embeddings: Tensor) -> Tensor:
    own = model.get_input_embeddings()
    wanted = f"a tensor of {own.weight.dtype} of shape [batch, prompt, {own.embedding_dim}], as the model's own are"
    if not isinstance(embeddings, Tensor) or embeddings.dtype != own.weight.dtype:
        given = embeddings.dtype if isinstance(embeddings, Tensor) else repr(embeddings)
        raise PromptError(f"inputs_embeds must be {wanted}, got {given}")
    if embeddings.ndim != 3 or embeddings.shape[2] != own.embedding_dim or embeddings.numel() == 0:
        raise PromptError(f"inputs_embeds must be {wanted}, got shape {list(embeddings.shape)}")
    return embeddings


def _columns(read: Tensor, past: Cache | None, generation_config: GenerationConfig) -> int:
    """How many columns a mask of ones has, which `transformers` does not hand over."""
    if past is not None and not is_callers(past):
        return past_length(past) + read.shape[1]
    if past is not None and not read.is_floating_point():
        return int(getattr(generation_config, "_mask_length", read.shape[1]))
    return read.shape[1]


def _checked_mask(attention_mask: Tensor, read: Tensor, past: Cache | None) -> Tensor:
    """Which columns hold tokens: of the prompts, and before them of a past where they begin behind it.

    Args:
        attention_mask: as given.
        read: prompts, as ids or embeddings.
        past: what a cache holds, if there is one.

    Returns:
        Ones and zeros, `[batch, columns]`.
    """
    rows, columns = read.shape[:2]
    known = 0 if past is None else past_length(past)
    name = "inputs_embeds" if read.is_floating_point() else "input_ids"
    if not isinstance(attention_mask, Tensor):
        raise PromptError(f"attention_mask must be a tensor of the shape of {name}, got {attention_mask!r}")
    if attention_mask.shape not in ((rows, columns), (rows, columns + known)):
        raise PromptError(
            f"attention_mask has shape {list(attention_mask.shape)}, {name} {list(read.shape[:2])}; they must agree"
            + (f", or the mask must also cover the {known} columns of past_key_values" if known else "")
        )
    mask = (attention_mask.to(read.device) != 0).long()
    if mask.shape[1] <= known:
        raise PromptError(
            f"past_key_values hold {known} tokens and {name} {columns}; pass the whole conversation as {name}, "
            "with at least one token that is not in the cache"
        )
    if not bool(mask[:, known:].any(1).all()):
        rows_of_zeros = (~mask[:, known:].any(1).bool()).nonzero().flatten().tolist()
        raise PromptError(
            f"row(s) {rows_of_zeros} of the attention mask are all zero; drop these rows or give them a token"
        )
    if any(bool((part.diff(dim=1) < 0).any()) for part in (mask[:, :known], mask[:, known:])):
        raise PromptError(
            "the attention mask has zeros after ones; pad on the left: AutoTokenizer.from_pretrained(..., "
            "padding_side='left')"
        )
    return mask


def _check_keywords(generation_config: GenerationConfig | None, options: Mapping[str, Any]) -> None:
    """Refuse what `transformers` would drop for a `custom_generate`, or fail over, without a word about selfspec."""
    fields = _defaults().keys() | _MODEL_INPUTS | {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"}
    if options.get("use_cache") is False:
        raise _unsupported("use_cache", False)
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


def _check_options(model: PreTrainedModel, generation_config: GenerationConfig) -> None:
    """Refuse what was asked for and cannot be had. Options that change nothing without another one are no reason to."""
    given = generation_config.to_dict()
    inert = set() if generation_config.return_dict_in_generate else _ONLY_RETURNED
    if generation_config.get_generation_mode() != GenerationMode.CONTRASTIVE_SEARCH:
        inert = inert | {"penalty_alpha"}
    for name, default in _defaults().items():
        value = given.get(name, default)
        if name.startswith("_") or name in _HONOURED | inert or value in (None, False, default):
            continue
        raise _unsupported(name, value)
    # Where the checkpoint says so by itself, nobody asked for it in this call.
    if generation_config.use_cache is False and model.generation_config.use_cache is not False:
        raise _unsupported("use_cache", False)


def _unsupported(name: str, value: object = ...) -> UnsupportedOptionError:
    shown = name if value is ... else f"{name}={value!r}"
    return UnsupportedOptionError(f"{shown} is not supported: {_REMEDIES.get(name, 'drop it or use model.generate')}")

"""What a caller asked for, checked and in one form, before any forward pass.

`transformers` itself reads the arguments: the call goes through `model.generate` with a `custom_generate` that hands
back what it was given. So defaults, `GenerationConfig`, overrides and logits warpers mean what they mean there. What
cannot be honoured is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from selfspec.errors import PromptError, UnsupportedOptionError
from selfspec.sampling import Sampling

# Warpers that look at the scores alone, so that all positions of a block go through them at once.
_WARPERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)

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
    "past_key_values": "pass the whole conversation as input_ids",
    "inputs_embeds": "pass input_ids",
    "position_ids": "positions follow from the attention mask; drop it",
    "output_hidden_states": "call model.generate for hidden states",
    "output_attentions": "call model.generate for attentions",
}


@dataclass(frozen=True)
class Request:
    """One call, ready to run.

    Attributes:
        input_ids: prompts as given, left-padded, `[batch, prompt]`.
        lengths: true length of each prompt.
        sampling: how logits become probabilities.
        eos: token ids that end a row.
        pad: token id that fills rows which ended early.
        max_new_tokens: the most tokens a row may grow by.
        return_dict: whether `transformers` asked for an output object rather than the sequences alone.
    """

    input_ids: Tensor
    lengths: tuple[int, ...]
    sampling: Sampling
    eos: frozenset[int]
    pad: int
    max_new_tokens: int
    return_dict: bool


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
        options: further keywords of `model.generate`.

    Raises:
        PromptError: empty prompt, ids outside the vocabulary, a mask that does not fit, or no room in the context.
        UnsupportedOptionError: an option that cannot be honoured, by name.
    """
    if inputs is None:
        raise PromptError("no prompt: pass input_ids, a LongTensor of shape [batch, prompt]")
    input_ids, mask = _checked_prompt(model, inputs, attention_mask)
    _check_keywords(generation_config, options)
    handed_over: dict[str, Any] = {}

    def hand_over(_model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> None:
        handed_over.update(prepared, input_ids=input_ids)

    try:
        model.generate(
            input_ids,
            attention_mask=mask,
            generation_config=generation_config,
            custom_generate=hand_over,
            **dict(options),
        )
    except (ValueError, TypeError) as error:
        raise UnsupportedOptionError(f"transformers refuses these generation options: {error}") from error
    # Rows may have been repeated for num_return_sequences; their masks with them.
    repeats = handed_over["input_ids"].shape[0] // mask.shape[0]
    return prepared_request(
        model,
        handed_over["input_ids"],
        mask.repeat_interleave(repeats, 0),
        handed_over["generation_config"],
        handed_over["logits_processor"],
        handed_over["stopping_criteria"],
    )


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
    # Their exact classes: one that derives from them may do anything.
    for processor in logits_processor:
        if type(processor) not in _WARPERS:
            raise UnsupportedOptionError(f"the logits processor {type(processor).__name__} is not supported; drop it")
    # transformers has read these from the config, whatever form they were given in, and settled what pads.
    eos, pad = _ids(generation_config._eos_token_tensor), _ids(generation_config._pad_token_tensor)
    for criterion in stopping_criteria:
        if not _is_own(criterion, generation_config.max_length, eos):
            raise UnsupportedOptionError(
                f"the stopping criterion {type(criterion).__name__} is not supported; drop it, and use max_new_tokens "
                "and eos_token_id"
            )
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    lengths = tuple(mask.sum(1).tolist())
    if context is not None and max(lengths) + max_new_tokens > context:
        raise PromptError(
            f"prompt ({max(lengths)} tokens) plus max_new_tokens ({max_new_tokens}) is beyond the model's context of "
            f"{context}; ask for at most {max(context - max(lengths), 0)} new tokens or shorten the prompt"
        )
    return Request(
        input_ids=input_ids,
        lengths=lengths,
        sampling=Sampling(logits_processor, greedy=not generation_config.do_sample),
        eos=frozenset(eos),
        pad=pad[0] if pad else 0,
        max_new_tokens=max_new_tokens,
        return_dict=bool(generation_config.return_dict_in_generate),
    )


def check_model_inputs(model_kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs of the model that a `custom_generate` callable is handed and selfspec does not pass on.

    `transformers` adds an empty cache and default positions of its own; only what differs from these was asked for.

    Raises:
        UnsupportedOptionError: naming the input.
    """
    for name, value in model_kwargs.items():
        if value is None or name in ("attention_mask", "use_cache", "logits_to_keep"):
            continue
        if name == "past_key_values" and value.get_seq_length() == 0:
            continue
        if name == "position_ids" and _are_default(value, model_kwargs.get("attention_mask")):
            continue
        raise _unsupported(name)


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


def _ids(tokens: Tensor | None) -> list[int]:
    return [] if tokens is None else tokens.flatten().tolist()


def _is_own(criterion: StoppingCriteria, max_length: int, eos: list[int]) -> bool:
    """Whether a stopping criterion is one that `transformers` itself makes of the config."""
    if type(criterion) is MaxLengthCriteria:
        return bool(criterion.max_length == max_length)
    return type(criterion) is EosTokenCriteria and set(_ids(criterion.eos_token_id)) <= set(eos)

"""Check generation options of `transformers` by name before any pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from types import FrameType, MappingProxyType
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode

from selfspec.arguments import check_callables
from selfspec.cache.masks import smallest_window
from selfspec.cache.shared_cache import recurrent_layers
from selfspec.compat import CACHE_NAMES, forward_parameters
from selfspec.decode.option_values import CHECKED
from selfspec.errors import UnsupportedOptionError

# Options of the table, and options that change nothing here.
_HONOURED = (CHECKED - {"num_beams"}) | {
    "use_cache",
    "guidance_scale",
    "prefill_chunk_size",
    # Read by other decoding methods alone, or by transformers before it calls selfspec.
    "early_stopping",
    "length_penalty",
    "diversity_penalty",
    "num_beam_groups",
    "low_memory",
    "transformers_version",
    "disable_compile",
    # Read only with an assistant, a `cache_implementation` or in continuous batching.
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

# Values that ask for the usual behaviour.
_NOTHING_ELSE: Mapping[str, object] = MappingProxyType({"cache_implementation": "dynamic"})
# Inputs of the model that a call may contain.
_MODEL_INPUTS = frozenset({"inputs_embeds", "position_ids", *CACHE_NAMES})
# Parameters of a model's `forward` that are not part of a prompt.
_NO_INPUTS = frozenset({"self", "args", "kwargs", "input_ids", "labels", "cache_position", "return_dict"})
# Not computed unless the whole output is returned.
_ONLY_RETURNED = frozenset({"output_attentions", "output_hidden_states"})

# Keywords of `generate` that are not fields of its config, and keywords that are read before this check.
_BESIDE_CONFIG = frozenset({"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"})
_BY_NAME = frozenset(
    {
        "input_ids",
        "inputs",
        "attention_mask",
        "generation_config",
        "streamer",
        "tokenizer",
        "seed",
        "draft_length",
        "accept",
    }
)

_REMEDIES = {
    "num_beams": "selfspec samples or decodes greedily; use model.generate for beam search",
    "penalty_alpha": "use model.generate for contrastive search",
    "dola_layers": "use model.generate for DoLa",
    "prompt_lookup_num_tokens": "the model drafts for itself; drop it",
    "assistant_early_exit": "write selfspec.wrap(model, draft=selfspec.drafts.EarlyExit(layer=...)) instead",
    "assistant_model": "write selfspec.wrap(model, draft=selfspec.drafts.Assistant(...)) instead, or drop it",
    "use_cache": "the shared cache is what selfspec is about; leave use_cache on",
    "cache_implementation": "selfspec keeps keys and values exact and beside the weights; drop it, and within a memory "
    "budget say by selfspec.load(..., context=, cache=) how many tokens need room, and how they are kept",
    "negative_prompt_ids": "it is read with guidance_scale alone; pass that too, or drop it",
    "position_ids": "positions follow from the attention mask, and these do not; drop it",
    "output_hidden_states": "call model.generate for hidden states",
    "output_attentions": "call model.generate for attentions",
}


def check_not_dropped(frame: FrameType | None) -> None:
    """Refuse arguments of `model.generate` that it does not pass to the `custom_generate` callable of this frame.

    `transformers` drops some arguments silently, but they remain local variables of its `generate`. Nothing is checked
    if Python keeps no frames or `generate` is not the caller.
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


def check_keywords(
    model: PreTrainedModel, generation_config: GenerationConfig | None, options: Mapping[str, Any]
) -> None:
    """Refuse keywords that `transformers` would drop for a `custom_generate`, or reject without naming selfspec."""
    fields = _defaults().keys() | _BESIDE_CONFIG | _MODEL_INPUTS | _further_inputs(model)
    if (options.get("guidance_scale") or getattr(generation_config, "guidance_scale", None)) is not None:
        fields |= {"negative_prompt_ids", "negative_prompt_attention_mask"}
    if options.get("use_cache") is False:
        raise unsupported("use_cache", False)
    for name, value in options.items():
        if name not in fields and value is not None and value is not False:
            raise unsupported(name) if name in _REMEDIES else _unknown(name, fields | _BY_NAME)
    check_callables("logits_processor", options.get("logits_processor"))
    check_callables("stopping_criteria", options.get("stopping_criteria"))
    allowed = options.get("prefix_allowed_tokens_fn")
    check_callables("prefix_allowed_tokens_fn", None if allowed is None else [allowed])
    cache = options.get("cache_implementation") or getattr(generation_config, "cache_implementation", None)
    if cache not in (None, _NOTHING_ELSE["cache_implementation"]):
        raise unsupported("cache_implementation", cache)


def _further_inputs(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the model's inputs beside the prompt, such as images and outputs of tokenizers."""
    return forward_parameters(model) - _NO_INPUTS


@cache
def _defaults() -> Mapping[str, Any]:
    return MappingProxyType({**GenerationConfig().to_dict(), **GenerationConfig._get_default_generation_params()})


def check_options(model: PreTrainedModel, generation_config: GenerationConfig) -> None:
    """Refuse options that selfspec cannot honour, of a config that `transformers` has prepared.

    Options that have no effect without another one are allowed.
    """
    given = generation_config.to_dict()
    inert = set() if generation_config.return_dict_in_generate else _ONLY_RETURNED
    if generation_config.get_generation_mode() != GenerationMode.CONTRASTIVE_SEARCH:
        inert = inert | {"penalty_alpha"}
    for name, default in _defaults().items():
        value = given.get(name, default)
        if name.startswith("_") or name in _HONOURED | inert or value in (None, False, default):
            continue
        if value == _NOTHING_ELSE.get(name):
            continue
        raise unsupported(name, value)
    # If the checkpoint's own config sets it, this call did not ask for it.
    if generation_config.use_cache is False and model.generation_config.use_cache is not False:
        raise unsupported("use_cache", False)


def check_model_inputs(
    config: PreTrainedConfig, inputs: Mapping[str, Any], width: int, generation_config: GenerationConfig
) -> None:
    """Refuse inputs of text that selfspec does not pass to the model.

    `transformers` adds caches and default positions; only values that differ from these are the caller's. The inputs
    hold the mask of all columns, of which the prefill reads `width`.
    """
    if generation_config.return_dict_in_generate:
        for name in _ONLY_RETURNED & inputs.keys():
            if inputs[name] is not None:
                raise unsupported(name)
    positions, kept = inputs.get("position_ids"), inputs.get("logits_to_keep")
    if positions is not None and not follow_from(positions, inputs["attention_mask"], width):
        raise unsupported("position_ids")
    # Any number of kept logits includes those of the last token.
    if kept is not None and not (type(kept) is int and kept >= 0):
        raise unsupported("logits_to_keep", kept)
    # `transformers` counts such padding as tokens in windows and states, and where there are no position_ids.
    counts = positions is None or smallest_window(config) is not None or bool(recurrent_layers(config))
    if counts and bool((inputs["attention_mask"].diff(dim=1) < 0).any()):
        raise UnsupportedOptionError(
            "an attention mask with zeros after ones, as with padding between a past or soft prompt and the text, is "
            "not supported where such columns count as text: in windows, in layers with states, and where no "
            "position_ids come with them; pass the text without them, or one row at a time"
        )


def follow_from(position_ids: Tensor, mask: Tensor, width: int) -> bool:
    """Return whether positions, of all columns or of the last `width`, count the tokens of a mask.

    Models that read images have several positions per token, `[sections, rows, columns]`; all must be equal.
    """
    if position_ids.ndim not in (2, 3) or position_ids.shape[-1] not in (width, mask.shape[1]):
        return False
    if position_ids.shape[-2] not in (1, len(mask)):
        return False
    columns = slice(-position_ids.shape[-1], None)
    expected = (mask.cumsum(-1) - 1)[:, columns]
    return bool(((position_ids.to(mask.device) == expected) | (mask[:, columns] == 0)).all())


def unsupported(name: str, value: object = ...) -> UnsupportedOptionError:
    """Return the error that names an option, its value if given, and what to do instead."""
    shown = name if value is ... else f"{name}={value!r}"
    return UnsupportedOptionError(f"{shown} is not supported: {_REMEDIES.get(name, 'drop it or use model.generate')}")


def _unknown(name: str, known: Iterable[str]) -> UnsupportedOptionError:
    alike = get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    if not alike:
        return unsupported(name)
    return UnsupportedOptionError(f"{name} is no option of generate; did you mean {alike[0]!r}?")

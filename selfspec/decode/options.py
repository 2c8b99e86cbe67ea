"""Check generation options of `transformers` before any pass: their names, and their values by one table.

A value that looks odd but has a meaning in `transformers` has the same meaning here: `top_p=1.0`, `top_k=0`,
`min_p=0.0` and cutoffs of 0 or 1 filter nothing, `max_time=0` stops after one token, `max_time=inf` never, and an id
outside the vocabulary ends no row, suppresses nothing, and may be the padding token if nothing is padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from types import FrameType, MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation import BaseWatermarkingConfig, GenerationMode

from selfspec.arguments import check_callables, shown
from selfspec.cache.masks import smallest_window
from selfspec.cache.shared_cache import recurrent_layers
from selfspec.compat import CACHE_NAMES, forward_parameters
from selfspec.errors import UnsupportedOptionError

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
        "input_ids", "inputs", "attention_mask", "generation_config", "streamer", "tokenizer", "seed", "draft_length",
        "accept",
    }
)  # fmt: skip

_REMEDIES = {
    "num_beams": "selfspec samples or decodes greedily; use model.generate for beam search",
    "penalty_alpha": "use model.generate for contrastive search",
    "dola_layers": "use model.generate for DoLa",
    "prompt_lookup_num_tokens": "the model drafts for itself; drop it",
    "assistant_early_exit": "write selfspec.wrap(model, draft=selfspec.drafts.EarlyExit(layer=...)) instead",
    "assistant_model": "the model drafts for itself; drop it, or call model.generate without custom_generate",
    "use_cache": "the shared cache is what selfspec is about; leave use_cache on",
    "cache_implementation": "selfspec keeps keys and values exact and beside the weights; drop it, and within a memory "
    "budget say by selfspec.load(..., context=, cache=) how many tokens need room, and how they are kept",
    "negative_prompt_ids": "it is read with guidance_scale alone; pass that too, or drop it",
    "position_ids": "positions follow from the attention mask, and these do not; drop it",
    "token_healing": "heal the prompts before, by model.heal_tokens(input_ids, tokenizer), and pass that with a mask",
    "output_hidden_states": "call model.generate for hidden states",
    "output_attentions": "call model.generate for attentions",
}


def check_not_dropped(frame: FrameType | None) -> None:
    """Refuse arguments of `model.generate` that it drops silently for the `custom_generate` callable of this frame.

    They are local variables of its `generate`; nothing is checked if that is not the caller or there are no frames.
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
    fields = _defaults().keys() | _BESIDE_CONFIG | _MODEL_INPUTS | (forward_parameters(model) - _NO_INPUTS)
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


@cache
def _defaults() -> Mapping[str, Any]:
    return MappingProxyType({**GenerationConfig().to_dict(), **GenerationConfig._get_default_generation_params()})


def check_options(model: PreTrainedModel, generation_config: GenerationConfig) -> None:
    """Refuse options of a prepared config that selfspec cannot honour, unless they have no effect here."""
    given = vars(generation_config)
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
    """Refuse inputs of text that selfspec does not pass to the model; the prefill reads `width` columns of the mask."""
    if generation_config.return_dict_in_generate:
        for name in _ONLY_RETURNED & inputs.keys():
            if inputs[name] is not None:
                raise unsupported(name)
    # `transformers` adds default positions; only others are the caller's.
    positions, kept = inputs.get("position_ids"), inputs.get("logits_to_keep")
    if positions is not None and not follow_from(positions, inputs["attention_mask"], width):
        raise unsupported("position_ids")
    # Any number of kept logits includes those of the last token.
    if kept is not None and not (type(kept) is int and kept >= 0):
        raise unsupported("logits_to_keep", kept)
    # `transformers` counts such padding as tokens in windows and states, and where there are no position_ids.
    apart = bool((inputs["attention_mask"].diff(dim=1) < 0).any())
    if apart and (positions is None or smallest_window(config) is not None or recurrent_layers(config)):
        raise UnsupportedOptionError(
            "an attention mask with zeros after ones, as with padding between a past or soft prompt and the text, is "
            "not supported where such columns count as text: in windows, in layers with states, and where no "
            "position_ids come with them; pass the text without them, or one row at a time"
        )


def follow_from(position_ids: Tensor, mask: Tensor, width: int) -> bool:
    """Return whether positions, of all columns or the last `width`, count the tokens of a mask."""
    # Models that read images have several positions per token, `[sections, rows, columns]`; all must be equal.
    if position_ids.ndim not in (2, 3) or position_ids.shape[-1] not in (width, mask.shape[1]):
        return False
    if position_ids.shape[-2] not in (1, len(mask)):
        return False
    columns = slice(-position_ids.shape[-1], None)
    expected = (mask.cumsum(-1) - 1)[:, columns]
    return bool(((position_ids.to(mask.device) == expected) | (mask[:, columns] == 0)).all())


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor is dense: neither on the meta device, nor sparse, nor nested."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested


def unsupported(name: str, value: object = ...) -> UnsupportedOptionError:
    """Return the error that names an option, its value if given, and what to do instead."""
    shown = name if value is ... else f"{name}={value!r}"
    return UnsupportedOptionError(f"{shown} is not supported: {_REMEDIES.get(name, 'drop it or use model.generate')}")


def _unknown(name: str, known: Iterable[str]) -> UnsupportedOptionError:
    alike = get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    if not alike:
        return unsupported(name)
    return UnsupportedOptionError(f"{name} is no option of generate; did you mean {alike[0]!r}?")


@dataclass(frozen=True)
class Scope:
    """The sizes that the values of a call must fit."""

    vocabulary: int  # token ids that the model's head writes
    readable: int  # token ids that its embedding reads, which may be more
    rows: int  # of the batch; 1 if no row can end before another


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_flag(value: object, _: Scope) -> bool:
    return isinstance(value, bool | np.bool_) or (isinstance(value, Integral) and value in (0, 1))


def _is_float_above_0(value: Any, _: Scope) -> bool:
    # `transformers` accepts no integer here except 1, which changes nothing.
    return (isinstance(value, float) and 0 < value < math.inf) or (_is_real(value) and value == 1)


def _is_whole(least: int) -> Callable[[Any, Scope], bool]:
    # False means 0, as in `no_repeat_ngram_size=False`.
    return lambda value, _: isinstance(value, Integral) and value is not True and least <= int(value) < 2**63


def _in_unit_interval(value: Any, _: Scope) -> bool:
    return _is_real(value) and 0 <= value <= 1


def _in_unit_interval_above_0(value: Any, _: Scope) -> bool:
    return _is_real(value) and 0 < value <= 1


def _is_token(value: Any, scope: Scope) -> bool:
    return _is_integer(value) and 0 <= value < scope.vocabulary


def _is_id(value: Any) -> bool:
    """Return whether a value is an id, of a token or outside the vocabulary, where it never occurs."""
    return _is_integer(value) and -(2**63) <= int(value) < 2**63


def _listed(value: object) -> list[Any] | None:
    """Return the items of a list, tuple, set, array or tensor; None for anything else."""
    if isinstance(value, Tensor) and not has_values(value):
        return None
    if isinstance(value, Tensor | np.ndarray):
        held = value.tolist()
        return held if isinstance(held, list) else [held]
    return list(value) if isinstance(value, list | tuple | set | frozenset | range) else None


def _one_or_more(value: object) -> list[Any]:
    listed = _listed(value)
    return [value] if listed is None else listed


def _are_ids(value: object, _: Scope) -> bool:
    listed = _listed(value)
    return listed is not None and all(map(_is_id, listed))


def _some(allows: Callable[[Any, Scope], bool]) -> Callable[[Any, Scope], bool]:
    """Return a check of one value or a list of them that is not empty."""
    return lambda value, scope: bool(items := _one_or_more(value)) and all(allows(item, scope) for item in items)


def _is_padding(value: object, scope: Scope) -> bool:
    tokens = _one_or_more(value)
    if len(tokens) != 1 or isinstance(value, list | tuple | set) or not _is_id(tokens[0]):
        return False
    return scope.rows == 1 or 0 <= tokens[0] < scope.readable


def _is_word(word: object, scope: Scope) -> bool:
    return isinstance(word, list | tuple) and bool(word) and all(_is_token(token, scope) for token in word)


def _are_words(value: object, scope: Scope) -> bool:
    words = value if isinstance(value, list) else []
    return bool(words) and all(isinstance(word, list) and _is_word(word, scope) for word in words)


def _are_biases(value: object, scope: Scope) -> bool:
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not pairs:
        return False
    return all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs) and all(
        _is_word(word, scope) and isinstance(bias, float) and not math.isnan(bias) for word, bias in pairs
    )


def _is_decay(value: Any, _: Scope) -> bool:
    pair = isinstance(value, list | tuple) and len(value) == 2
    return pair and _is_integer(value[0]) and _is_real(value[1]) and math.isfinite(value[1])


def _is_watermark(value: object, _: Scope) -> bool:
    if not isinstance(value, dict | BaseWatermarkingConfig):
        return False
    bias = value.get("bias", 0.0) if isinstance(value, dict) else getattr(value, "bias", 0.0)
    return _is_real(bias) and math.isfinite(bias)


_ID = "a token id that the model's head writes"
# The table: names of options, what they must be, and a check of a value.
_Checks = Sequence[tuple[str, str, Callable[[Any, Scope], bool]]]
_CHECKS: _Checks = (
    ("do_sample renormalize_logits remove_invalid_values", "True or False", _is_flag),
    ("return_dict_in_generate output_scores output_logits", "True or False", _is_flag),
    ("max_new_tokens max_length", "a positive integer", _is_whole(1)),
    ("prefill_chunk_size", "an integer of at least 1, the tokens that one pass reads", _is_whole(1)),
    ("num_beams", "1: selfspec samples or decodes greedily; use model.generate for beam search", _is_whole(1)),
    ("num_return_sequences", "an integer of at least 1, the rows to return for each prompt", _is_whole(1)),
    ("min_length min_new_tokens", "an integer of at least 0; 0 asks for no least length", _is_whole(0)),
    (
        "no_repeat_ngram_size encoder_no_repeat_ngram_size",
        "an integer of at least 0; 0 lets n-grams repeat",
        _is_whole(0),
    ),
    (
        "repetition_penalty encoder_repetition_penalty",
        "a finite float above 0; 1.0 penalises nothing",
        _is_float_above_0,
    ),
    (
        "exponential_decay_length_penalty",
        "a pair of an integer and a finite number: the first token it applies to, and the factor",
        _is_decay,
    ),
    ("max_time", "a number of seconds, at least 0", lambda value, _: _is_real(value) and value >= 0),
    (
        "stop_strings",
        "a string that is not empty, or a list of such; None stops nowhere",
        _some(lambda value, _: isinstance(value, str) and bool(value)),
    ),
    (
        "eos_token_id",
        "a token id, or a list of them; None, or an id outside the vocabulary, ends no row",
        _some(lambda value, _: _is_id(value)),
    ),
    (
        "pad_token_id",
        "a token id of the model's vocabulary: it fills rows that end early; 0 will do where there is none",
        _is_padding,
    ),
    # Where there is a prompt, these are not read.
    ("bos_token_id decoder_start_token_id", "an integer", lambda value, _: all(map(_is_integer, _one_or_more(value)))),
    ("forced_bos_token_id", _ID, _is_token),
    ("forced_eos_token_id", f"{_ID}, or a list of such ids", _some(_is_token)),
    ("suppress_tokens begin_suppress_tokens", "a list of token ids", _are_ids),
    ("bad_words_ids", "a list of lists of token ids that the model's head writes, none empty", _are_words),
    (
        "sequence_bias",
        "a dict from tuples of token ids that the model's head writes to floats, none NaN, or a list of such pairs",
        _are_biases,
    ),
    ("watermarking_config", "a WatermarkingConfig, whose bias is a finite number", _is_watermark),
)
# Read for sampling alone: a greedy call may have any value here, such as `temperature=0.0`.
_SAMPLING_CHECKS: _Checks = (
    ("temperature", "a finite float above 0; for greedy decoding pass do_sample=False", _is_float_above_0),
    ("top_k", "an integer of at least 0; 0 keeps all tokens", _is_whole(0)),
    ("top_p", "a number in 0..1; 1.0 keeps all tokens", _in_unit_interval),
    ("min_p", "a number in 0..1; 0.0 keeps all tokens", _in_unit_interval),
    ("typical_p", "a number above 0 and up to 1; 1.0 keeps all tokens", _in_unit_interval_above_0),
    ("top_h", "a number above 0 and up to 1", _in_unit_interval_above_0),
    ("epsilon_cutoff eta_cutoff", "a number in 0..1; 0.0 keeps all tokens", _in_unit_interval),
)
CHECKED = frozenset(name for names, _, _ in (*_CHECKS, *_SAMPLING_CHECKS) for name in names.split())
"""All options of the table."""

# Options of the table, and options that change nothing here.
_HONOURED = (CHECKED - {"num_beams"}) | {
    "use_cache", "guidance_scale", "prefill_chunk_size",
    # Read by other decoding methods alone, or by transformers before it calls selfspec.
    "early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups", "low_memory", "transformers_version",
    "disable_compile",
    # Read only with an assistant, a `cache_implementation` or in continuous batching.
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "speculation_type", "max_matching_ngram_size", "cache_config",
    "max_cache_len", "compile_config", "continuous_batching_config",
}  # fmt: skip


def check_values(value_of: Callable[[str], Any], scope: Scope) -> None:
    """Check the values of a call's options; raise `UnsupportedOptionError` if one is not valid."""
    ends, repeated = value_of("eos_token_id"), value_of("num_return_sequences")
    rows = scope.rows * int(repeated) if _is_integer(repeated) else scope.rows
    _refuse(_CHECKS, value_of, replace(scope, rows=1 if ends is None else rows))
    known = ends is not None and all(0 <= int(token) < scope.vocabulary for token in _one_or_more(ends))
    if value_of("exponential_decay_length_penalty") is not None and not known:
        raise UnsupportedOptionError(
            "exponential_decay_length_penalty makes the end likelier: pass eos_token_id, of the vocabulary, as well"
        )
    if value_of("do_sample"):
        _refuse(_SAMPLING_CHECKS, value_of, scope)


def value_in_call(name: str, options: Mapping[str, Any], configs: Sequence[GenerationConfig | None]) -> Any:
    """Return an option as `transformers` reads it: the keyword, else the value in the first config that has one."""
    if name in options:
        return options[name]
    found = (getattr(config, name, None) for config in configs)
    return next((value for value in found if value is not None), None)


def _refuse(checks: _Checks, value_of: Callable[[str], Any], scope: Scope) -> None:
    for names, must_be, allows in checks:
        for name in names.split():
            value = value_of(name)
            if value is not None and not allows(value, scope):
                raise UnsupportedOptionError(f"{name}={shown(value)} is not valid: it must be {must_be}")

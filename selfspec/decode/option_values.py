"""Check the values of generation options of `transformers` by one table, before any pass.

`transformers` checks some of them, some only after a pass, and some never. A value that looks odd but has a meaning
there has the same meaning here: `top_p=1.0`, `top_k=0`, `min_p=0.0` and cutoffs of 0 or 1 filter nothing, `max_time=0`
stops after one token, `max_time=inf` never, an `eos_token_id` outside the vocabulary never ends a row, such a
`pad_token_id` is allowed if nothing is padded, and such `suppress_tokens` suppress nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import BaseWatermarkingConfig

from selfspec.arguments import shown
from selfspec.decode.prompt import has_values
from selfspec.errors import UnsupportedOptionError


@dataclass(frozen=True)
class Scope:
    """The sizes that the values of a call must fit.

    Attributes:
        vocabulary: number of token ids that the model's head writes.
        readable: number of token ids that its embedding reads, which may be larger.
        rows: of the batch; 1 if no row can end before another.
    """

    vocabulary: int
    readable: int
    rows: int


@dataclass(frozen=True)
class _Check:
    """One line of the table: options, what they must be, and whether a value is allowed."""

    names: tuple[str, ...]
    must_be: str
    allows: Callable[[Any, Scope], bool]


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_flag(value: object, _: Scope) -> bool:
    return isinstance(value, bool | np.bool_) or (isinstance(value, Integral) and value in (0, 1))


def _is_float_above_0(value: object, _: Scope) -> bool:
    # `transformers` accepts no integer here except 1, which changes nothing.
    return (isinstance(value, float) and 0 < value < math.inf) or (_is_real(value) and value == 1)


def _is_whole(least: int) -> Callable[[Any, Scope], bool]:
    # False means 0, as in `no_repeat_ngram_size=False`.
    return lambda value, _: isinstance(value, Integral) and value is not True and least <= int(value) < 2**63


def _in_unit_interval(value: Any, _: Scope) -> bool:
    return _is_real(value) and 0 <= value <= 1


def _in_unit_interval_above_0(value: Any, _: Scope) -> bool:
    return _is_real(value) and 0 < value <= 1


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_token(value: Any, scope: Scope) -> bool:
    return _is_integer(value) and 0 <= value < scope.vocabulary


def _listed(value: object) -> list[Any] | None:
    """Return the items of a list, tuple, set, array or tensor; None for anything else."""
    if isinstance(value, Tensor | np.ndarray):
        if isinstance(value, Tensor) and not has_values(value):
            return None
        held = value.tolist()
        return held if isinstance(held, list) else [held]
    return list(value) if isinstance(value, list | tuple | set | frozenset | range) else None


def _one_or_more(value: object) -> list[Any]:
    """Return the items of a list, or a single value in a list."""
    listed = _listed(value)
    return [value] if listed is None else listed


def _is_id(value: Any) -> bool:
    """Return whether a value is an id, of a token or outside the vocabulary, where it never occurs."""
    return _is_integer(value) and -(2**63) <= int(value) < 2**63


def _are_ids(value: object, _: Scope) -> bool:
    listed = _listed(value)
    return listed is not None and all(map(_is_id, listed))


def _are_forced(value: object, scope: Scope) -> bool:
    tokens = _one_or_more(value)
    return bool(tokens) and all(_is_token(token, scope) for token in tokens)


def _are_ends(value: object, _: Scope) -> bool:
    tokens = _one_or_more(value)
    return bool(tokens) and all(map(_is_id, tokens))


def _is_padding(value: object, scope: Scope) -> bool:
    tokens = _one_or_more(value)
    if len(tokens) != 1 or isinstance(value, list | tuple | set):
        return False
    nothing_to_fill = scope.rows == 1 and _is_id(tokens[0])
    return nothing_to_fill or (_is_id(tokens[0]) and 0 <= tokens[0] < scope.readable)


def _are_words(value: object, scope: Scope) -> bool:
    words = value if isinstance(value, list) else []
    return bool(words) and all(isinstance(word, list) and _is_word(word, scope) for word in words)


def _is_word(word: object, scope: Scope) -> bool:
    return isinstance(word, list | tuple) and bool(word) and all(_is_token(token, scope) for token in word)


def _are_biases(value: object, scope: Scope) -> bool:
    pairs = list(value.items()) if isinstance(value, dict) else value
    return (
        isinstance(pairs, list)
        and bool(pairs)
        and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
        and all(_is_word(word, scope) and isinstance(bias, float) and not math.isnan(bias) for word, bias in pairs)
    )


def _is_decay(value: object, _: Scope) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and _is_integer(value[0])
        and _is_real(value[1])
        and math.isfinite(value[1])
    )


def _is_watermark(value: object, _: Scope) -> bool:
    if not isinstance(value, dict | BaseWatermarkingConfig):
        return False
    bias = value.get("bias", 0.0) if isinstance(value, dict) else getattr(value, "bias", 0.0)
    return _is_real(bias) and math.isfinite(bias)


def _are_strings(value: object, _: Scope) -> bool:
    strings = _one_or_more(value)
    return bool(strings) and all(isinstance(string, str) and string for string in strings)


_ID = "a token id that the model's head writes"
_CHECKS = (
    _Check(("do_sample", "renormalize_logits", "remove_invalid_values"), "True or False", _is_flag),
    _Check(("return_dict_in_generate", "output_scores", "output_logits"), "True or False", _is_flag),
    _Check(("max_new_tokens", "max_length"), "a positive integer", _is_whole(1)),
    _Check(("prefill_chunk_size",), "an integer of at least 1, the tokens that one pass reads", _is_whole(1)),
    _Check(("num_beams",), "1: selfspec samples or decodes greedily; use model.generate for beam search", _is_whole(1)),
    _Check(("num_return_sequences",), "an integer of at least 1, the rows to return for each prompt", _is_whole(1)),
    _Check(("min_length", "min_new_tokens"), "an integer of at least 0; 0 asks for no least length", _is_whole(0)),
    _Check(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        "an integer of at least 0; 0 lets n-grams repeat",
        _is_whole(0),
    ),
    _Check(
        ("repetition_penalty", "encoder_repetition_penalty"),
        "a finite float above 0; 1.0 penalises nothing",
        _is_float_above_0,
    ),
    _Check(
        ("exponential_decay_length_penalty",),
        "a pair of an integer and a finite number: the first token it applies to, and the factor",
        _is_decay,
    ),
    _Check(("max_time",), "a number of seconds, at least 0", lambda value, _: _is_real(value) and value >= 0),
    _Check(("stop_strings",), "a string that is not empty, or a list of such; None stops nowhere", _are_strings),
    _Check(
        ("eos_token_id",),
        "a token id, or a list of them; None, or an id outside the vocabulary, ends no row",
        _are_ends,
    ),
    _Check(
        ("pad_token_id",),
        "a token id of the model's vocabulary: it fills rows that end early; 0 will do where there is none",
        _is_padding,
    ),
    # Where there is a prompt, these are not read.
    _Check(
        ("bos_token_id", "decoder_start_token_id"),
        "an integer",
        lambda value, _: all(_is_integer(token) for token in _one_or_more(value)),
    ),
    _Check(("forced_bos_token_id",), _ID, _is_token),
    _Check(("forced_eos_token_id",), f"{_ID}, or a list of such ids", _are_forced),
    _Check(("suppress_tokens", "begin_suppress_tokens"), "a list of token ids", _are_ids),
    _Check(("bad_words_ids",), "a list of lists of token ids that the model's head writes, none empty", _are_words),
    _Check(
        ("sequence_bias",),
        "a dict from tuples of token ids that the model's head writes to floats, none NaN, or a list of such pairs",
        _are_biases,
    ),
    _Check(("watermarking_config",), "a WatermarkingConfig, whose bias is a finite number", _is_watermark),
)
# Read for sampling alone: a greedy call may have any value here, such as `temperature=0.0`.
_SAMPLING_CHECKS = (
    _Check(("temperature",), "a finite float above 0; for greedy decoding pass do_sample=False", _is_float_above_0),
    _Check(("top_k",), "an integer of at least 0; 0 keeps all tokens", _is_whole(0)),
    _Check(("top_p",), "a number in 0..1; 1.0 keeps all tokens", _in_unit_interval),
    _Check(("min_p",), "a number in 0..1; 0.0 keeps all tokens", _in_unit_interval),
    _Check(("typical_p",), "a number above 0 and up to 1; 1.0 keeps all tokens", _in_unit_interval_above_0),
    _Check(("top_h",), "a number above 0 and up to 1", _in_unit_interval_above_0),
    _Check(("epsilon_cutoff", "eta_cutoff"), "a number in 0..1; 0.0 keeps all tokens", _in_unit_interval),
)
CHECKED = frozenset(name for check in (*_CHECKS, *_SAMPLING_CHECKS) for name in check.names)
"""All options of the table."""


def check_values(value_of: Callable[[str], Any], scope: Scope) -> None:
    """Check the values of a call's options; raise `UnsupportedOptionError` if one is not valid."""
    ends = value_of("eos_token_id")
    _refuse(_CHECKS, value_of, replace(scope, rows=1) if ends is None else scope)
    known = ends is not None and all(0 <= int(token) < scope.vocabulary for token in _one_or_more(ends))
    if value_of("exponential_decay_length_penalty") is not None and not known:
        raise UnsupportedOptionError(
            "exponential_decay_length_penalty makes the end likelier: pass eos_token_id, of the vocabulary, as well"
        )
    if value_of("do_sample"):
        _refuse(_SAMPLING_CHECKS, value_of, scope)


def value_in_call(name: str, options: Mapping[str, Any], configs: Sequence[GenerationConfig | None]) -> Any:
    """Return an option's value as `transformers` reads it: the keyword, else that of the first config that has one."""
    if name in options:
        return options[name]
    found = (getattr(config, name, None) for config in configs)
    return next((value for value in found if value is not None), None)


def _refuse(checks: tuple[_Check, ...], value_of: Callable[[str], Any], scope: Scope) -> None:
    for check in checks:
        for name in check.names:
            value = value_of(name)
            if value is not None and not check.allows(value, scope):
                raise UnsupportedOptionError(f"{name}={shown(value)} is not valid: it must be {check.must_be}")

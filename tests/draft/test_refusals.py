"""What makes no draft is refused, in words that name it or the remedy: names, values, and models that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.encoder_decoders import encoder_decoder
from helpers.shrunken import shrunken
from selfspec.cache.view import CHUNK
from selfspec.draft import (
    CacheInBits,
    CacheWindow,
    Cascade,
    ChosenExit,
    ChosenSkips,
    EarlyExit,
    FewerExperts,
    LayerSkip,
    LowPrecision,
    PromptLookup,
    Recycling,
    ReducedVocabulary,
    Suffixes,
    TopOfCache,
    Union,
)
from selfspec.draft.registry import parse_draft
from selfspec.errors import DraftConfigError
from selfspec.model.registry import find_adapter

KEYS = 4 * CHUNK
INT8 = LowPrecision()
NO_INTEGERS: tuple[Any, ...] = (True, False, 1.0, "1", None, float("nan"), [1])
NO_LISTS: tuple[Any, ...] = (1, 1.0, True, None, "12")
SUBLAYERS = ("attention", "mlp", "layers")

NAMES = {
    # The nearest name is told.
    "exti:4": r"did you mean exit:4\?",
    "exit4": r"did you mean exit:4\?",
    "Exit-4": r"did you mean exit:4\?",
    "int-8": r"did you mean int8\?",
    "INT4": r"did you mean int4\?",
    "look-up": r"did you mean lookup\?",
    "lookups": r"did you mean lookup\?",
    "lokup+exit4": r"did you mean lookup\+exit:4\?",
    "recycling": r"did you mean recycle\?",
    "skipp:layers=3": r"did you mean skip:layers=3\?",
    "heads:FOLDER": r"did you mean head:FOLDER\?",
    # Else how to write it.
    "exit:": "write exit:E, such as exit:4",
    "exit:4+exit:": "write exit:E, such as exit:4",
    "skip:3": "write skip:PART=LAYERS, such as skip:attn=",
    "lookup+exit:x": "write lookup; exit:E",
    "lookup:x": "write lookup",
    "lookup+none": "is not understood",
    "vocab:FILE": r"write draft\+vocab:FILE",
    "lookup+vocab:FILE": r"draft\+vocab:FILE",
    "union:": "write union:DRAFT",
    "lookup++int8": "nothing comes before or behind a",
    "lookup+": "nothing comes before or behind a",
    "rm -rf": "write exit:E, head:FOLDER",
    "no_such_module:Class": "write exit:E, head:FOLDER",
    "int3": "int4",
    "": "write exit:E, head:FOLDER",
    "experts": "write experts:N",
    "experts:0": "at least 1",
    "experts:-1": "write experts:N",
    "experts:x": "write experts:N",
    **dict.fromkeys(("kv4", "int8+kv4:2", "lookup+kv4"), r"draft\+kv4, such as int8\+kv4"),
    **dict.fromkeys(("top:512", "int8+top", "int8+top:", "int8+top:-1", "lookup+top:512"), r"such as int8\+top:512"),
    **dict.fromkeys(("window:512", "int8+window", "int8+window:", "int8+window:-1"), r"such as int8\+window:512"),
    **dict.fromkeys(("lookup+window:9", "int8+window:٣", f"int8+window:{10**23}"), r"such as int8\+window:512"),
    **dict.fromkeys(("lookup+lookup", "recycle+recycle", "lookup+recycle+lookup"), "name each draft once"),
    # What is read by its class.
    "exit:1+exit:2": "at most one draft runs a model, and here several do: exit:1 and exit:2",
    "union:exit:1+recycle+int8": "at most one draft runs a model, and here several do: exit:1 and recycle and int8",
}


@pytest.mark.parametrize(("text", "words"), NAMES.items())
def test_names(text: str, words: str) -> None:
    with pytest.raises(DraftConfigError, match=words):
        parse_draft(text)


@pytest.mark.parametrize("text", [None, 4, "x" * 10_000, "exit:" + "9" * 5000, "zzz"])
def test_a_message_is_no_essay(text: Any) -> None:
    with pytest.raises(DraftConfigError) as caught:
        parse_draft(text)
    assert len(str(caught.value).split()) < 45
    assert len(str(caught.value)) < 500


# A call without arguments, and the words of its refusal.
Refused = tuple[Any, str]


def _of_skips() -> list[Refused]:
    made: Any = LayerSkip
    found: list[Refused] = []
    for name in SUBLAYERS:
        found += [(lambda n=name, x=x: made(**{n: [2, x]}), f"{name}=.*not an integer layer") for x in NO_INTEGERS]
        found += [(lambda n=name, x=x: made(**{n: x}), f"{name} must be a list of layer numbers") for x in NO_LISTS]
        found += [(lambda n=name: made(**{n: [1, 2, 1]}), rf"{name}=\[1, 2, 1\] lists a layer more than once")]
        for layer in (4, 100, -1, -4):
            words = rf"{name}=.*layer {layer} is out of range.*layers 0\.\.3"
            found.append((lambda n=name, x=layer: made(**{n: [1, x]}).path(4), words))
    for name in SUBLAYERS[:2]:
        words = "layer 1 is skipped more than once; name each sublayer once"
        found.append((lambda n=name: made(layers=[1], **{n: [1]}).path(4), words))
    empty: tuple[Any, ...] = ({}, {"attention": [], "mlp": [], "layers": []})
    found += [(lambda x=x: made(**x).path(4), "empty.*draft=None for plain decoding") for x in empty]
    all_of_it: tuple[Any, ...] = (
        {"layers": range(4)},
        {"attention": range(4), "mlp": range(4)},
        {"layers": [0, 1], "attention": [2, 3], "mlp": [3, 2]},
    )
    return found + [(lambda x=x: made(**x).path(4), "leaves nothing.*skip fewer") for x in all_of_it]


def _values() -> list[Refused]:
    exits: Any = EarlyExit
    of: Any = {kind.__name__: kind for kind in (CacheInBits, CacheWindow, TopOfCache, ReducedVocabulary, FewerExperts)}
    bits, window, top, reduced, experts = of.values()
    found: list[Refused] = _of_skips()
    found += [(lambda x=x: exits(x).path(4), r"must be an integer.*EarlyExit\(layer=4\)") for x in (*NO_INTEGERS, 2.0)]
    found += [
        (lambda x=x: exits(x).path(4), rf"exit layer {x} .*4 layers, choose 1\.\.3") for x in (0, 4, 5, 100, -1, -4)
    ]
    found += [(lambda: exits(1).path(1), "too few")]
    found += [(lambda x=x: ChosenSkips(x).check(4), r"this model has 4, choose 1\.\.2") for x in (0, 3, True, "2")]
    ranges: tuple[Any, ...] = ((2, 2), (3, 1), (True, 3), (1, "3"))
    found += [(lambda x=x: ChosenExit(*x), "the earlier one first") for x in ranges]
    sizes: tuple[Any, ...] = ((0, 3), (3, 2), (1.5, 3), (True, 3))
    found += [(lambda x=x: PromptLookup(*x), "shortest <= longest") for x in sizes]
    bounds = {"candidates": "1 to 64", "longest": "1 to 16", "most_bytes": "8192 to"}
    numbers: tuple[Any, ...] = (0, -1, 1 << 41, 2.0, True, "8")
    found += [
        (lambda n=name, x=x: Recycling(**{n: x}), f"{name} must be an integer from {within}")
        for name, within in bounds.items()
        for x in numbers
    ]
    most = "most_bytes must be an integer from 0 to"
    found += [(lambda x=x: Suffixes(most_bytes=x), most) for x in (-1, (1 << 26) + 1, 2.0, True, "8")]
    joined: tuple[Any, ...] = ((), (EarlyExit(1),), (EarlyExit(1), "lookup"), (EarlyExit,))
    found += [(lambda k=k, x=x: k(*x), "two or more different drafters") for k in (Cascade, Union) for x in joined]
    tokens: tuple[Any, ...] = ((), (1, 1), (-1,), (1.0,), ("1",), (True,))
    found += [(lambda x=x: reduced(exits(1), x), "must list token ids, at least one and none twice") for x in tokens]
    return [
        *found,
        *((lambda x=x: bits(INT8, x), "copied in 8 or 4 bits") for x in (2, True)),
        (lambda: bits(bits(INT8)).path(4), "write \\+kv4 or \\+kv8 once"),
        (lambda: bits(window(bits(INT8), 8)).path(4), "write \\+kv4 or \\+kv8 once"),
        *((lambda x=x: window(INT8, x), "recent is an integer from 1") for x in (0, True, 10**23)),
        (lambda: window(INT8, 8, -1), "sinks is an integer from 0"),
        *((lambda x=x: top(INT8, x), f"at least {KEYS} keys") for x in (KEYS - 1, True)),
        (lambda: top(top(INT8)).path(4), "one part of the cache"),
        (lambda: top(window(INT8)).path(4), "one part of the cache"),
        (lambda: window(top(INT8)).path(4), "one part of the cache"),
        (lambda: window(window(INT8, 8), 8).path(4), "one part of the cache"),
        *((lambda x=x: experts(most=x), "at least 1") for x in (0, True)),
        (lambda: experts(experts(INT8)).path(4), "one number of experts"),
        *((lambda k=k: k(PromptLookup(), 8), "needs a drafter along a path") for k in of.values()),
    ]


@pytest.mark.parametrize(("make", "words"), _values())
def test_values(make: Callable[[], object], words: str) -> None:
    with pytest.raises(DraftConfigError, match=words):
        make()


def _hooked() -> PreTrainedModel:
    model = tiny.llama(num_hidden_layers=2)
    for layer in model.model.layers:
        layer.self_attn.forward = MethodType(type(layer.self_attn).forward, layer.self_attn)
    return model


MODELS: list[tuple[Callable[[], PreTrainedModel], Any, str]] = [
    (tiny.llama, EarlyExit(9), "out of range"),
    (tiny.llama, Cascade(PromptLookup(), EarlyExit(9)), "out of range"),
    (tiny.llama, "del:1-4", "exit layer 4 is out of range"),
    (tiny.llama, "experts:1", "has no routed experts"),
    (lambda: shrunken("mixtral"), "experts:2", "sends each token to 2 experts"),
    (tiny.llama, ReducedVocabulary(EarlyExit(1), (3, 50)), "token 50"),
    (lambda: encoder_decoder("bart"), TopOfCache(INT8), "cannot be seen; draft with int8 alone"),
    (_hooked, TopOfCache(EarlyExit(1)), "cannot be seen; draft with exit:1 alone"),
    (tiny.BUILDERS["mistral"], TopOfCache(INT8), "attends to a window already; draft with int8 alone"),
]


@pytest.mark.parametrize(("build", "draft", "words"), MODELS)
def test_models(build: Callable[[], PreTrainedModel], draft: Any, words: str) -> None:
    with pytest.raises(DraftConfigError, match=words):
        selfspec.wrap(build(), draft)


@pytest.mark.parametrize("kind", [CacheInBits, CacheWindow, TopOfCache])
def test_models_that_make_their_masks_themselves(llama: PreTrainedModel, kind: Any) -> None:
    adapter = replace(find_adapter(llama), ragged="padding")
    with pytest.raises(DraftConfigError, match="draft with int8 alone"):
        selfspec.wrap(llama, kind(INT8), adapter=adapter)

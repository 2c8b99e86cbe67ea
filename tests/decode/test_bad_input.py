"""Bad input of every kind: refused by name and by a typed error before any pass, and the next call is right."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, WatermarkingConfig
from transformers.generation import ClassifierFreeGuidanceLogitsProcessor, ConfidenceCriteria

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from selfspec.arguments import check_scores
from selfspec.control import Control
from selfspec.errors import PromptError, SelfSpecError, UnsupportedOptionError
from selfspec.saved import generate_by

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

NAN, INF = math.nan, math.inf
BEYOND = tiny.VOCABULARY
DRAFT = selfspec.drafts.EarlyExit(2)
RECIPE = {"draft": "exit:2", "draft_length": 4, "accept": None}
PROMPT = tiny.prompt(5)
HERE = Path(selfspec.__file__).parent
SAMPLING = {"do_sample": True}


@functools.cache
def _spied_on() -> tuple[selfspec.SelfSpeculative, list[str]]:
    """A wrapper of a model that notes every forward of any of its modules."""
    model = tiny.llama()
    ran: list[str] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: ran.append(type(module).__name__))
    return selfspec.wrap(model, DRAFT, draft_length=4, runtime=selfspec.runtime.Eager()), ran


@functools.cache
def _wanted() -> list[list[int]]:
    wanted: list[list[int]] = tiny.llama().generate(PROMPT, max_new_tokens=3, do_sample=False).tolist()
    return wanted


@contextmanager
def nothing_runs() -> Iterator[selfspec.SelfSpeculative]:
    """A wrapper whose model must not run meanwhile; afterwards it is as it was, and generates what it did."""
    spec, ran = _spied_on()
    config = deepcopy(spec.model.generation_config)
    ran.clear()
    try:
        yield spec
        assert ran == []
    finally:
        spec.model.generation_config = config
    assert spec.generate(PROMPT, max_new_tokens=3, do_sample=False).sequences.tolist() == _wanted()


# Options of `transformers`, by keyword, by either config, and through each way in.

NUMBERS = [NAN, INF, -INF, "1", [1.0], None.__class__]
COUNTS = [-1, 1.5, "3", [3], True, 2**70]
NO_IDS = [2**70, 1.0, "1", True]
IDS = [BEYOND, 10**9, *NO_IDS]

OPTIONS: dict[str, list[Any]] = {
    "do_sample": ["yes", 2, -1, 0.5, "False"],
    "num_beams": [0, -1, 1.5, "2"],
    "num_return_sequences": [0, -1, 1.5, "2", False],
    "max_new_tokens": [0, *COUNTS],
    "max_length": [0, *COUNTS],
    "min_length": COUNTS,
    "min_new_tokens": COUNTS,
    "no_repeat_ngram_size": COUNTS,
    "encoder_no_repeat_ngram_size": [-1, 1.5, "3"],
    "repetition_penalty": [0.0, -1.0, *NUMBERS],
    "encoder_repetition_penalty": [0.0, -1.0, NAN, INF, "1"],
    "max_time": [NAN, -1.0, -INF, "1", [1.0]],
    "stop_strings": ["", [""], ["a", ""], [], 3, [3], [None]],
    "eos_token_id": [*NO_IDS, [], [1, 2**70], [1.0], [[1]], torch.tensor([1.5])],
    "pad_token_id": [*NO_IDS, [1], [], torch.tensor([1, 2]), torch.tensor(1.0)],
    "bos_token_id": [1.5, "1", [1.5]],
    "decoder_start_token_id": [1.5, "1"],
    "forced_bos_token_id": [-1, *IDS],
    "forced_eos_token_id": [-1, *IDS, [], [1, BEYOND]],
    "suppress_tokens": [3, "3", [2**70], [True], [1.5], torch.tensor([1.5])],
    "begin_suppress_tokens": [3, ["3"], [2**70]],
    "prefill_chunk_size": [0, *COUNTS[:-1]],
    "bad_words_ids": [[], [[]], [[BEYOND]], [[-1]], [[1.5]], [3], "ab", [(1, 2)], [["a"]]],
    "sequence_bias": [
        {},
        {(1,): NAN},
        {(BEYOND,): 1.0},
        {(-1,): 1.0},
        {(): 1.0},
        {1: 1.0},
        {(1,): 1},
        {(1,): "1"},
        [[[1], NAN]],
        [[[BEYOND], 1.0]],
        [[1, 1.0]],
        [[[1]]],
        "ab",
    ],
    "exponential_decay_length_penalty": [3, (1,), (1, NAN), (1, INF), (1.5, 1.0), ("1", 1.0), (1, "2")],
    "watermarking_config": [3, "yes", WatermarkingConfig(bias=NAN), WatermarkingConfig(bias="2")],
    "renormalize_logits": ["yes", 2],
    "return_dict_in_generate": ["yes", 2],
    "output_scores": ["yes"],
    "output_logits": ["yes"],
}
SAMPLED: dict[str, list[Any]] = {
    "temperature": [0.0, -1.0, *NUMBERS],
    "top_k": COUNTS,
    "top_p": [2, -0.1, *NUMBERS],
    "typical_p": [2, 0.0, -0.1, *NUMBERS],
    "min_p": [1.5, -0.1, *NUMBERS],
    "top_h": [0.0, 1.5, -0.1, *NUMBERS],
    "epsilon_cutoff": [1.5, -0.1, *NUMBERS],
    "eta_cutoff": [1.5, -0.1, *NUMBERS],
}
BAD_OPTIONS: list[tuple[str, Any, dict[str, Any]]] = [
    (name, value, {}) for name, values in OPTIONS.items() for value in values
]
BAD_OPTIONS += [(name, value, SAMPLING) for name, values in SAMPLED.items() for value in values]


def _named(case: tuple[str, Any, dict[str, Any]]) -> str:
    return f"{case[0]}={case[1]!r}"[:60]


@pytest.mark.parametrize("case", BAD_OPTIONS, ids=_named)
def test_values_that_mean_nothing_are_refused_wherever_they_come_from(case: tuple[str, Any, dict[str, Any]]) -> None:
    name, value, beside = case
    beside = beside if name in ("max_new_tokens", "max_length") else {"max_new_tokens": 3, **beside}
    config = GenerationConfig()
    setattr(config, name, value)
    tokenizer = _Tokenizer()
    with nothing_runs() as spec:
        for call in (spec.generate, spec.stream):
            for given in ({name: value}, {"generation_config": config}):
                with pytest.raises(UnsupportedOptionError, match=name):
                    call(PROMPT, tokenizer=tokenizer, **beside, **given)
        with pytest.raises(UnsupportedOptionError, match=name):
            generate_by(RECIPE, spec.model, PROMPT, None, {name: value, "tokenizer": tokenizer, **beside})
        # What transformers itself refuses never gets here.
        with pytest.raises((SelfSpecError, ValueError, TypeError, LookupError, AttributeError, RuntimeError)) as raised:
            spec.model.generate(PROMPT, custom_generate=spec, **beside, **{name: value})
        within = [entry for entry in raised.traceback if HERE in Path(entry.path).parents]
        assert isinstance(raised.value, UnsupportedOptionError) == bool(within)
        setattr(spec.model.generation_config, name, value)
        with pytest.raises(UnsupportedOptionError, match=name):
            spec.generate(PROMPT, tokenizer=tokenizer, **beside)


class _Tokenizer:
    def get_vocab(self) -> dict[str, int]:
        raise AssertionError("nothing is to be read before the strings are checked")


# Keywords that are misspelt or of the wrong kind: a value, or what makes it.
KEYWORDS: list[tuple[str, Any, str]] = [
    ("max_new_token", 3, "did you mean 'max_new_tokens'"),
    ("maxnewtokens", 3, "did you mean 'max_new_tokens'"),
    ("temprature", 0.5, "did you mean 'temperature'"),
    ("top-p", 0.5, "did you mean 'top_p'"),
    ("dosample", True, "did you mean 'do_sample'"),
    ("repetition_penality", 1.2, "did you mean 'repetition_penalty'"),
    ("draft_lenght", 3, "did you mean 'draft_length'"),
    ("seeds", 3, "did you mean 'seed'"),
    ("accepts", "token", "did you mean 'accept'"),
    ("stopping_criterion", [], "did you mean 'stopping_criteria'"),
    ("attention_masks", PROMPT, "did you mean 'attention_mask'"),
    ("no_such_thing", 3, "no_such_thing is not supported"),
    ("generation_config", {"max_new_tokens": 3}, r"generation_config.*write GenerationConfig\("),
    ("streamer", "stdout", r"streamer.*put\(\).*TextStreamer"),
    ("cache", "cache", "a cache of type"),
    ("past_key_values", 3, "a cache of type"),
    ("cache_params", ((PROMPT, PROMPT),), "a cache of type"),
    # selfspec's own.
    ("draft_length", 0, "draft length"),
    ("draft_length", -(10**5000), "draft length"),
    ("accept", "tokn", "tokn.*choose one of"),
    ("accept", "", "choose one of"),
    ("stop_strings", "x", "tokenizer=..."),
    ("token_healing", True, "token_healing.*heal_tokens"),
    ("position_ids", torch.arange(4)[None], "(?s)position_ids.*drop it"),
    ("negative_prompt_ids", PROMPT, "(?s)negative_prompt_ids.*guidance_scale"),
    ("use_cache", False, "(?s)use_cache.*use_cache on"),
    ("custom_generate", lambda *args, **kwargs: None, "(?s)custom_generate.*drop it"),
    ("dola_layers", "low", "dola_layers.*DoLa"),
    ("prompt_lookup_num_tokens", 3, "prompt_lookup_num_tokens.*drop it"),
    ("assistant_early_exit", 2, r"assistant_early_exit.*EarlyExit\(layer="),
    ("num_beams", 2, "num_beams.*beam search"),
    ("generation_config", GenerationConfig(num_beams=2), "num_beams"),
    ("generation_config", GenerationConfig(assistant_early_exit=2), "assistant_early_exit"),
    ("generation_config", GenerationConfig(stop_strings=["end"]), "stop_strings"),
    ("generation_config", GenerationConfig(use_cache=False), "use_cache"),
    ("logits_processor", [ClassifierFreeGuidanceLogitsProcessor(1.5)], "(?s)ClassifierFreeGuidance.*guidance_scale"),
    ("stopping_criteria", [ConfidenceCriteria(0.4)], "(?s)stopping criterion ConfidenceCriteria.*drop it"),
    ("exponential_decay_length_penalty", (1, 1.1), "exponential_decay.*pass eos_token_id"),
]
# Values that are refused by the name of their keyword.
NAMED: dict[str, list[Any]] = {
    "generation_config": ["greedy", GenerationConfig],
    "streamer": [print, 3],
    "logits_processor": [3, "penalty", lambda ids, scores: scores, [3], [None], [LogitsProcessorList]],
    "stopping_criteria": [3, "end", [None], lambda ids, scores: False],
    "prefix_allowed_tokens_fn": [3, [1, 2]],
    "seed": [1.5, "0", True, 2**63, -(2**63) - 1, [0]],
    "accept": [3, True, ["token"], b"token", object(), type(selfspec.accept.rules()["token"])],
    "cache_implementation": ["static", "paged", "quantized"],
    "synced_gpus": [True],
    "labels": [PROMPT],
    "token_type_ids": [torch.ones_like(PROMPT)],
}
RETURNED = {"return_dict_in_generate": True}
CALLS: list[tuple[str, dict[str, Any]]] = [
    *((match, {name: value}) for name, value, match in KEYWORDS),
    *((name, {name: value}) for name, values in NAMED.items() for value in values),
    ("num_beams.*beam search", {"num_beams": 2, **SAMPLING}),
    ("num_beams.*beam search", {"num_beams": 4, "num_return_sequences": 2}),
    ("penalty_alpha.*contrastive", {"penalty_alpha": 0.6, "top_k": 4}),
    ("output_attentions.*model.generate", {"output_attentions": True, **RETURNED}),
    ("output_hidden_states.*model.generate", {"output_hidden_states": True, **RETURNED}),
    ("output_attentions", {"generation_config": GenerationConfig(output_attentions=True, **RETURNED)}),
    ("max_length", {"max_length": 4, "max_new_tokens": None}),
    ("temperature", {"temperature": [0.5, 0.7], **SAMPLING}),
    ("pad_token_id", {"input_ids": tiny.prompt(5, 2), "pad_token_id": -1, "eos_token_id": 1}),
    ("pad_token_id", {"input_ids": tiny.prompt(5, 2), "pad_token_id": -100, "eos_token_id": 1}),
    ("pad_token_id", {"pad_token_id": -1, "eos_token_id": 1, "num_return_sequences": 2, **SAMPLING}),
    *((r"tokenizer.*AutoTokenizer", {"stop_strings": ["x"], "tokenizer": each}) for each in ("gpt2", 3, _spied_on)),
]


@pytest.mark.parametrize(("match", "options"), CALLS, ids=[f"{n} {call[0][:30]}" for n, call in enumerate(CALLS)])
def test_what_cannot_be_honoured_is_refused_by_name(match: str, options: dict[str, Any]) -> None:
    with nothing_runs() as spec:
        for call in (spec.generate, spec.stream):
            with pytest.raises(SelfSpecError, match=match):
                call(**{"input_ids": PROMPT, "max_new_tokens": 3, **options})


# Prompts and masks.


def _with(token: int, place: int) -> Tensor:
    prompts = tiny.prompt(5, 2)
    prompts[1, place] = token
    return prompts


ONES, ENDING = [1, 1, 1, 1, 1], "ends with zeros; pad on the left.*padding_side='left'"
_RIGHT = [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 1, 1, 0], [1, 0, 1, 1, 0]]
_DTYPES = (torch.bool, torch.float64, torch.int32, torch.uint8)
# The words of a refusal, the prompts, their mask, and the new tokens that are asked for.
SHAPES: list[tuple[str, Tensor | None, Tensor | None, int]] = [
    ("pass input_ids", None, None, 3),
    *(
        ("empty.*bos token", torch.zeros(shape, dtype=torch.long), None, 3)
        for shape in [(1, 0), (0, 5), (0, 0), (3, 0)]
    ),
    *(
        (r"\[batch, prompt\]", torch.ones(shape, dtype=torch.long), None, 3)
        for shape in [(5,), (1, 1, 5), (2, 2, 2), ()]
    ),
    *(
        (rf"{token} is outside the vocabulary 0\.\.49.*tokenizer", _with(token, place), None, 3)
        for token in (-1, -100, BEYOND, 10**9, -(2**62))
        for place in (0, 4)
    ),
    *(
        ("attention_mask has shape .* input_ids .*they must agree", tiny.prompt(5, 2), torch.ones(shape), 3)
        for shape in [(1, 5), (2, 4), (2, 6), (5,), (2, 5, 5), (2, 1, 5, 5), (5, 2)]
    ),
    *((ENDING, tiny.prompt(5, 2), torch.tensor([ONES, row]), 3) for row in _RIGHT),
    *((ENDING, tiny.prompt(5, 2), torch.tensor([ONES, _RIGHT[0]], dtype=dtype), 3) for dtype in _DTYPES),
    (
        r"row\(s\) \[1, 3\] .*all zero; drop these rows",
        tiny.prompt(3, 4),
        torch.tensor([[1, 1, 1], [0, 0, 0], [0, 1, 1], [0, 0, 0]]),
        3,
    ),
    *(
        (
            rf"prompt \({prompt} tokens\).*max_new_tokens \({new}\).*context of 128; {remedy}",
            tiny.prompt(prompt),
            None,
            new,
        )
        for prompt, new, remedy in (
            (5, tiny.CONTEXT - 4, "ask for at most 123 new tokens or shorten"),
            (1, 10**6, "ask for at most 127 new tokens or shorten"),
            (tiny.CONTEXT, 1, "shorten the prompt$"),
            (tiny.CONTEXT + 3, 1, "shorten the prompt$"),
        )
    ),
]


@pytest.mark.parametrize(("match", "ids", "mask", "new"), SHAPES, ids=range(len(SHAPES)))
def test_prompts_that_do_not_fit_are_refused(match: str, ids: Tensor | None, mask: Tensor | None, new: int) -> None:
    with nothing_runs() as spec:
        for call in (spec.generate, spec.stream):
            with pytest.raises(PromptError, match=match):
                call(ids, mask, max_new_tokens=new)


_NO_INTEGERS = (torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64)
_NO_IDS = "input_ids.*LongTensor.*return_tensors='pt'"
_NESTED = partial(torch.nested.nested_tensor, [PROMPT[0], PROMPT[0, :3]], dtype=torch.long)
_NO_MASKS: list[Any] = [
    *(torch.full((1, 5), value) for value in (0.5, NAN, INF, -1, 2)),
    *(
        torch.tensor([row])
        for row in ([0.0, 0.5, 1.0, 1.0, 1.0], [1.0, NAN, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, -INF, 1.0])
    ),
    torch.tensor([[1, 1, 1, 1, 255]], dtype=torch.uint8),
    torch.ones(1, 5, dtype=torch.complex64) * 1j,
    torch.ones(1, 5, device="meta"),
    torch.ones(1, 5).to_sparse(),
    *([[1] * 5], ((1,) * 5,), "all", 1, np.ones((1, 5))),
]
# The words of a refusal, what makes the prompt, and its mask.
PROMPTS: list[tuple[str, Callable[[], Any], Any]] = [
    *(("input_ids", make, None) for make in (partial(PROMPT.to, "meta"), PROMPT.to_sparse, _NESTED)),
    *((_NO_IDS, partial(PROMPT.to, dtype), None) for dtype in _NO_INTEGERS),
    *((_NO_IDS, make, None) for make in (PROMPT.numpy, PROMPT.tolist, lambda: {"input_ids": PROMPT})),
    *((_NO_IDS, make, None) for make in (lambda: "Once", lambda: 3)),
    *(("attention_mask", lambda: PROMPT, mask) for mask in _NO_MASKS),
]


@pytest.mark.parametrize(("name", "ids", "mask"), PROMPTS, ids=range(len(PROMPTS)))
def test_prompts_and_masks_without_a_meaning_are_refused(name: str, ids: Callable[[], Any], mask: Any) -> None:
    with nothing_runs() as spec:
        for call in (spec.generate, spec.stream):
            with pytest.raises(PromptError, match=name):
                call(ids(), mask, max_new_tokens=3)
        with pytest.raises(PromptError, match=name):
            generate_by(RECIPE, spec.model, ids(), None, {"attention_mask": mask, "max_new_tokens": 3})
        # Of others transformers itself reads the values before.
        if isinstance(mask, Tensor) and not (mask.is_meta or mask.is_sparse):
            with pytest.raises(PromptError, match=name):
                spec.model.generate(ids(), attention_mask=mask, custom_generate=spec, max_new_tokens=3)


# What looks odd and means something in transformers means the same here.

ODD: list[dict[str, Any]] = [
    {"do_sample": 0}, {"do_sample": None}, {"do_sample": np.False_}, {"num_return_sequences": 1},
    {"no_repeat_ngram_size": 0}, {"no_repeat_ngram_size": False}, {"min_length": 0},
    {"min_new_tokens": 0, "eos_token_id": 1}, {"repetition_penalty": 1}, {"repetition_penalty": 1e30},
    {"max_time": INF}, {"max_time": 0.0}, {"eos_token_id": -1}, {"eos_token_id": [-1, -100]},
    {"eos_token_id": np.int64(7)}, {"eos_token_id": (1, 2)}, {"eos_token_id": torch.tensor(7)}, {"pad_token_id": -1},
    {"pad_token_id": -100}, {"pad_token_id": torch.tensor(3)}, {"bos_token_id": 10**6}, {"eos_token_id": BEYOND},
    {"eos_token_id": [7, BEYOND], "pad_token_id": BEYOND}, {"eos_token_id": BEYOND, "min_new_tokens": 2},
    {"pad_token_id": BEYOND}, {"pad_token_id": 10**9, "eos_token_id": 7, "repetition_penalty": 1.3},
    {"suppress_tokens": [-1]}, {"suppress_tokens": [BEYOND, 3]}, {"begin_suppress_tokens": [-1, BEYOND]},
    {"cache_implementation": "dynamic"}, {"prefill_chunk_size": 1},
    {"prefill_chunk_size": 2, "cache_implementation": "dynamic"}, {"prefill_chunk_size": 100},
    {"trust_remote_code": True}, {"suppress_tokens": []}, {"suppress_tokens": torch.tensor([1, 2])},
    {"suppress_tokens": (1, 2)}, {"bad_words_ids": [[np.int64(3)]]}, {"sequence_bias": {(1,): -INF}},
    {"sequence_bias": [[[1, 2], 2.0]]}, {"forced_eos_token_id": [3, 4]},
    {"exponential_decay_length_penalty": (2, 1.1), "eos_token_id": 3}, {"watermarking_config": {"bias": 3}},
    {"max_length": np.int64(12)}, {"num_beams": 1, "use_cache": True, "synced_gpus": False, "streamer": None},
    {"past_key_values": None, "inputs_embeds": None, "assistant_model": None, "logits_processor": None},
    # Greedy decoding reads none of these.
    {"do_sample": False, "temperature": 0.0}, {"do_sample": False, "temperature": NAN},
    {"do_sample": False, "top_p": 2}, {"do_sample": False, "top_k": -1}, {"do_sample": False, "typical_p": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("options", ODD, ids=str)
def test_odd_values_mean_what_they_mean_in_transformers(options: dict[str, Any]) -> None:
    model = tiny.llama()
    options = {"max_new_tokens": None if "max_length" in options else 6, **options}
    assert_alike(selfspec.wrap(model, DRAFT, draft_length=4), inputs=PROMPT, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 1.0},
        {"top_p": 1},
        {"top_k": 0},
        {"top_k": False},
        {"top_k": 10**6},
        {"min_p": 0.0},
        {"typical_p": 1.0},
        {"epsilon_cutoff": 0.0},
        {"epsilon_cutoff": 1.0},
        {"eta_cutoff": 1.0},
        {"temperature": 1},
        {"temperature": None},
    ],
    ids=str,
)
def test_filters_that_keep_all_tokens_keep_them(options: dict[str, Any]) -> None:
    spec = selfspec.wrap(tiny.llama(), DRAFT, draft_length=4)
    plain: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "seed": 3, "top_k": 0}
    assert torch.equal(
        spec.generate(PROMPT, **{**plain, **options}).sequences, spec.generate(PROMPT, **plain).sequences
    )


@pytest.mark.parametrize("options", [{"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-30}, {"top_k": 1}], ids=str)
def test_filters_that_keep_one_token_keep_the_likeliest(options: dict[str, Any]) -> None:
    model = tiny.llama()
    wanted = model.generate(PROMPT, max_new_tokens=6, do_sample=False)
    out = selfspec.wrap(model, DRAFT, draft_length=4).generate(PROMPT, max_new_tokens=6, do_sample=True, **options)
    assert torch.equal(out.sequences, wanted)


def test_a_batch_whose_end_never_comes_runs_to_its_length() -> None:
    model, prompts = tiny.llama(), tiny.prompt(5, 3)
    spec = selfspec.wrap(model, DRAFT, draft_length=4)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
    assert torch.equal(spec.generate(prompts, **options).sequences, model.generate(prompts, **options))


# Slack.


@pytest.mark.parametrize(
    ("draft", "control"),
    [
        (DRAFT, 10**9),
        (DRAFT, 10**5000),
        (DRAFT, selfspec.CostAware(longest=10**9)),
        (DRAFT, selfspec.CostAware(longest=10**9, costs=selfspec.Costs(draft=0.01))),
        (selfspec.drafts.PromptLookup(1, 3), 10**9),
        (selfspec.drafts.PromptLookup(1, 3), selfspec.CostAware(longest=10**9)),
        (selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(), DRAFT), selfspec.CostAware(longest=10**9)),
    ],
    ids=lambda value: str(value)[:60] if not isinstance(value, int) else f"{value.bit_length()} bits",
)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_draft_of_any_length_takes_no_more_memory_than_can_be_used(
    draft: selfspec.drafts.Drafter, control: int | Control, rows: int
) -> None:
    model = tiny.llama()
    prompts = tiny.prompt(5, rows)
    spec = selfspec.wrap(model, draft, draft_length=control, runtime=selfspec.runtime.Eager())
    out = spec.generate(prompts, max_new_tokens=9, do_sample=False)
    assert torch.equal(out.sequences, model.generate(prompts, max_new_tokens=9, do_sample=False))
    slots = (5 + 9) + 9
    assert out.stats.cache_bytes <= rows * slots * tiny.DEPTH * 2 * 2 * 8 * 8


# Results of processors.


class _Named:
    """Stands for a processor."""


@pytest.mark.parametrize(
    "found",
    [
        None,
        3,
        [[0.0] * 7],
        torch.zeros(2, 6),
        torch.zeros(1, 7),
        torch.zeros(7),
        torch.zeros(2, 7, 1),
        torch.zeros(2, 7, dtype=torch.long),
        torch.zeros(2, 7, dtype=torch.bool),
        torch.zeros(2, 7, dtype=torch.complex64),
    ],
    ids=lambda found: str(found)[:20] if not isinstance(found, Tensor) else f"{found.dtype} {list(found.shape)}",
)
def test_what_is_no_scores_is_refused_in_the_processors_name(found: object) -> None:
    with pytest.raises(UnsupportedOptionError, match="logits processor _Named returned"):
        check_scores(_Named(), found, torch.zeros(2, 7))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_scores_of_any_floating_dtype_are_taken(dtype: torch.dtype) -> None:
    found = torch.zeros(2, 7, dtype=dtype)
    assert check_scores(_Named(), found, torch.zeros(2, 7)) is found

"""Requests: what cannot be honoured is refused by name before any pass; rows end where transformers ends them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

import selfspec
from helpers import tiny
from helpers.drafting import assert_alike
from helpers.joints import assert_rows_are_stock
from selfspec.errors import PromptError, UnsupportedOptionError

DRAFT = selfspec.drafts.EarlyExit(2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_vocabularys_ends_are_inside_it(dtype: torch.dtype) -> None:
    model = tiny.llama()
    prompts = torch.tensor([[0, tiny.VOCABULARY - 1]], dtype=dtype)
    out = selfspec.wrap(model, DRAFT, draft_length=4).generate(prompts, max_new_tokens=5, do_sample=False)
    assert out.sequences.dtype == torch.long
    assert out.sequences.tolist() == model.generate(prompts.long(), max_new_tokens=5, do_sample=False).tolist()


def test_the_callers_tensors_and_config_are_left_alone(llama: PreTrainedModel) -> None:
    prompts, config = tiny.prompt(5, 2), GenerationConfig(max_new_tokens=5, do_sample=True, temperature=0.5)
    mask = torch.ones_like(prompts)
    mask[0, :2] = 0
    before = prompts.clone(), mask.clone(), config.to_dict()
    out = selfspec.wrap(llama, DRAFT, draft_length=4).generate(prompts, mask, config, seed=1)
    assert torch.equal(prompts, before[0])
    assert torch.equal(mask, before[1])
    assert config.to_dict() == before[2]
    assert out.sequences.data_ptr() != prompts.data_ptr()
    assert torch.equal(out.sequences[:, :5], prompts)


# Masks.


@pytest.mark.parametrize("options", [{"pad_token_id": 7}, {"pad_token_id": 7, "eos_token_id": 7}], ids=str)
def test_without_a_mask_padding_is_where_transformers_finds_it(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    prompts = torch.tensor([[7, 7, 3, 9, 4], [8, 5, 3, 9, 4]])
    spec = selfspec.wrap(llama, DRAFT, draft_length=4)
    assert_alike(spec, inputs=prompts, max_new_tokens=9, do_sample=False, **options)


def test_a_padding_token_within_the_text_is_refused_without_a_mask(llama: PreTrainedModel) -> None:
    spec, prompts = selfspec.wrap(llama, DRAFT, draft_length=4), torch.tensor([[3, 7, 9, 4]])
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 7, "eos_token_id": 2}
    for call in (spec.generate, spec.stream):
        with pytest.raises(PromptError, match=r"attention_mask=torch.ones_like"):
            call(prompts, **options)
    assert_alike(spec, inputs=prompts, attention_mask=torch.ones_like(prompts), **options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32])
def test_a_mask_of_any_dtype_means_the_same(llama: PreTrainedModel, dtype: torch.dtype) -> None:
    prompts, mask = tiny.prompt(6, 2), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    spec = selfspec.wrap(llama, DRAFT, draft_length=4)
    wanted = llama.generate(prompts, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert torch.equal(spec.generate(prompts, mask.to(dtype), max_new_tokens=9, do_sample=False).sequences, wanted)


def test_ids_under_the_padding_do_not_matter(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, DRAFT, draft_length=4)
    prompts, mask = tiny.prompt(6, 2), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    other = prompts.clone()
    other[0, :2] = 0
    one, two = (spec.generate(p, mask, max_new_tokens=9, do_sample=True, seed=2).sequences for p in (prompts, other))
    assert torch.equal(one[:, 2:], two[:, 2:])


# Length.


@pytest.mark.parametrize("new", [1, 3])
def test_exactly_the_context_works(architecture: str, new: int) -> None:
    model = tiny.BUILDERS[architecture]()
    prompts = tiny.prompt(tiny.CONTEXT - new, 2)
    spec = selfspec.wrap(model, DRAFT, draft_length=4)
    text = assert_alike(spec, inputs=prompts, max_new_tokens=new, do_sample=False)
    assert text.shape == (2, tiny.CONTEXT)


def test_padding_does_not_count_towards_the_context() -> None:
    """A row of 4 tokens under 20 of padding has 28 of 32 positions left; the longest row decides."""
    spec = selfspec.wrap(tiny.llama(max_position_embeddings=32), DRAFT, draft_length=4)
    prompts = tiny.prompt(24, 2)
    mask = torch.ones_like(prompts)
    mask[:, :20] = 0
    out = spec.generate(prompts, mask, max_new_tokens=28, do_sample=False)
    assert out.sequences.shape == (2, 52)
    mask[1, 19] = 1
    with pytest.raises(PromptError, match=r"prompt \(5 tokens\).*at most 27"):
        spec.generate(prompts, mask, max_new_tokens=28)


# Options.


class _PrefixWarper(TemperatureLogitsWarper):
    """Called a temperature, and yet it reads the prefix."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids, -float("inf"))


class _StatelessPrefixWarper(_PrefixWarper):
    stateless = True


def test_the_models_own_generation_config_is_read_too(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, DRAFT, draft_length=4)
    llama.generation_config.penalty_alpha = 0.6
    llama.generation_config.top_k = 4
    with pytest.raises(UnsupportedOptionError, match=r"penalty_alpha=0.6"):
        spec.generate(tiny.prompt(5), max_new_tokens=3)
    llama.generation_config.penalty_alpha = llama.generation_config.top_k = None
    llama.generation_config.repetition_penalty = 1.6
    llama.generation_config.max_new_tokens = 4
    llama.generation_config.eos_token_id = 7
    assert spec.generate(tiny.prompt(5)).sequences.tolist() == llama.generate(tiny.prompt(5)).tolist()


def test_keywords_win_over_a_generation_config(llama: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=9, do_sample=True, num_beams=2)
    out = selfspec.wrap(llama, DRAFT, draft_length=4).generate(
        tiny.prompt(5), generation_config=config, max_new_tokens=4, do_sample=False, num_beams=1
    )
    assert out.sequences.tolist() == llama.generate(tiny.prompt(5), max_new_tokens=4, do_sample=False).tolist()


@pytest.mark.parametrize(
    "processors",
    [
        [_PrefixWarper(0.5)],
        [_StatelessPrefixWarper(0.5)],
        [TypicalLogitsWarper(0.3)],
        [TopKLogitsWarper(3), TypicalLogitsWarper(0.2)],
        [TemperatureLogitsWarper(0.5)],
    ],
    ids=lambda processors: " ".join(type(processor).__name__ for processor in processors),
)
def test_a_users_warper_counts_in_greedy_decoding_too(llama: PreTrainedModel, processors: list[Any]) -> None:
    """`transformers` applies a given processor whether it samples or not; typical sampling can leave out the argmax."""
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    options["logits_processor"] = LogitsProcessorList(processors)
    assert_alike(selfspec.wrap(llama, DRAFT, draft_length=4), inputs=tiny.prompt(5), **options)


@pytest.mark.parametrize("padding", [None, 1])
def test_end_of_sequence_tokens_end_and_pad_rows_as_transformers_does(
    llama: PreTrainedModel, padding: int | None
) -> None:
    prompts = tiny.prompt(6, 3)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompts)}
    text = llama.generate(prompts, **options)
    # The first listed is larger than the second, and the second ends one row before the others.
    ends, never = int(text[1, 9]), max(set(range(tiny.VOCABULARY)) - set(text.flatten().tolist()))
    assert ends < never
    options |= {"eos_token_id": [never, ends], "pad_token_id": padding}
    spec = selfspec.wrap(llama, DRAFT, draft_length=4)
    assert not torch.equal(assert_alike(spec, inputs=prompts, **options), text)


def test_several_returned_sequences_repeat_their_prompt_and_mask(llama: PreTrainedModel) -> None:
    prompts, mask = tiny.prompt(6, 2), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    spec = selfspec.wrap(llama, DRAFT, draft_length=4)
    out = spec.generate(prompts, mask, max_new_tokens=8, do_sample=True, top_k=1, num_return_sequences=3, seed=0)
    greedy = llama.generate(prompts, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert out.sequences.tolist() == greedy.repeat_interleave(3, 0).tolist()
    with pytest.raises(UnsupportedOptionError, match="num_return_sequences"):
        spec.generate(prompts, mask, max_new_tokens=8, do_sample=False, num_return_sequences=3)


# What changes nothing without another option, and what a checkpoint says by itself.

INERT: list[dict[str, Any]] = [
    {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic"},
    {"assistant_confidence_threshold": 0.1, "assistant_lookbehind": 3, "target_lookbehind": 3},
    {"max_matching_ngram_size": 3},
    {"low_memory": True},
    {"penalty_alpha": 0.6, "top_k": 1},
    {"max_cache_len": 64},
    {"output_attentions": True},
    {"output_hidden_states": True},
    # As mpt's config does by default. Who asks for it in the call is refused.
    {"use_cache": False},
]


@pytest.mark.parametrize("options", INERT, ids=lambda options: next(iter(options)))
def test_what_changes_nothing_is_no_reason_to_refuse(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    spec = selfspec.wrap(llama, DRAFT, draft_length=4)
    wanted = llama.generate(tiny.prompt(5), max_new_tokens=9, do_sample=False)
    for name, value in options.items():
        setattr(llama.generation_config, name, value)
    llama.config.use_cache = options.get("use_cache", True)
    for found in (
        spec.generate(tiny.prompt(5), max_new_tokens=9, do_sample=False).sequences,
        llama.generate(tiny.prompt(5), custom_generate=spec, max_new_tokens=9, do_sample=False),
    ):
        assert torch.equal(found, wanted)


def test_a_call_without_a_cache_is_refused_where_the_checkpoint_asks_for_none_too(llama: PreTrainedModel) -> None:
    llama.generation_config.use_cache = False
    with pytest.raises(UnsupportedOptionError, match="use_cache"):
        selfspec.wrap(llama, DRAFT).generate(tiny.prompt(5), max_new_tokens=3, use_cache=False)


# Drafting with all of the network but one late MLP accepts long runs, so that ends fall inside them.
LONG_RUNS = selfspec.drafts.LayerSkip(mlp=[3])
NO_END: dict[str, Any] = {}


class Repeats(StoppingCriteria):
    """Ends a row once a token comes that stood before in its new text."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        last = input_ids[:, -1:]
        return (input_ids[:, 5:-1] == last).any(1)


class AtSeven(MaxLengthCriteria):
    """Called a length, and yet it has its own mind."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full(input_ids.shape[:1], input_ids.shape[1] >= 7)


@pytest.mark.parametrize("criterion", [Repeats, lambda: AtSeven(99), lambda: lambda ids, scores: ids[:, -1] % 3 == 0])
def test_rows_end_each_at_its_own_token(llama: PreTrainedModel, criterion: Any) -> None:
    prompts = torch.cat([tiny.prompt(5, seed=seed) for seed in range(4)])
    spec = selfspec.wrap(llama, LONG_RUNS, draft_length=5)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    for ends in (NO_END, {"eos_token_id": 49, "suppress_tokens": [49]}):
        out = spec.generate(prompts, stopping_criteria=StoppingCriteriaList([criterion()]), **options, **ends)
        assert torch.equal(out.sequences, llama.generate(prompts, stopping_criteria=[criterion()], **options, **ends))
        for row in range(4):
            alone = llama.generate(
                prompts[row : row + 1], stopping_criteria=StoppingCriteriaList([criterion()]), **options, **ends
            )[0]
            assert out.sequences[row, : 5 + out.lengths[row]].tolist() == alone.tolist()
            assert not ends or (out.sequences[row, 5 + out.lengths[row] :] == 0).all()


def stateless(criterion: Any) -> Any:
    criterion.stateless = True
    return criterion


class AtOwnLength(StoppingCriteria):
    """Ends each row at a length of its own."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= 5 + self.lengths


class KnowsTheEnd(AtOwnLength):
    """Has what `transformers` takes for a sign that there is an end token."""

    eos_token_id = 49


@pytest.mark.parametrize(
    "draft", [None, LONG_RUNS, selfspec.drafts.PromptLookup(shortest=1), selfspec.drafts.Suffixes()], ids=repr
)
@pytest.mark.parametrize("criterion", [AtOwnLength(9, 2, 6), stateless(AtOwnLength(3, 11, 7)), KnowsTheEnd(4, 9, 1)])
@pytest.mark.parametrize("sampled", [False, True])
def test_without_an_end_token_a_row_that_a_criterion_ended_goes_on_until_all_have(
    llama: PreTrainedModel, draft: Any, criterion: AtOwnLength, sampled: bool
) -> None:
    prompts = tiny.prompt(5, 3).clamp(min=1)
    lengths = criterion.lengths.tolist()
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": sampled, "pad_token_id": 0, "seed": 1}
    spec = selfspec.wrap(llama, draft, draft_length=4, accept="coupled" if sampled else None)
    # Its tokens are those that it has without a criterion.
    whole = spec.generate(prompts, **options).sequences[:, 5:].tolist()
    options |= {"return_dict_in_generate": True, "output_scores": True, "stopping_criteria": [criterion]}
    out: Any = spec.generate(prompts, **options)
    assert out.lengths == tuple(lengths)
    pads = isinstance(criterion, KnowsTheEnd)
    most = max(lengths)
    for row, wanted, length in zip(out.sequences[:, 5:].tolist(), whole, lengths, strict=True):
        assert row == wanted[: length if pads else most] + [0] * (most - length if pads else 0)
    if not sampled:
        del options["seed"]
        found = llama.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        assert torch.equal(out.sequences, found.sequences)
        if not pads:
            torch.testing.assert_close(torch.stack(out.scores), torch.stack(found.scores), atol=1e-5, rtol=1e-5)
            keys = out.past_key_values.layers[0].keys
            torch.testing.assert_close(keys, found.past_key_values.layers[0].keys)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "criterion",
    [MaxLengthCriteria(9), MaxLengthCriteria(40), MaxLengthCriteria(3), EosTokenCriteria([7, 11, 13, 19, 20])],
)
def test_a_callers_own_length_or_end_takes_the_place_of_the_configs(llama: PreTrainedModel, criterion: Any) -> None:
    options: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([criterion]), "eos_token_id": 49}
    spec = selfspec.wrap(llama, LONG_RUNS, draft_length=4)
    assert_alike(spec, inputs=tiny.prompt(5), max_new_tokens=24, do_sample=False, **options)


def test_max_time_ends_the_text_at_the_first_token_after_it(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, LONG_RUNS, draft_length=4)
    out = spec.generate(tiny.prompt(5), max_new_tokens=24, do_sample=False, max_time=1e-9)
    assert out.lengths == (1,)
    out = spec.generate(tiny.prompt(5), max_new_tokens=24, do_sample=False, max_time=3600.0)
    assert out.lengths == (24,)


# Stop strings.


@pytest.mark.parametrize("strings", ["Lily", ["park", "big"], [" th", "zzz"], ["gir"], ["."]], ids=str)
@pytest.mark.parametrize("length", [2, 7])
def test_a_stop_string_ends_the_text_inside_an_accepted_run(
    exact_stories: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, strings: Any, length: int
) -> None:
    prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    wanted = exact_stories.generate(prompt, stop_strings=strings, tokenizer=tokenizer, **options)
    assert wanted.shape[1] < prompt.shape[1] + 60
    spec = selfspec.wrap(exact_stories, selfspec.drafts.LayerSkip(attention=[1]), draft_length=length)
    out = spec.generate(prompt, stop_strings=strings, tokenizer=tokenizer, **options)
    assert torch.equal(out.sequences, wanted)
    # Through transformers, which drops the tokenizer, the criterion itself goes in.
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, strings)])
    assert torch.equal(
        exact_stories.generate(prompt, custom_generate=spec, stopping_criteria=criteria, **options), wanted
    )


def test_vocabularies_that_stop_strings_cannot_be_found_in_are_refused(exact_stories: PreTrainedModel) -> None:
    words = Tokenizer(models.WordLevel({"once": 0, "upon": 1}, unk_token="once"))
    ids, tokenizer = torch.tensor([[0, 1]]), PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(UnsupportedOptionError, match=r"stop_strings in the tokens of .*stopping_criteria"):
        selfspec.wrap(exact_stories).generate(ids, max_new_tokens=4, stop_strings=["on"], tokenizer=tokenizer)


def test_stop_strings_of_a_config_count_and_the_models_own_do_not_change(
    exact_stories: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids
    spec = selfspec.wrap(exact_stories, selfspec.drafts.LayerSkip(attention=[1]), draft_length=4)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    wanted = exact_stories.generate(prompt, stop_strings=["girl"], tokenizer=tokenizer, **options)
    config = GenerationConfig(stop_strings=["girl"], **options)
    assert torch.equal(spec.generate(prompt, generation_config=config, tokenizer=tokenizer).sequences, wanted)
    assert config.stop_strings == ["girl"]
    own = exact_stories.generation_config
    own.stop_strings = ["girl"]
    try:
        assert torch.equal(spec.generate(prompt, tokenizer=tokenizer, **options).sequences, wanted)
        assert exact_stories.generation_config is own
        assert own.stop_strings == ["girl"]
        with pytest.raises(selfspec.errors.UnsupportedOptionError, match="tokenizer"):
            spec.generate(prompt, **options)
    finally:
        own.stop_strings = None


def test_stop_strings_in_a_batch_end_each_row_at_its_own(
    exact_stories: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = ["Once upon a time", "Tom had a big dog. One day, he", "Lily and Ben"]
    rows = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    options: dict[str, Any] = {"stop_strings": ["day", " the", "play"], "tokenizer": tokenizer}
    spec = selfspec.wrap(exact_stories, selfspec.drafts.LayerSkip(attention=[1]), draft_length=4)
    out = assert_rows_are_stock(exact_stories, spec, rows, max_new_tokens=40, **options)
    assert len(set(out.lengths)) > 1

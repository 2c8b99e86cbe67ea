"""Processors and criteria that remember are called as `transformers` calls them: once for each token, in order.

What is checked against is plain `model.generate` with fresh ones: the same calls with the same ids, whoever is asked in
turn. `transformers` goes on to compute rows that have ended, so what such a row is given for scores is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import RepetitionPenaltyLogitsProcessor, StoppingCriteria

import selfspec
from helpers import tiny
from helpers.joints import drawn, enumerated, holm_rejects, p_value, small
from helpers.tiny import in_turns
from selfspec.draft import Drafter

WIDTH, NEW, PAD = 8, 20, 0
ENDS = [7, 25]
"""Several ends of sequence, so that rows end in turn."""

EXIT = selfspec.drafts.EarlyExit(3)
DRAFTS: dict[str, Drafter | None] = {
    "plain": None,
    "exit": EXIT,
    "skip": selfspec.drafts.LayerSkip(mlp=[3]),
    "look-up": selfspec.drafts.PromptLookup(shortest=1),
    "cascade": selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(shortest=1), EXIT),
}


@dataclass(frozen=True)
class Call:
    """What was called with all rows' ids; `scores`, `[tokens, rows, vocab]`, begin with new token number `first`."""

    who: str
    ids: list[list[int]]
    first: int
    scores: Tensor | None = field(compare=False)


class InOrder:
    """Raises unless each call holds the ids of the call before and one column more."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def follow(self, ids: Tensor) -> None:
        if self.last is not None:
            assert ids.shape == (self.last.shape[0], self.last.shape[1] + 1), (ids.shape, self.last.shape)
            assert torch.equal(ids[:, :-1], self.last), "the text that was shown before has changed"
        self.last = ids.clone()


class Drifting(LogitsProcessor):
    """Changes the scores by all that it was ever shown, in place, as grammars do; tolerates no call out of order."""

    def __init__(self, log: list[Call] | None = None, who: str = "processor") -> None:
        self.log: list[Call] = [] if log is None else log
        self.who = who
        self.calls = 0
        self._order = InOrder()
        self._seen: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._order.follow(input_ids)
        self.log.append(Call(self.who, input_ids.tolist(), input_ids.shape[1] - WIDTH, scores.clone()[None]))
        seen = torch.zeros(len(input_ids), dtype=torch.long) if self._seen is None else self._seen
        self._seen = (31 * seen + input_ids[:, -1] + self.calls) % 997
        self.calls += 1
        scores += bias(self._seen, scores.shape[1])
        scores[:, PAD] = -torch.inf
        return scores


def bias(seen: Tensor, vocabulary: int) -> Tensor:
    """What `Drifting` adds, `[rows, vocab]`, after all that it has seen of each row."""
    return 1.5 * torch.sin(seen[:, None] * (1.0 + torch.arange(vocabulary)))


class Undone(Drifting):
    """The same, and it can go back."""

    def __init__(self, log: list[Call] | None = None) -> None:
        super().__init__(log)
        self.undone = 0
        self._before: list[tuple[Tensor | None, Tensor | None]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._before.append((self._order.last, self._seen))
        return super().__call__(input_ids, scores)

    def rollback(self, calls: int) -> None:
        assert type(calls) is int
        assert 0 <= calls <= len(self._before)
        for _ in range(calls):
            self._order.last, self._seen = self._before.pop()
            self.log.pop()
        self.calls -= calls
        self.undone += calls


class Tiring(StoppingCriteria):
    """Ends a row once all that it was ever shown of it adds up to something; tolerates no call out of order."""

    def __init__(self, log: list[Call] | None = None, who: str = "criterion", patience: int = 13) -> None:
        self.log: list[Call] = [] if log is None else log
        self.who = who
        self.patience = patience
        self._order = InOrder()
        self._seen: Tensor | None = None
        self._calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self._order.follow(input_ids)
        self.log.append(Call(self.who, input_ids.tolist(), 0, None if scores is None else torch.stack(scores)))
        seen = torch.zeros(len(input_ids), dtype=torch.long) if self._seen is None else self._seen
        self._seen = (17 * seen + input_ids[:, -1]) % 997
        self._calls += 1
        return (self._seen % self.patience == 0) & (self._calls > 2)


class AllDone(Tiring):
    """Remembers which rows have shown any of some tokens, and ends the batch when all have: one verdict, no tensor."""

    def __init__(self, log: list[Call] | None = None) -> None:
        super().__init__(log, "all done")
        self._done: set[int] = set()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        super().__call__(input_ids, scores)
        self._done |= {row for row, token in enumerate(input_ids[:, -1].tolist()) if token % 12 == 0}
        return len(self._done) == len(input_ids)


def ragged(rows: int = 4) -> dict[str, Any]:
    """Left-padded prompts and their mask. Some of their tokens come again, for look-ups."""
    ids, mask = tiny.prompt(WIDTH, rows) % 9 + 1, torch.ones(rows, WIDTH, dtype=torch.long)
    for row, padding in enumerate((3, 0, 5, 1)[:rows]):
        ids[row, :padding] = PAD
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def same_calls(found: list[Call], wanted: list[Call], lengths: Sequence[int]) -> bool:
    """Whether calls are the same, scores too, those of rows that had ended apart."""
    assert [(call.who, len(call.ids[0])) for call in found] == [(call.who, len(call.ids[0])) for call in wanted]
    assert found == wanted
    for one, other in zip(found, wanted, strict=True):
        assert (one.scores is None) == (other.scores is None)
        if one.scores is None or other.scores is None:
            continue
        assert one.scores.dtype == other.scores.dtype == torch.float32
        for token, (mine, theirs) in enumerate(zip(one.scores, other.scores, strict=True), one.first):
            rows = [row for row, length in enumerate(lengths) if token < length]
            torch.testing.assert_close(mine[rows], theirs[rows], atol=1e-5, rtol=1e-5)
    return True


Remembering = Callable[[list[Call]], dict[str, Any]]
"""Makes fresh processors and criteria that note their calls in a list, as options of `generate`."""

OPTIONS: dict[str, Remembering] = {
    "processor": lambda log: {"logits_processor": LogitsProcessorList([Drifting(log)])},
    "processor that can go back": lambda log: {"logits_processor": LogitsProcessorList([Undone(log)])},
    "criterion": lambda log: {"stopping_criteria": StoppingCriteriaList([Tiring(log)])},
    "criterion for all": lambda log: {"stopping_criteria": StoppingCriteriaList([AllDone(log)])},
    "both": lambda log: {
        "logits_processor": LogitsProcessorList([Drifting(log)]),
        "stopping_criteria": StoppingCriteriaList([Tiring(log)]),
    },
    "two of each": lambda log: {
        "logits_processor": LogitsProcessorList([Drifting(log, "first"), Drifting(log, "second")]),
        "stopping_criteria": StoppingCriteriaList([Tiring(log, "third", 17), Tiring(log, "fourth", 23)]),
    },
    "among those of transformers": lambda log: {
        "logits_processor": LogitsProcessorList([Drifting(log)]),
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 3,
    },
    "processors that are functions": lambda log: {
        "logits_processor": LogitsProcessorList([as_function(Drifting(log))]),
        "stopping_criteria": StoppingCriteriaList([as_function(Tiring(log))]),
    },
}


def as_function(remembering: Any) -> Callable[..., Tensor]:
    """A processor or a criterion as a plain function."""
    return lambda ids, scores, **kwargs: remembering(ids, scores)


GREEDY: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "pad_token_id": PAD,
    "suppress_tokens": [PAD],
    "eos_token_id": ENDS,
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama()


def stock(model: PreTrainedModel, name: str, **options: Any) -> tuple[Any, list[Call]]:
    """What plain `model.generate` gives, and the calls that it makes."""
    log: list[Call] = []
    return model.generate(**options, **OPTIONS[name](log)), log


def wrapped(model: PreTrainedModel, draft: str, length: int, rule: str | None = None) -> selfspec.SelfSpeculative:
    """Without recorded passes, which take longer to record than these texts to write."""
    return selfspec.wrap(model, DRAFTS[draft], draft_length=length, accept=rule, runtime=selfspec.runtime.Eager())


@pytest.mark.parametrize(("name", "draft"), in_turns(tuple(OPTIONS), tuple(DRAFTS)))
def test_calls_and_text_are_those_of_transformers(model: PreTrainedModel, name: str, draft: str) -> None:
    # Each rule, and drafts of 2 to 5 tokens, somewhere.
    number = list(OPTIONS).index(name) + list(DRAFTS).index(draft)
    spec = wrapped(model, draft, 2 + number % 4, ("token", "block", "coupled")[number % 3])
    wanted, calls = stock(model, name, **ragged(), **GREEDY)
    log: list[Call] = []
    out = spec.generate(**ragged(), **GREEDY, **OPTIONS[name](log))
    assert torch.equal(out.sequences, wanted)
    assert same_calls(log, calls, out.lengths)
    assert (out.stats.drafted > 0) == (draft != "plain")


@pytest.mark.parametrize("name", OPTIONS)
def test_scores_asked_for_are_given_to_criteria_and_returned(model: PreTrainedModel, name: str) -> None:
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    wanted, calls = stock(model, name, **ragged(), **options)
    log: list[Call] = []
    out: Any = wrapped(model, "skip", 3).generate(**ragged(), **options, **OPTIONS[name](log))
    assert torch.equal(out.sequences, wanted.sequences)
    assert same_calls(log, calls, out.lengths)
    plain = model.generate(**ragged(), **{**options, "max_new_tokens": 1})
    assert len(out.scores) == len(out.logits) == len(wanted.scores)
    for row, length in enumerate(out.lengths):
        for found, scores in zip(out.scores[:length], wanted.scores[:length], strict=True):
            torch.testing.assert_close(found[row], scores[row], atol=1e-5, rtol=1e-5)
    # A processor that writes into what it is given does not change the model's own logits.
    torch.testing.assert_close(out.logits[0], plain.logits[0], atol=1e-5, rtol=1e-5)


# Sampled.


@pytest.mark.parametrize("name", OPTIONS)
def test_coupled_samples_and_their_calls_are_those_of_plain_decoding(model: PreTrainedModel, name: str) -> None:
    options = {**GREEDY, "do_sample": True, "temperature": 0.9, "top_k": 20, "num_return_sequences": 2, "seed": 4}
    calls: list[Call] = []
    plain = wrapped(model, "plain", 1, "coupled").generate(**ragged(2), **options, **OPTIONS[name](calls))
    assert len(plain.sequences) == 4
    assert len({tuple(row) for row in plain.sequences.tolist()}) > 2
    for draft in ("skip", "cascade"):
        log: list[Call] = []
        out = wrapped(model, draft, 3, "coupled").generate(**ragged(2), **options, **OPTIONS[name](log))
        assert torch.equal(out.sequences, plain.sequences)
        assert same_calls(log, calls, out.lengths)


LAST = 4
PROMPTS = ((1, 2, 3, 1), (2, 1, 3, 2), (3, 3, 1, 2))


def joint(model: PreTrainedModel, prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Probability of every output under `Drifting`, padded after `LAST`."""

    def chances(prefix: tuple[int, ...], logits: Tensor) -> list[float]:
        seen = prompt[-1] % 997
        for step, token in enumerate(prefix):
            seen = (31 * seen + token + step + 1) % 997
        scores = logits.float() + bias(torch.tensor([seen]), 5)[0]
        scores[PAD] = -torch.inf
        found: list[float] = scores.softmax(-1).tolist()
        return found

    return enumerated(model, prompt, chances, LAST)


def p_of_samples(spec: selfspec.SelfSpeculative, processor: type[Drifting], rows: int, calls: int) -> float:
    """Fit of the outputs of many calls, each with a processor of its own, to the exact joint of all prompts."""
    prompts = PROMPTS[:rows]
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "eos_token_id": LAST}
    seen = drawn(spec, prompts, rows=rows, batches=calls, fresh=lambda: {"logits_processor": [processor()]}, **options)
    # Nothing would be shown if all were accepted, or next to nothing.
    assert 0.05 * seen.judged < seen.accepted < seen.judged
    together = {
        prompt + output: chance / rows for prompt in prompts for output, chance in joint(spec.model, prompt).items()
    }
    return p_value([prompt + text for prompt, texts in seen.texts.items() for text in texts], together)


CASES: list[tuple[Drafter, str, int]] = [
    (selfspec.drafts.LayerSkip(attention=[1]), "token", 1),
    (selfspec.drafts.EarlyExit(2), "block", 2),
    (selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(shortest=1), selfspec.drafts.EarlyExit(2)), "token", 3),
    (selfspec.drafts.EarlyExit(1), "coupled", 3),
]


@pytest.mark.statistical
@pytest.mark.parametrize("processor", [Drifting, Undone])
def test_samples_follow_the_exact_joint(processor: type[Drifting]) -> None:
    found = {}
    for number, (draft, rule, rows) in enumerate(CASES):
        spec = selfspec.wrap(
            small(seed=number), draft, draft_length=1 + number, accept=rule, runtime=selfspec.runtime.Eager()
        )
        found[f"{draft} {rule} rows {rows}"] = p_of_samples(spec, processor, rows, calls=250)
    assert holm_rejects(found, 0.01) == []


# Streams.


@pytest.mark.parametrize("draft", ["exit", "skip", "look-up", "cascade"])
def test_a_stream_calls_for_what_it_has_committed_and_no_more(model: PreTrainedModel, draft: str) -> None:
    wanted, calls = stock(model, "both", **ragged(), **GREEDY)
    # No new token is `PAD`, which is suppressed.
    lengths = (wanted[:, WIDTH:] != PAD).sum(1).tolist()
    log: list[Call] = []
    stream = wrapped(model, draft, 4).stream(**ragged(), **GREEDY, **OPTIONS["both"](log))
    texts: list[list[int]] = [[] for _ in range(4)]
    for chunk in stream:
        goes_on = [row for row in range(4) if len(texts[row]) == max(map(len, texts))]
        for row, part in enumerate(chunk.rows):
            texts[row] += part.tokens
        # Rows that go on are at one place, and those called have seen just that much.
        longest = max(map(len, texts))
        assert all(len(texts[row]) == longest for row in goes_on if len(texts[row]) < lengths[row])
        assert len(log) == 2 * longest
        assert same_calls(log, calls[: len(log)], [len(text) for text in texts])
    assert torch.equal(stream.output().sequences, wanted)
    assert len(log) == len(calls)


# Others that may remember.


def remembering_prefixes() -> Callable[[int, Tensor], list[int]]:
    """Allows a row tokens by all that it was shown of it."""
    seen = [0] * 4

    def allowed(row: int, ids: Tensor) -> list[int]:
        seen[row] = (31 * seen[row] + int(ids[-1])) % 997
        return [1 + (seen[row] + 7 * index) % 49 for index in range(12)]

    return allowed


class Growing(RepetitionPenaltyLogitsProcessor):
    """Derives from one that is known to have no memory."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.penalty += 0.1
        penalised: Tensor = super().__call__(input_ids, scores)
        return penalised


def synth_id() -> SynthIDTextWatermarkingConfig:
    return SynthIDTextWatermarkingConfig(
        ngram_len=3, keys=[654, 400, 836, 123, 340, 443, 597, 160, 57], sampling_table_size=2**10
    )


STOCK_OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "synthid": lambda: {"watermarking_config": synth_id()},
    "guidance": lambda: {"guidance_scale": 1.6},
    "guidance by a prompt": lambda: {"guidance_scale": 2.0, "negative_prompt_ids": tiny.prompt(3, 4, seed=9)},
    "both": lambda: {"watermarking_config": synth_id(), "guidance_scale": 1.6},
    "prefix function": lambda: {"prefix_allowed_tokens_fn": remembering_prefixes()},
    "derived from a known one": lambda: {"logits_processor": LogitsProcessorList([Growing(1.0)])},
}


@pytest.mark.parametrize(("name", "draft"), in_turns(tuple(STOCK_OPTIONS), ("plain", "exit", "cascade")))
@pytest.mark.filterwarnings("ignore:.*generation flags are not valid.*")
def test_the_remembering_processors_of_transformers(model: PreTrainedModel, name: str, draft: str) -> None:
    wanted = model.generate(**ragged(), **GREEDY, **STOCK_OPTIONS[name]())
    assert not torch.equal(wanted, model.generate(**ragged(), **GREEDY))
    spec = wrapped(model, draft, 4)
    assert torch.equal(spec.generate(**ragged(), **GREEDY, **STOCK_OPTIONS[name]()).sequences, wanted)
    if draft == "exit":
        assert torch.equal(model.generate(**ragged(), **GREEDY, **STOCK_OPTIONS[name](), custom_generate=spec), wanted)


# Which say what they are.


class ByLastToken(LogitsProcessor):
    """A function of the ids and scores of a call."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + bias(input_ids[:, -1], scores.shape[1])


class Stateless(ByLastToken):
    """The same, and it says so."""

    stateless = True


class Says(Stateless):
    """The same, and it says otherwise."""

    stateless = False


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize(("able", "unable"), [(Stateless, ByLastToken), (Stateless, Says), (Undone, Drifting)])
def test_one_that_is_stateless_or_can_go_back_filters_drafts_too(
    able: type[LogitsProcessor], unable: type[LogitsProcessor], rule: str, sampled: bool
) -> None:
    spec = selfspec.wrap(tiny.as_good_as_the_target(), EXIT, draft_length=4, accept=rule)
    options = {**GREEDY, "eos_token_id": None, "do_sample": sampled, "seed": 1}
    filters = able()
    found = spec.generate(tiny.prompt(5), **options, logits_processor=[filters])
    without = spec.generate(tiny.prompt(5), **options, logits_processor=[unable()])
    assert found.stats.acceptance_rate == 1
    assert without.stats.acceptance_rate < 1
    assert not isinstance(filters, Undone) or filters.undone > 0
    if not sampled or rule == "coupled":
        assert torch.equal(found.sequences, without.sequences)


@pytest.mark.parametrize("able", [Stateless, Undone])
def test_one_that_filters_drafts_beside_one_that_cannot(model: PreTrainedModel, able: type[LogitsProcessor]) -> None:
    pairs = [(able(), Drifting(who="other")) for _ in range(2)]
    wanted = model.generate(**ragged(), **GREEDY, logits_processor=LogitsProcessorList(pairs[0]))
    out = wrapped(model, "skip", 4).generate(**ragged(), **GREEDY, logits_processor=[*pairs[1]])
    assert torch.equal(out.sequences, wanted)
    for theirs, ours in zip(*pairs, strict=True):
        assert same_calls(getattr(ours, "log", []), getattr(theirs, "log", []), out.lengths)


def test_an_abandoned_stream_leaves_one_that_can_go_back_at_what_was_committed(model: PreTrainedModel) -> None:
    processor = Undone()
    options = {**GREEDY, "eos_token_id": None}
    stream = wrapped(model, "exit", 4).stream(**ragged(), **options, logits_processor=[processor])
    for _ in range(3):
        next(stream)
        assert processor.calls == stream.output().lengths[0]
    stream.close()
    assert processor.calls == stream.output().lengths[0]
    assert processor.undone > 0

"""Raw times, counts and texts of an arm in a cell, from which every figure follows; and the likelihood of its texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from selfspec.decode.output import Stats
from selfspec.measure.estimate import Estimate, holm_rejects
from selfspec.measure.own_text import cycle_share
from selfspec.measure.stock import bare
from selfspec.measure.timing import Call, DraftShape
from selfspec.tools.lab.arms import ArmSpec, Prompts
from selfspec.tools.lab.pass_costs import PassCosts, PeakMemory
from selfspec.tools.lab.turns import ArmRun, TextAgreement

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Setup:
    """Conditions that two measurements of a cell share if they are of one thing.

    They are the model, its `Origin`, what it computes in and where; CPU threads of torch; how often each arm was timed
    (0: texts were decoded once and not timed), on how many prompts, a digest of their tokens, and the parts measured.
    """

    model: str
    base: str
    setting: str
    parameters: int
    dtype: str
    device: str
    threads: int
    repeats: int
    prompts: int
    prompts_digest: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, order=True)
class ShapeCount(DraftShape):
    """Number of rounds of a shape."""

    rounds: int


@dataclass(frozen=True)
class Record:
    """An arm in a cell. Lists of lists have one list for each repeat, of one value for each call.

    Attributes:
        absence: why it did not run; None where it did.
        first_seconds: until its first tokens were there, `first_tokens`.
        passes: target passes of each call, prefill not counted.
        cycle_share: share of each call's tokens in passages that repeat themselves.
        judged: draft tokens that were judged in each call, by depth; `accepted` likewise.
        memory: at the peak, in a separate process.
        costs: of the parts of its rounds, timed apart from the run.
        nats: negative log-likelihood of each text under the model at temperature 1, by row; empty where not scored.
        said: the texts, written down; empty where there was no tokenizer.
    """

    arm: ArmSpec
    absence: str | None = None
    agreement: TextAgreement | None = None
    seconds: list[list[float]] = field(default_factory=list)
    first_seconds: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    first_tokens: list[list[int]] = field(default_factory=list)
    passes: list[list[int]] = field(default_factory=list)
    cycle_share: list[list[float]] = field(default_factory=list)
    texts: list[list[list[list[int]]]] = field(default_factory=list)
    judged: list[list[list[int]]] = field(default_factory=list)
    accepted: list[list[list[int]]] = field(default_factory=list)
    counts: Stats | None = None
    rounds: list[ShapeCount] = field(default_factory=list)
    memory: PeakMemory | None = None
    costs: PassCosts | None = None
    nats: list[list[list[float]]] = field(default_factory=list)
    said: list[list[list[str]]] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """True if the arm may not be scored, because its greedy texts differ though its rule is lossless."""
        return self.agreement is not None and self.agreement.refused and self.arm.lossless

    @property
    def scored(self) -> bool:
        """True if there are figures to show."""
        return self.absence is None and not self.refused

    @classmethod
    def of(
        cls,
        measured: ArmRun,
        memory: PeakMemory | None = None,
        costs: PassCosts | None = None,
        nats: Sequence[list[list[float]]] = (),
        said: Sequence[list[list[str]]] = (),
    ) -> Record:
        """Make the record of an arm's calls."""

        def each(value: Callable[[Call], _Value]) -> list[list[_Value]]:
            return [[value(call) for call in repeat] for repeat in measured.calls]

        rounds = sum((call.rounds for repeat in measured.calls for call in repeat), Counter[DraftShape]())
        return cls(
            measured.arm.spec,
            measured.absence,
            measured.agreement,
            seconds=each(lambda call: call.seconds),
            first_seconds=each(lambda call: call.first_seconds),
            tokens=each(lambda call: call.tokens),
            first_tokens=each(lambda call: call.first_tokens),
            passes=each(lambda call: call.passes),
            cycle_share=each(lambda call: sum(cycle_share(row) * len(row) for row in call.rows) / call.tokens),
            texts=each(lambda call: call.rows),
            judged=each(lambda call: call.stats.judged_per_depth if call.stats else []),
            accepted=each(lambda call: call.stats.accepted_per_depth if call.stats else []),
            counts=measured.counts,
            rounds=[ShapeCount(shape.drafted, shape.steps, number) for shape, number in sorted(rounds.items())],
            memory=memory,
            costs=costs,
            nats=list(nats),
            said=list(said),
        )


_LEVEL = 0.05


@dataclass(frozen=True)
class TextQuality:
    """The texts of an arm beside those of plain decoding on the same prompts.

    `perplexity` has an interval by a bootstrap over prompts; `against_plain` is its ratio to plain decoding's, prompt
    by prompt; `p_value` is that of a permutation test of signs.
    """

    perplexity: Estimate
    against_plain: Estimate | None = None
    p_value: float | None = None


@torch.no_grad()
def nats_of(
    model: PreTrainedModel, prompts: Sequence[Prompts], texts: Sequence[Sequence[Sequence[int]]]
) -> list[list[float]]:
    """Return the negative log-likelihood of each text under the stock model at temperature 1, by call and row."""
    stock = bare(model)
    found: list[list[float]] = []
    for asked, rows in zip(prompts, texts, strict=True):
        found.append([])
        for prompt, row in zip(asked.rows, rows, strict=True):
            ids = torch.tensor([[*prompt, *row]], device=model.device)
            logits = stock(ids).logits[0, len(prompt) - 1 : -1]
            likelihoods = logits.float().log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
            found[-1].append(-float(likelihoods.sum()))
    return found


def qualities(arms: Sequence[Record]) -> dict[ArmSpec, TextQuality]:
    """Return the quality of the arms of a cell whose texts were scored."""
    scored = {record.arm: record for record in arms if record.nats}
    plain = next((record for record in scored.values() if record.arm.kind == "plain"), None)
    return {arm: _quality(record, plain) for arm, record in scored.items()}


def differing(found: Mapping[ArmSpec, TextQuality]) -> list[ArmSpec]:
    """Return the arms that differ from plain decoding by more than chance, at 5 % for all of them together (Holm)."""
    compared = {arm: each.p_value for arm, each in found.items() if each.p_value is not None}
    rejected = holm_rejects(list(compared.values()), _LEVEL)
    return [arm for arm, rejects in zip(compared, rejected, strict=True) if rejects]


def _quality(record: Record, plain: Record | None) -> TextQuality:
    nats, tokens = _by_prompt(record)
    perplexity = _exp(Estimate.of_ratio(nats, tokens))
    if plain is None or record is plain:
        return TextQuality(perplexity)
    # Of each prompt a mean over tokens, since texts of two arms end at different places.
    own, other = ([n / t for n, t in zip(*_by_prompt(each), strict=True)] for each in (record, plain))
    pairs = [one - two for one, two in zip(own, other, strict=True)]
    return TextQuality(perplexity, _exp(Estimate.of_ratio(pairs, [1.0] * len(pairs))), p_value(pairs))


def _by_prompt(record: Record) -> tuple[list[float], list[float]]:
    """Return the nats and tokens of each prompt, all repeats together."""
    nats = [[each for call in repeat for each in call] for repeat in record.nats]
    tokens = [[float(len(row)) for call in repeat for row in call] for repeat in record.texts]
    return np.sum(nats, 0).tolist(), np.sum(tokens[: len(nats)], 0).tolist()


def p_value(pairs: Sequence[float], draws: int = 9_999) -> float:
    """Return the chance of a mean as far from 0 if either sign of each difference were as likely (Fisher, 1935)."""
    from scipy.stats import permutation_test

    if len(pairs) < 2:
        return 1.0
    how = {"permutation_type": "samples", "n_resamples": draws, "rng": np.random.default_rng(0)}
    return float(permutation_test((np.array(pairs),), np.mean, **how).pvalue)


def _exp(estimate: Estimate) -> Estimate:
    ends = math.exp
    return replace(estimate, value=ends(estimate.value), low=ends(estimate.low), high=ends(estimate.high))

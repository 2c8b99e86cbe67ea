"""What texts are worth: likelihoods of the stock model, pairs of prompts, and many comparisons at once."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.stories import checkpoint_folder
from helpers.studies import cell_of, record
from selfspec.accept import TopKTolerance
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, make_arm
from selfspec.tools.lab.bench_report import quality_sentence
from selfspec.tools.lab.record import Record, differing, nats_of, p_value, qualities
from selfspec.tools.lab.turns import TextAgreement

PLAIN, EXIT = ArmSpec("plain"), ArmSpec("draft", "exit:2", accept="block")


@dataclass(frozen=True)
class Loose(TopKTolerance):
    """Accepts nearly anything."""

    top_k: int = 50
    tolerance: float = 20.0


RELAXED = ArmSpec("draft", "exit:2", length=3, accept=f"{__name__}:Loose", lossless=False)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float32)
    return found


def made(arm: ArmSpec, nats: Sequence[float]) -> Record:
    """Texts of 16 tokens with so many nats a token, one for each call."""
    base = record("plain", [[1.0] * len(nats)])
    return replace(base, arm=arm, nats=[[[16 * each] for each in nats]])


def test_nats_are_those_of_the_text_after_its_prompt(model: PreTrainedModel) -> None:
    prompt, row = [5, 6, 7], [8, 9]
    ids = torch.tensor([[*prompt, *row]])
    ((found,),) = nats_of(model, [Prompts.of_one_length(torch.tensor([prompt]))], [[row]])
    with torch.no_grad():
        logs = model(ids).logits[0].log_softmax(-1)
    assert found == pytest.approx(-float(logs[2, 8] + logs[3, 9]), rel=1e-5)


def test_perplexities_have_intervals_and_pairs_have_ratios() -> None:
    worse = made(EXIT, [0.2, 0.5, 0.2, 0.3, 0.1, 0.2])
    plain = made(PLAIN, [each - 0.1 for each in [0.2, 0.5, 0.2, 0.3, 0.1, 0.2]])
    found = qualities([plain, worse])
    assert found[EXIT].perplexity.value == pytest.approx(math.exp(0.25))
    assert found[EXIT].perplexity.low < math.exp(0.25) < found[EXIT].perplexity.high
    ratio = found[EXIT].against_plain
    assert ratio is not None
    # In pairs there is no spread, however far apart prompts are.
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(0.1), math.exp(0.1)))
    assert found[EXIT].p_value == pytest.approx(2 / 2**6)
    assert found[PLAIN].p_value is None


def test_signs_are_tested_and_not_only_their_spread() -> None:
    assert p_value([1.0, -1.0, 2.0, -2.0]) == 1.0
    assert p_value([1.0] * 20) < 0.001
    generator = random.Random(0)
    chance = [p_value([generator.gauss(0, 1) for _ in range(8)]) for _ in range(200)]
    assert sum(each <= 0.05 for each in chance) <= 20


def test_many_comparisons_do_not_make_a_difference() -> None:
    """Each of twenty arms is off by chance, some alone beyond 5 %; together none is."""
    generator = random.Random(11)
    base = [0.5] * 12
    arms = [replace(EXIT, length=number) for number in range(1, 21)]
    records = [made(arm, [each + generator.gauss(0, 0.1) for each in base]) for arm in arms]
    found = qualities([made(PLAIN, base), *records])
    assert any(each.p_value is not None and each.p_value < 0.05 for each in found.values())
    assert differing(found) == []
    assert "No arm's texts" in quality_sentence(cell_of(made(PLAIN, base), *records))
    off = made(RELAXED, [1.5] * 12)
    assert RELAXED.name in quality_sentence(cell_of(made(PLAIN, base), off))


def test_a_rule_that_is_not_lossless_is_not_refused_for_its_texts() -> None:
    differs = TextAgreement(4, 1)
    lossless = replace(record("draft", [[1.0]], "exit:2"), agreement=differs)
    assert lossless.refused
    relaxed = replace(lossless, arm=RELAXED)
    assert relaxed.scored
    assert not relaxed.refused


@pytest.mark.statistical
def test_sampled_lossless_texts_differ_by_chance_alone(model: PreTrainedModel) -> None:
    prompts = [Prompts.of_one_length(torch.randint(3, 400, (1, 8))) for _ in range(80)]
    records = []
    for spec in (PLAIN, EXIT, RELAXED):
        arm = make_arm(spec, model)
        texts = [arm.decode(each, Cell("w", 0.8, 1, 8, 16), n).rows for n, each in enumerate(prompts)]
        base = replace(record("plain", [[1.0] * 80]), arm=spec, texts=[texts])
        records.append(replace(base, nats=[nats_of(model, prompts, texts)]))
    found = qualities(records)
    lossless, relaxed = found[EXIT].p_value, found[RELAXED].p_value
    assert lossless is not None
    assert relaxed is not None
    assert lossless > 0.01
    assert relaxed < 0.01


def test_without_plain_decoding_nothing_is_said_to_be_like_it() -> None:
    said = quality_sentence(cell_of(made(EXIT, [0.5, 0.2]), made(RELAXED, [0.1, 0.2])))
    assert said == "There are no texts by plain decoding to compare these with."

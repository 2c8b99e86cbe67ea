"""A draft confirmed by real generation: acceptance, speed beside plain decoding in turns, memory, exactness."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch

from selfspec.api import wrap
from selfspec.decode.output import GenerateOutput
from selfspec.decode.stats import Stats
from selfspec.measure.estimate import Estimate
from selfspec.measure.peak_memory import peak_memory
from selfspec.measure.stock import bare
from selfspec.measure.teacher_forced.figures import WrittenTexts
from selfspec.runtime import Eager
from selfspec.tools.studies.drafts import NamedDraft, draft_of
from selfspec.tools.studies.models import StudiedModel
from selfspec.tools.studies.points import Point

# Texts are sampled from other seeds than those that estimates are made on.
_OTHER_SEEDS = 1_000_003


def measure_point(draft: NamedDraft, texts: Point, draft_length: int, rule: str) -> Point:
    """Return the point of confirming one draft at one draft length."""
    content = {
        "draft": draft.name,
        "draft_content": draft.content,
        "texts": texts.key,
        "draft_length": draft_length,
        "rule": rule,
        "runtime": "eager",
    }
    return Point("measure", content, {**texts.place, "draft": draft.name})


def measure(studied: StudiedModel, texts: WrittenTexts, point: Point) -> dict[str, Any]:
    """Generate from the same prompts, plainly and with the draft in turns.

    Raises:
        SelfSpecError: the draft does not fit the model.
    """
    drafter, length = draft_of(point.content["draft"]), point.content["draft_length"]
    model = bare(studied.model)
    # Programs take longer to prove themselves than a point takes, and costs are timed without them too.
    eager = Eager()
    spec = wrap(
        model, drafter, draft_length=length, accept=point.content["rule"], adapter=studied.adapter, runtime=eager
    )
    plain = wrap(model, adapter=studied.adapter, runtime=eager)
    prompts = texts.ids[:, : texts.first].split(1)
    options = _options(texts)
    seed = _OTHER_SEEDS * (1 + point.place["seed"])
    plain.generate(prompts[0], seed=seed, **options)
    peak = peak_memory(lambda: spec.generate(prompts[0], seed=seed, **options), studied.model.device)
    pairs = [
        (plain.generate(prompt, seed=seed + number, **options), spec.generate(prompt, seed=seed + number, **options))
        for number, prompt in enumerate(prompts)
    ]
    drafted = [output for _, output in pairs]
    stats = [output.stats for output in drafted]
    together = Stats.together(stats)
    step = sum(map(_seconds, (output.stats for output, _ in pairs))) / sum(output.lengths[0] for output, _ in pairs)
    speed = _seconds(together) / together.new_tokens
    return {
        "judged": together.judged_per_depth,
        "accepted": together.accepted_per_depth,
        "mean_accepted_length": Estimate.of_ratio(
            [each.new_tokens for each in stats], [each.row_rounds for each in stats]
        ).to_dict(),
        "tokens_per_second": 1 / speed,
        "speedup": step / speed,
        "speedup_median": statistics.median(
            _seconds(one.stats) / one.lengths[0] / (_seconds(other.stats) / other.lengths[0]) for one, other in pairs
        ),
        "peak_bytes": peak,
        "cache_bytes": together.cache_bytes,
        "lossless": drafted[0].lossless,
        "exact": _is_exact(texts, drafted),
    }


def _is_exact(texts: WrittenTexts, outputs: list[GenerateOutput]) -> bool | None:
    """Return whether greedy tokens are those of `model.generate`; None where they need not be."""
    if texts.temperature or not outputs[0].lossless:
        return None
    return all(output.sequences[0].tolist() == row for output, row in zip(outputs, texts.ids.tolist(), strict=True))


def _options(texts: WrittenTexts) -> Mapping[str, Any]:
    sampled = {"temperature": texts.temperature, "top_k": 0, "top_p": 1.0} if texts.temperature else {}
    new_tokens = texts.ids.shape[1] - texts.first
    # All of a prompt is text, whatever the padding token.
    mask = torch.ones_like(texts.ids[:1, : texts.first])
    return {
        "attention_mask": mask,
        "do_sample": bool(sampled),
        "max_new_tokens": new_tokens,
        "eos_token_id": None,
        **sampled,
    }


def _seconds(stats: Stats) -> float:
    return sum(seconds for phase, seconds in stats.seconds.items() if phase != "prefill")

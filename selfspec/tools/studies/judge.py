"""Drafts judged on a model's own texts: many at once by teacher forcing, and one by real generation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from selfspec.api import wrap
from selfspec.control import FixedLength
from selfspec.decode.stats import Stats
from selfspec.measure.estimate import Estimate
from selfspec.measure.peak_memory import peak_memory
from selfspec.measure.stock import bare
from selfspec.measure.teacher_forced.figures import (
    DraftPath,
    TeacherForcedFigures,
    WrittenTexts,
    teacher_forced_figures,
)
from selfspec.measure.teacher_forced.rounds import expected_rounds
from selfspec.runtime import Eager
from selfspec.tools.studies.drafts import draft_of
from selfspec.tools.studies.models import StudiedModel
from selfspec.tools.studies.points import Point
from selfspec.tools.studies.study import Study

# Texts are sampled from other seeds than those that estimates are made on.
_OTHER_SEEDS = 1_000_003


def estimate_point(draft: str, digest: str, texts: Point, study: Study) -> Point:
    """Return the point of judging one draft on some texts by teacher forcing."""
    content = {
        "draft": draft,
        "draft_content": digest,
        "texts": texts.key,
        "draft_lengths": list(study.draft_lengths),
        "reach": min(study.reach, max(study.draft_lengths)),
    }
    return Point("estimate", content, {**texts.place, "draft": draft})


def measure_point(estimated: Point, draft_length: int, rule: str, nodes: int | None = None) -> Point:
    """Return the point of confirming an estimated draft at one draft length, in trees of `nodes` tokens or chains."""
    same = {name: estimated.content[name] for name in ("draft", "draft_content", "texts")}
    shape = {"draft_length": draft_length, "nodes": nodes}
    return Point("measure", {**same, **shape, "rule": rule, "runtime": "eager"}, estimated.place)


def estimate(studied: StudiedModel, texts: WrittenTexts, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Estimate what each of some drafts would do on the same texts."""
    drafters = [draft_of(point.content["draft"]) for point in points]
    paths = [DraftPath(drafter.path(studied.depth), drafter.head) for drafter in drafters]
    reach = max(point.content["reach"] for point in points)
    judged = teacher_forced_figures(studied.views, texts, paths, reach)
    return [
        {
            "tokens": figures.agreed[0].numel(),
            "agreement": figures.agreement,
            "alpha": figures.alpha,
            "lengths": {str(length): _replay(figures, length) for length in point.content["draft_lengths"]},
            # Whether each token's draft would have been its target's likeliest, at the first position of a draft.
            "right": ["".join("1" if each else "0" for each in row) for row in figures.agreed[0].tolist()],
        }
        for point, figures in zip(points, judged, strict=True)
    ]


def _replay(figures: TeacherForcedFigures, length: int) -> dict[str, Any]:
    expected = expected_rounds(figures, length)
    tokens = Estimate.of_ratio([float(expected.tokens)] * len(expected.rounds), expected.rounds)
    counts = {"judged": list(expected.judged), "accepted": list(expected.accepted)}
    return {**counts, "mean_accepted_length": tokens.to_dict()}


def measure(studied: StudiedModel, texts: WrittenTexts, point: Point) -> dict[str, Any]:
    """Generate from the same prompts by plain decoding and with the draft, in turns."""
    control = FixedLength(point.content["draft_length"], point.content["nodes"])
    model = bare(studied.model)
    # Programs take longer to prove themselves than a point takes, and costs are timed without them too.
    eager = Eager()
    plain = wrap(model, adapter=studied.adapter, runtime=eager)
    drafter = draft_of(point.content["draft"])
    spec = wrap(
        model, drafter, draft_length=control, accept=point.content["rule"], adapter=studied.adapter, runtime=eager
    )
    prompts = texts.ids[:, : texts.first].split(1)
    sampled = {"temperature": texts.temperature, "top_k": 0, "top_p": 1.0} if texts.temperature else {}
    new_tokens = texts.ids.shape[1] - texts.first
    options: dict[str, Any] = {"do_sample": bool(sampled), "max_new_tokens": new_tokens, "eos_token_id": None}
    options |= sampled
    # All prompts have one length, and all of each is text, whatever the padding token.
    mask = torch.ones_like(prompts[0])
    seed = _OTHER_SEEDS * (1 + point.place["seed"])
    plain.generate(prompts[0], mask, seed=seed, **options)
    peak = peak_memory(lambda: spec.generate(prompts[0], mask, seed=seed, **options), studied.model.device)
    turns = [
        [each.generate(prompt, mask, seed=seed + number, **options) for each in (plain, spec)]
        for number, prompt in enumerate(prompts)
    ]
    drafted = [output for _, output in turns]
    stats = [output.stats for output in drafted]
    together = Stats.together(stats)
    step, speed = _step(Stats.together([output.stats for output, _ in turns])), _step(together)
    tokens = Estimate.of_ratio([each.new_tokens for each in stats], [each.row_rounds for each in stats])
    exact = all(output.sequences[0].tolist() == row for output, row in zip(drafted, texts.ids.tolist(), strict=True))
    lossless = drafted[0].lossless
    return {
        "judged": together.judged_per_depth,
        "accepted": together.accepted_per_depth,
        "mean_accepted_length": tokens.to_dict(),
        "tokens_per_second": 1 / speed,
        "speedup": step / speed,
        "speedup_median": statistics.median(_step(one.stats) / _step(other.stats) for one, other in turns),
        "peak_bytes": peak,
        "cache_bytes": together.cache_bytes,
        "lossless": lossless,
        # Sampled texts, and those of a rule that is not lossless, need not be those of `model.generate`.
        "exact": exact if lossless and not texts.temperature else None,
    }


def _step(stats: Stats) -> float:
    """Seconds a token, prefill aside."""
    return sum(seconds for phase, seconds in stats.seconds.items() if phase != "prefill") / stats.new_tokens

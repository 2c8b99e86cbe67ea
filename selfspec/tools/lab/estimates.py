"""Drafts judged on a model's own texts: many at once by teacher forcing, and one by real generation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from selfspec.measure.estimate import Estimate
from selfspec.measure.own_text import Continuation
from selfspec.measure.teacher_forced.figures import DraftPath, TeacherForcedFigures, teacher_forced_figures
from selfspec.measure.teacher_forced.rounds import expected_rounds
from selfspec.measure.timing import Call
from selfspec.runtime.named import RuntimeName
from selfspec.tools.lab.arms import ArmSpec, make_arm
from selfspec.tools.lab.cell import Cell, Prompts
from selfspec.tools.lab.drafts import draft_of
from selfspec.tools.lab.runs import Asked
from selfspec.tools.lab.studied import StudiedModel
from selfspec.tools.lab.study import Study
from selfspec.tools.lab.turns import measure

_REPEATS, _WARM_UP = 1, 1


def estimate_asked(draft: str, digest: str, texts: Asked, study: Study) -> Asked:
    """Ask for what one draft would do on some texts, by teacher forcing."""
    under = {
        "draft": draft,
        "draft_content": digest,
        "texts": texts.key,
        "draft_lengths": list(study.draft_lengths),
        "reach": min(study.reach, max(study.draft_lengths)),
    }
    return Asked("estimate", under, {**texts.place, "draft": draft})


def confirm_asked(estimated: Asked, draft_length: int) -> Asked:
    """Ask for what an estimated draft does in real generations, at one draft length."""
    same = {name: estimated.under[name] for name in ("draft", "draft_content", "texts")}
    return Asked("confirm", {**same, "draft_length": draft_length, "runtime": "eager"}, estimated.place)


def estimate(
    studied: StudiedModel, texts: Sequence[Continuation], temperature: float, asked: Sequence[Asked]
) -> list[dict[str, Any]]:
    """Estimate what each of some drafts would do on the same texts."""
    drafters = [draft_of(each.under["draft"]) for each in asked]
    paths = [DraftPath(drafter.path(studied.depth), drafter.head) for drafter in drafters]
    reach = max(each.under["reach"] for each in asked)
    judged = teacher_forced_figures(studied.views, texts, paths, reach, temperature)
    return [
        {
            "tokens": [text.agreed.shape[1] for text in figures],
            "agreed": [float(text.agreed[0].sum()) for text in figures],
            "overlap": [float(text.overlap[0].sum()) for text in figures],
            "lengths": {str(length): _replay(figures, length) for length in each.under["draft_lengths"]},
            # Whether each token's draft would have been its target's likeliest, at the first position of a draft.
            "right": ["".join("1" if right else "0" for right in text.agreed[0].tolist()) for text in figures],
        }
        for each, figures in zip(asked, judged, strict=True)
    ]


def _replay(figures: Sequence[TeacherForcedFigures], length: int) -> dict[str, Any]:
    expected = expected_rounds(figures, length)
    tokens = Estimate.of_ratio([float(each) for each in expected.tokens], expected.rounds)
    counts = {"judged": list(expected.judged), "accepted": list(expected.accepted)}
    return {**counts, "mean_accepted_length": tokens.to_dict()}


def confirm(
    studied: StudiedModel, texts: Sequence[Continuation], temperature: float, new_tokens: int, asked: Asked
) -> dict[str, Any]:
    """Generate from the same prompts by plain decoding and with the draft, in turns."""
    cell = Cell(asked.place["workload"], temperature, 1, None, new_tokens)
    # Programs take longer to prove themselves than this takes, and costs are timed without them too. Estimates are of
    # rejection sampling token by token, which greedily all lossless rules are.
    draft = ArmSpec(
        "draft", asked.under["draft"], asked.under["draft_length"], accept="token", runtime=RuntimeName.EAGER
    )
    arms = [make_arm(spec, studied.model) for spec in (ArmSpec("plain", runtime=RuntimeName.EAGER), draft)]
    prompts = [Prompts.of_one_length(text.ids[:, : text.prompt]) for text in texts]
    plain, drafted = measure(studied.model, cell, arms, prompts, _REPEATS, _WARM_UP, lambda: None)
    pairs = [*zip(plain.calls[0], drafted.calls[0], strict=True)]
    stats = [call.stats for _, call in pairs if call.stats is not None]
    together = drafted.counts
    assert together is not None
    steps = [[_step(pair[arm]) for pair in pairs] for arm in range(2)]
    exact = [call.rows[0] == text.ids[0, text.prompt :].tolist() for (_, call), text in zip(pairs, texts, strict=True)]
    return {
        "judged": together.judged_per_depth,
        "accepted": together.accepted_per_depth,
        "judged_by_text": [each.judged for each in stats],
        "accepted_by_text": [each.accepted for each in stats],
        "tokens_by_text": [each.new_tokens for each in stats],
        "rounds_by_text": [each.row_rounds for each in stats],
        "mean_accepted_length": Estimate.of_ratio(
            [each.new_tokens for each in stats], [each.row_rounds for each in stats]
        ).to_dict(),
        "tokens_per_second": together.new_tokens / sum(call.seconds for _, call in pairs),
        "speedup": Estimate.of_ratio(steps[0], steps[1]).to_dict(),
        "speedup_median": statistics.median(plain_ / own for plain_, own in zip(*steps, strict=True)),
        "cache_bytes": together.cache_bytes,
        # Sampled texts need not be those of the stock model.
        "exact": None if temperature else all(exact),
    }


def _step(call: Call) -> float:
    """Seconds a token, prefill aside."""
    assert call.stats is not None
    return sum(seconds for phase, seconds in call.stats.seconds.items() if phase != "prefill") / call.tokens

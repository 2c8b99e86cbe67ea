"""Judge drafts on a model's own texts: many at once by teacher forcing, and any kind by real generation."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from selfspec.decode.output import Stats
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import draft_name
from selfspec.measure.estimate import Estimate
from selfspec.measure.own_text import Continuation
from selfspec.measure.teacher_forced import (
    DraftPath,
    TeacherForcedFigures,
    expected_rounds,
    teacher_forced_figures,
)
from selfspec.measure.timing import Call, DraftShape
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, RuntimeName, make_arm
from selfspec.tools.lab.runs import Asked
from selfspec.tools.lab.study import StudiedModel, Study
from selfspec.tools.lab.turns import measure

_REPEATS, _WARM_UP = 1, 1


def estimate_asked(draft: str, digest: str, texts: Asked, study: Study, by_generation: bool) -> Asked:
    """Ask for what one draft would do on some texts, by teacher forcing, or by generation where that cannot tell."""
    how = {"accept": study.accept} if by_generation else {"reach": min(study.reach, max(study.draft_lengths))}
    under = {
        "draft": draft,
        "draft_content": digest,
        "texts": texts.key,
        "draft_lengths": list(study.draft_lengths),
        "by": "generation" if by_generation else "teacher forcing",
        **how,
    }
    return Asked("estimate", under, {**texts.place, "draft": draft})


def confirm_asked(estimated: Asked, draft_length: int) -> Asked:
    """Ask for what an estimated draft does in real generations, at one draft length."""
    same = {name: estimated.under[name] for name in ("draft", "draft_content", "texts")}
    # Teacher forcing says what rejection sampling token by token accepts, which greedily all lossless rules do.
    rule = estimated.under.get("accept", "token")
    return Asked("confirm", {**same, "accept": rule, "draft_length": draft_length, "runtime": "eager"}, estimated.place)


def estimate(
    studied: StudiedModel, texts: Sequence[Continuation], temperature: float, asked: Sequence[Asked]
) -> list[dict[str, Any]]:
    """Estimate by teacher forcing what drafts of the model's exact layers would do on the same texts."""
    drafters = [studied.given.drafter(each.under["draft"]) for each in asked]
    paths = [DraftPath(each.path(studied.depth), each.head) for each in drafters if isinstance(each, LayerPathDrafter)]
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
    return {
        "judged": list(expected.judged),
        "accepted": list(expected.accepted),
        "tokens_by_text": list(expected.tokens),
        "rounds_by_text": list(expected.rounds),
        "mean_accepted_length": tokens.to_dict(),
    }


def count(
    studied: StudiedModel, texts: Sequence[Continuation], temperature: float, new_tokens: int, asked: Asked
) -> dict[str, Any]:
    """Count the tokens that generations accept from a draft of any kind, at each draft length; nothing is timed."""
    drafter = studied.given.drafter(asked.under["draft"])
    prompts = [Prompts.of_one_length(text.ids[:, : text.prompt]) for text in texts]
    cell, lengths = _cell(asked, temperature, new_tokens), {}
    for length in asked.under["draft_lengths"]:
        arm = make_arm(_spec(asked, length), studied.model, studied.given)
        lengths[str(length)] = _counted([arm.decode(prompt, cell, number) for number, prompt in enumerate(prompts)])
    first = lengths[str(min(asked.under["draft_lengths"]))]
    path = drafter.last
    return {
        # At the first position of a draft, where there was one.
        "tokens": first["first_judged_by_text"],
        "overlap": first["first_accepted_by_text"],
        "lengths": lengths,
        "path": draft_name(path) if isinstance(path, LayerPathDrafter) else None,
        "cost": drafter.cost(studied.model, studied.adapter),
    }


def _counted(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the counts of generations, one for each text."""
    stats = [call.stats for call in calls if call.stats is not None]
    together, shapes = Stats.together(stats), sum((call.rounds for call in calls), Counter[DraftShape]())
    new, rounds = [each.new_tokens for each in stats], [each.row_rounds for each in stats]
    return {
        "judged": together.judged_per_depth,
        "accepted": together.accepted_per_depth,
        "judged_by_text": [each.judged for each in stats],
        "accepted_by_text": [each.accepted for each in stats],
        "first_judged_by_text": [sum(each.judged_per_depth[:1]) for each in stats],
        "first_accepted_by_text": [sum(each.accepted_per_depth[:1]) for each in stats],
        "tokens_by_text": new,
        "rounds_by_text": rounds,
        "mean_accepted_length": Estimate.of_ratio(new, rounds).to_dict(),
        "rounds": [[shape.drafted, shape.steps, number] for shape, number in sorted(shapes.items())],
    }


def _cell(asked: Asked, temperature: float, new_tokens: int) -> Cell:
    return Cell(asked.place["workload"], temperature, 1, None, new_tokens)


def _spec(asked: Asked, length: int) -> ArmSpec:
    # Programs take longer to prove themselves than this takes, and costs are timed without them too.
    return ArmSpec("draft", asked.under["draft"], length, accept=asked.under["accept"], runtime=RuntimeName.EAGER)


def confirm(
    studied: StudiedModel, texts: Sequence[Continuation], temperature: float, new_tokens: int, asked: Asked
) -> dict[str, Any]:
    """Generate from the same prompts by plain decoding and with the draft, in turns."""
    cell = _cell(asked, temperature, new_tokens)
    specs = ArmSpec("plain", runtime=RuntimeName.EAGER), _spec(asked, asked.under["draft_length"])
    arms = [make_arm(spec, studied.model, studied.given) for spec in specs]
    prompts = [Prompts.of_one_length(text.ids[:, : text.prompt]) for text in texts]
    plain, drafted = measure(studied.model, cell, arms, prompts, _REPEATS, _WARM_UP, lambda: None)
    pairs = [*zip(plain.calls[0], drafted.calls[0], strict=True)]
    steps = [[_step(pair[arm]) for pair in pairs] for arm in range(2)]
    exact = [call.rows[0] == text.ids[0, text.prompt :].tolist() for (_, call), text in zip(pairs, texts, strict=True)]
    counts = drafted.counts
    assert counts is not None
    return {
        **_counted(drafted.calls[0]),
        "tokens_per_second": counts.new_tokens / sum(call.seconds for _, call in pairs),
        "speedup": Estimate.of_ratio(steps[0], steps[1]).to_dict(),
        "speedup_median": statistics.median(plain_ / own for plain_, own in zip(*steps, strict=True)),
        "cache_bytes": counts.cache_bytes,
        # Sampled texts need not be those of the stock model.
        "exact": None if temperature else all(exact),
    }


def _step(call: Call) -> float:
    """Return the seconds of a token, prefill aside."""
    assert call.stats is not None
    return sum(seconds for phase, seconds in call.stats.seconds.items() if phase != "prefill") / call.tokens

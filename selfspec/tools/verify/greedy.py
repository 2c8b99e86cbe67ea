"""Greedy decoding: selfspec's tokens against `model.generate`'s, free-running and teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.measure.progress import Watch
from selfspec.measure.rounding import Bound, RoundingMeter, largest_difference, tie_gap, widths_of
from selfspec.measure.stock import Reference, read_reference
from selfspec.model.adapter import Adapter
from selfspec.tools.verify.divergence import Agreement, Check, Divergence, compare
from selfspec.tools.verify.forced import forced_logits
from selfspec.tools.verify.settings import Settings
from selfspec.tools.verify.subject import Subject


@dataclass(frozen=True)
class Forced:
    """A text read through selfspec's own passes.

    Attributes:
        positions: compared.
        divergences: positions whose likeliest token is not the text's.
        off: the largest difference of any logit from the stock model's one-token passes.
    """

    positions: int
    divergences: tuple[Divergence, ...]
    off: float

    def to_dict(self) -> dict[str, Any]:
        """Counts, ready for JSON. Divergences are listed by the report."""
        return {
            "positions": self.positions,
            "equal_positions": self.positions - len(self.divergences),
            "logits_off": self.off,
        }

    @classmethod
    def together(cls, parts: Sequence[Forced]) -> Forced:
        """Several texts as one."""
        return cls(
            positions=sum(part.positions for part in parts),
            divergences=tuple(divergence for part in parts for divergence in part.divergences),
            off=max(part.off for part in parts),
        )


@dataclass(frozen=True)
class Acceptance:
    """What became of the drafts of the free-running texts.

    Attributes:
        judged: draft tokens the target judged.
        accepted: draft tokens committed.
        row_rounds: rounds.
        new_tokens: tokens committed.
    """

    judged: int
    accepted: int
    row_rounds: int
    new_tokens: int

    @property
    def mean_accepted_length(self) -> float:
        """Tokens committed per target pass, bonus token included."""
        return self.new_tokens / self.row_rounds

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON; a rate without any data is None."""
        return {
            "judged": self.judged,
            "accepted": self.accepted,
            "acceptance_rate": self.accepted / self.judged if self.judged else None,
            "mean_accepted_length": self.mean_accepted_length,
        }

    @classmethod
    def together(cls, parts: Sequence[Acceptance]) -> Acceptance:
        """Several texts as one."""
        return cls(
            judged=sum(part.judged for part in parts),
            accepted=sum(part.accepted for part in parts),
            row_rounds=sum(part.row_rounds for part in parts),
            new_tokens=sum(part.new_tokens for part in parts),
        )


@dataclass(frozen=True)
class DraftGreedy:
    """What greedy decoding with one draft gave.

    Attributes:
        free_running: texts against `model.generate`'s, by acceptance rule.
        forced: the texts of `model.generate` read through selfspec's passes.
        acceptance: of the free-running texts.
    """

    free_running: dict[str, Agreement]
    forced: Forced
    acceptance: Acceptance

    @classmethod
    def together(cls, parts: Sequence[DraftGreedy]) -> DraftGreedy:
        """Several texts as one."""
        rules = parts[0].free_running
        return cls(
            free_running={rule: Agreement.together([part.free_running[rule] for part in parts]) for rule in rules},
            forced=Forced.together([part.forced for part in parts]),
            acceptance=Acceptance.together([part.acceptance for part in parts]),
        )


@dataclass(frozen=True)
class Greedy:
    """What greedy decoding gave.

    Attributes:
        bound: what rounding explains.
        texts: reference texts as token ids, prompt included.
        drafts: by draft, plain decoding first.
    """

    bound: Bound
    texts: tuple[tuple[int, ...], ...]
    drafts: dict[str, DraftGreedy]


def steps(prompts: int, subjects: int) -> int:
    """How many steps `check_greedy` announces."""
    return prompts * (1 + subjects)


def check_greedy(
    model: PreTrainedModel,
    adapter: Adapter,
    prompts: Sequence[Tensor],
    subjects: Sequence[Subject],
    settings: Settings,
    watch: Watch,
) -> Greedy:
    """Decode each prompt, `[1, prompt]`, with the stock model and with every subject, and compare.

    Raises:
        NonFiniteLogitsError: logits became NaN or infinite.
    """
    meter = RoundingMeter(widths_of(settings.draft_length))
    parts: dict[str, list[DraftGreedy]] = {subject.name: [] for subject in subjects}
    texts = []
    for number, prompt in enumerate(prompts):
        where = f"prompt {number + 1} of {len(prompts)}"
        watch.step(f"greedy, {where}: the model itself")
        reference = read_reference(model, prompt, settings.max_new_tokens)
        texts.append((*prompt[0].tolist(), *reference.tokens))
        meter.measure(model, reference)
        for subject in subjects:
            watch.step(f"greedy, {where}: {subject.name}")
            parts[subject.name].append(_check(model, adapter, reference, number, subject, settings))
    drafts = {name: DraftGreedy.together(of_draft) for name, of_draft in parts.items()}
    return Greedy(meter.bound(), tuple(texts), drafts)


def _check(
    model: PreTrainedModel, adapter: Adapter, reference: Reference, number: int, subject: Subject, settings: Settings
) -> DraftGreedy:
    prompt, expected = reference.prompt, reference.tokens
    agreements, acceptances = {}, []
    # Without drafts there is nothing that a rule could judge.
    for rule in settings.greedy_rules if subject.drafter else settings.greedy_rules[:1]:
        output = subject.spec.generate(prompt, max_new_tokens=settings.max_new_tokens, do_sample=False, accept=rule)
        found: list[int] = output.sequences[0, prompt.shape[1] :].tolist()

        def gap(index: int, found: list[int] = found) -> float:
            return tie_gap(reference.logits[index], expected[index], found[index])

        agreements[rule] = compare(expected, found, Check.FREE_RUNNING, subject.name, rule, number, gap)
        stats = output.stats
        acceptances.append(Acceptance(stats.judged, stats.accepted, stats.row_rounds, stats.new_tokens))
    forced = _check_forced(model, adapter, reference, number, subject, settings)
    return DraftGreedy(agreements, forced, Acceptance.together(acceptances))


def _check_forced(
    model: PreTrainedModel, adapter: Adapter, reference: Reference, number: int, subject: Subject, settings: Settings
) -> Forced:
    logits = forced_logits(
        model, adapter, subject.drafter, settings.draft_length, reference.prompt, reference.tokens
    ).float()
    divergences = [
        Divergence(
            Check.TEACHER_FORCED,
            subject.name,
            None,
            number,
            position,
            own,
            other,
            tie_gap(reference.logits[position], own, other),
        )
        for position, (own, other) in enumerate(zip(reference.tokens, logits.argmax(-1).tolist(), strict=True))
        if own != other
    ]
    off = largest_difference(logits, reference.logits.float()).max().item()
    return Forced(len(reference.tokens), tuple(divergences), off)

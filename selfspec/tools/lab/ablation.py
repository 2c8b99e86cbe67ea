"""Run a whole study: every draft on every text, what is known left out, and its rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, product
from typing import TYPE_CHECKING

from selfspec.accept import find_rule
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import StudyError
from selfspec.measure.environment import environment
from selfspec.measure.own_text import Continuation
from selfspec.measure.teacher_forced import (
    DraftPath,
    TeacherForcedFigures,
    expected_rounds,
    is_judged_by_teacher_forcing,
    teacher_forced_figures,
)
from selfspec.measure.watch import Watch
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, make_arm, usual_runtime_name
from selfspec.tools.lab.drafts import content, named_drafts
from selfspec.tools.lab.generations import ArmRun, arm_rows, measure, run_of, turns_of
from selfspec.tools.lab.prices import Prices, costs_run, find_costs
from selfspec.tools.lab.runs import Row, Run, Runs
from selfspec.tools.lab.study import StudiedModel, Study, text_run, texts_of, write_texts
from selfspec.tools.lab.table import records, summarise

if TYPE_CHECKING:
    from pandas import DataFrame

# Texts' worth of timing costs; calls for each text that is confirmed: with the draft and without, untimed and timed.
_TIMED, _CONFIRMED = 32, 4
_WHAT = {"costs": "what drafts cost", "text": "the model's own texts"}
# Drafts judged at once: enough to share what they begin with, few enough to lose little by an interruption.
_TOGETHER = 4


@dataclass(frozen=True)
class Finding:
    """A study as declared, and the rows that were found for it."""

    study: Study
    rows: Sequence[Row] = field(repr=False)

    @cached_property
    def table(self) -> DataFrame:
        """A line for each draft, draft length and set of conditions; drafts that were confirmed have another."""
        table = summarise(self.judged)
        return table[table["decoder"] != "plain"].reset_index(drop=True) if "decoder" in table else table

    @property
    def judged(self) -> list[Row]:
        """Rows of drafts, and of plain decoding beside those that were confirmed."""
        return [row for row in self.rows if row["measured"] in ("teacher forcing", "generation")]

    @property
    def failed(self) -> list[Row]:
        """Rows of runs that ended in an error."""
        return [row for row in self.rows if "error" in row]


def work_on(study: Study, load: Callable[[str], StudiedModel], runs: Runs, watch: Watch | None = None) -> Finding:
    """Run a study, one model after the other; the same call continues what was begun in `runs`.

    Raises:
        StudyError: a draft does not fit a model, or two models are the same.
        StorageError: nothing can be written; what was finished is kept.
    """
    names: dict[str, str] = {}
    found: list[Row] = []
    for name in study.models:
        studied = load(name)
        same = names.setdefault(studied.origin["weights"], name)
        if same != name:
            raise StudyError(f"models: {name} and {same} have the same weights; name one of them")
        drafts = named_drafts(study.drafts, studied.model, studied.adapter, study.seed, studied.given)
        found += StudyOfModel(runs, study, studied, drafts, watch or Watch()).rows()
        # One model is in memory at a time.
        del studied
    return Finding(study, found)


@dataclass(frozen=True)
class StudyOfModel:
    """Finds out all that a study asks of some drafts of one model, except what is known.

    Costs come first, while nothing else runs; then texts, estimates, and confirmations of some of the drafts.
    """

    runs: Runs
    study: Study
    studied: StudiedModel
    drafts: Mapping[str, str]
    watch: Watch

    def rows(self) -> list[Row]:
        """Find out what is missing; return everything."""
        study, studied = self.study, self.studied
        costs = costs_run(studied, self.drafts, study.pricing, self.runtime)
        grid = [*product(studied.prompts, study.temperatures)]
        texts = [text_run(studied, workload, temperature, study) for workload, temperature in grid]
        # Drafts that begin alike side by side, since they share that work.
        ordered = sorted(self.drafts, key=lambda draft: (not self.forced(draft), not draft.startswith("skip"), draft))
        judged = {text.key: [self.judging(draft, text) for draft in ordered] for text in texts}
        every = [costs, *texts, *(run for some in judged.values() for run in some)]
        confirming = min(study.confirm, len(self.drafts)) * _CONFIRMED
        self.watch.begin(self.steps(every) + sum(confirming * self.texts_of(text) for text in texts))
        self.find_out([costs], lambda some: [find_costs(studied, self.drafts, each) for each in some])
        for text in texts:
            self.find_out([text], lambda some: [write_texts(studied, one) for one in some])
        for text in texts:
            for part in _together(judged[text.key]):
                self.find_out(part, partial(self.judge, text))
        found = [row for run in every for row in self.priced(self.runs[run], costs)]
        for text in texts:
            own = [row for run in judged[text.key] for row in self.priced(self.runs[run], costs)]
            for arm in self.chosen(text, own):
                found += [row for run in self.confirmed(arm, text) for row in self.priced(self.runs[run], costs)]
        return found

    def find_out(self, some: Sequence[Run], find: Callable[[Sequence[Run]], list[list[Row]]]) -> None:
        """Find out what is not known of some runs, and show that; what is known is no step."""
        missing = [run for run in some if run not in self.runs]
        if missing:
            first = missing[0]
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            self.watch.step(_WHAT.get(first.measured, first.labels.get("arm", "")) + more, self.steps(missing))
            self.runs.find_out(missing, find, environment(self.studied.model.device))

    def steps(self, some: Sequence[Run]) -> int:
        """Count the texts that are written or judged in those of some runs that are not known."""
        counted = 0
        for run in some:
            lengths = len(run.under["draft_lengths"]) if run.measured == "generation" else 1
            if run not in self.runs:
                counted += _TIMED if run.measured == "costs" else lengths * self.texts_of(run)
        return counted

    def texts_of(self, run: Run) -> int:
        """Return the number of texts of a run's workload."""
        return len(self.studied.prompts[run.labels["workload"]])

    @property
    def runtime(self) -> str:
        """How passes are run: as `selfspec bench` and `generate` do."""
        return self.study.runtime or usual_runtime_name(self.studied.model.device)

    def forced(self, draft: str) -> bool:
        """Return whether teacher forcing can judge a draft."""
        return is_judged_by_teacher_forcing(self.studied.given.drafter(draft), self.studied.adapter, self.studied.depth)

    def judging(self, draft: str, text: Run) -> Run:
        """Return the run that judges a draft on some texts, by teacher forcing, or by generation where that cannot."""
        study, longest = self.study, max(self.study.draft_lengths)
        under = {"batch": 1, "context": None, "chat": study.chat, **text.under, "draft": draft, "texts": text.key}
        under |= {"content": self.drafts[draft], "draft_lengths": list(study.draft_lengths)}
        labels = {**text.labels, "arm": draft}
        if self.forced(draft):
            return Run("teacher forcing", {**under, "reach": min(study.reach or longest, longest)}, labels)
        # Each text has a seed of its own.
        del under["seed"]
        rule = content(self.studied.given.rules.get(study.accept) or find_rule(study.accept))
        how = {"accept": study.accept, "rule": rule, "runtime": self.runtime}
        return Run("generation", {**under, **how}, labels)

    def judge(self, text: Run, some: Sequence[Run]) -> list[list[Row]]:
        """Judge drafts on texts that were written."""
        texts = texts_of(self.runs[text], self.studied.model.device)
        if some[0].measured == "generation":
            return [self.count(texts, run) for run in some]
        return estimate(self.studied, texts, text.under["temperature"], some)

    def count(self, texts: Sequence[Continuation], run: Run) -> list[Row]:
        """Count what generations accept from a draft of any kind, at each draft length; nothing is timed."""
        found = []
        for length in run.under["draft_lengths"]:
            spec = ArmSpec("draft", run.under["draft"], length, accept=run.under["accept"], runtime=self.runtime)
            arm, cell = make_arm(spec, self.studied.model, self.studied.given), self.cell(run)
            prompts = [Prompts.of_one_length(text.ids[:, : text.prompt]) for text in texts]
            calls = [arm.decode(prompt, cell, number) for number, prompt in enumerate(prompts)]
            for row in arm_rows(ArmRun(arm, calls=[calls]), prompts, self.studied.tokenizer):
                counted = {name: value for name, value in row.items() if not name.endswith("seconds")}
                found.append({**counted, "draft_length": length, "lossless": self.studied.given.lossless(spec.accept)})
        return found

    def cell(self, run: Run) -> Cell:
        """Return the conditions of generations."""
        under = run.under
        return Cell(run.labels["workload"], under["temperature"], 1, None, under["max_new_tokens"], self.study.chat)

    def confirmed(self, arm: Row, text: Run) -> list[Run]:
        """Generate from the same prompts by plain decoding and with a draft, in turns; return the runs of both."""
        rule, studied = arm.get("accept") or "token", self.studied
        plain = ArmSpec("plain", runtime=self.runtime)
        like = replace(plain, kind="draft", draft=arm["draft"], length=int(arm["draft_length"]), accept=rule)
        specs = plain, replace(like, content=self.drafts[arm["draft"]], lossless=studied.given.lossless(rule))
        prompts = [Prompts.of_one_length(prompt) for prompt in studied.prompts[text.labels["workload"]]]
        cell = self.cell(text)
        of = {name: text.under[name] for name in ("weights", "setting", "dtype")}
        how = {"repeats": 1, "turns": turns_of(specs), "texts": text.key}
        named = [run_of(of, cell, prompts, spec, {"model": studied.name}, **how) for spec in specs]
        runs = [replace(run, labels={**run.labels, "arm": run.under["draft"] or "plain"}) for run in named]

        def generated(some: Sequence[Run]) -> list[list[Row]]:
            texts = texts_of(self.runs[text], studied.model.device)
            arms = [make_arm(spec, studied.model, studied.given) for spec in specs]
            results = measure(studied.model, cell, arms, prompts, 1, 1, lambda _: None)
            # Sampled texts need not be those of the stock model.
            greedy = None if cell.sampled else [[each.ids[0, each.prompt :].tolist()] for each in texts]
            found = [arm_rows(result, prompts, studied.tokenizer, expected=greedy) for result in results]
            return [found[runs.index(run)] for run in some]

        missing = [run for run in runs if run not in self.runs]
        if missing:
            self.watch.step(f"confirming {arm['draft']}", _CONFIRMED * len(prompts))
            self.runs.find_out(missing, generated, environment(studied.model.device))
        return runs

    def chosen(self, text: Run, rows: Sequence[Row]) -> Iterator[Row]:
        """Choose the drafts to confirm: half of them those that promise most, the others at random."""
        table = summarise(rows)
        if not self.study.confirm or "best_length" not in table:
            return
        best = sorted(
            (row for row in records(table) if row["best_length"] and "predicted_speedup" in row),
            key=lambda row: (-row["predicted_speedup"], row["draft"]),
        )
        count = min(self.study.confirm, len(best))
        first, others = best[: (count + 1) // 2], best[(count + 1) // 2 :]
        yield from first
        yield from random.Random(text.key).sample(others, count - len(first))

    def priced(self, rows: Sequence[Row], costs: Run) -> list[Row]:
        """Return rows with the columns of costs, where costs are known and a draft was judged."""
        found = self.runs[costs]
        if "error" in found[0]:
            return list(rows)
        prices = Prices.of(found[0])
        model, adapter, drafter = self.studied.model, self.studied.adapter, self.studied.given.drafter
        return [
            prices.of_draft(drafter(row["draft"]), model, adapter).priced(row)
            if "shapes" in row and row.get("draft")
            else row
            for row in rows
        ]


def estimate(
    studied: StudiedModel, texts: Sequence[Continuation], temperature: float, runs: Sequence[Run]
) -> list[list[Row]]:
    """Estimate by teacher forcing what drafts of the model's exact layers would do on the same texts."""
    drafters = [studied.given.drafter(run.under["draft"]) for run in runs]
    paths = [DraftPath(each.path(studied.depth), each.head) for each in drafters if isinstance(each, LayerPathDrafter)]
    reach = max(run.under["reach"] for run in runs)
    judged = teacher_forced_figures(studied.views, texts, paths, reach, temperature)
    return [
        [
            {"call": number, "draft_length": length, **_replayed(figures, length)}
            for length in run.under["draft_lengths"]
            for number, figures in enumerate(of_draft)
        ]
        for run, of_draft in zip(runs, judged, strict=True)
    ]


def _replayed(figures: TeacherForcedFigures, length: int) -> Row:
    """Return the columns of one text in rounds of up to `length` tokens."""
    expected = expected_rounds(figures, length)
    return {
        "new_tokens": expected.tokens,
        "rounds": expected.rounds,
        "judged": expected.judged,
        "accepted": expected.accepted,
        # Every round drafts as much as it may.
        "shapes": [[length, length, expected.rounds]],
        "first_judged": figures.agreed.shape[1],
        "first_accepted": float(figures.overlap[0].sum()),
        "agreed": float(figures.agreed[0].sum()),
    }


def _together(runs: Sequence[Run]) -> Iterator[Sequence[Run]]:
    """Yield what is judged at once: some drafts by teacher forcing, and each of the others by itself."""
    for measured, group in groupby(runs, lambda run: run.measured):
        some, size = list(group), 1 if measured == "generation" else _TOGETHER
        yield from (some[start : start + size] for start in range(0, len(some), size))

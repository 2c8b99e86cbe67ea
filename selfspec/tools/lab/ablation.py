"""Run a whole study: every draft on every text, what is known left out, and its rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING

from selfspec.accept import find_rule
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import StudyError
from selfspec.measure.environment import environment
from selfspec.measure.stock import Continuation
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
from selfspec.tools.lab.generations import arm_rows, measure, run_of, turns_of, untimed
from selfspec.tools.lab.prices import Prices, costs_run, find_costs
from selfspec.tools.lab.runs import Row, Run, Runs
from selfspec.tools.lab.study import StudiedModel, Study, text_run, texts_of, write_texts
from selfspec.tools.lab.table import records, summarise

if TYPE_CHECKING:
    from pandas import DataFrame

# Texts' worth of timing costs; calls of an arm for each text that is timed, of which the first warms up.
_TIMED, _CALLS = 32, 2
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

    A StudyError: a draft does not fit a model, or two models are the same; a StorageError: nothing can be written, and
    what was finished is kept.
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
        forced = sorted(filter(self.forced, self.drafts), key=lambda draft: (not draft.startswith("skip"), draft))
        others = [draft for draft in self.drafts if draft not in forced]
        counted = [self.spec(draft, length) for draft in others for length in study.draft_lengths]
        judged = {text.key: [self.judging(draft, text) for draft in forced] for text in texts}
        for text in texts:
            judged[text.key] += [run for spec in counted for run in self.generations(text, [spec])]
        every = [costs, *texts, *(run for some in judged.values() for run in some)]
        confirming = 2 * _CALLS * min(study.confirm, len(self.drafts))
        self.watch.begin(self.steps(every) + sum(confirming * self.texts_of(text) for text in texts))
        self.find_out([costs], lambda some: [find_costs(studied, self.drafts, each) for each in some])
        for text in texts:
            self.find_out([text], lambda some: [write_texts(studied, one) for one in some])
        for text in texts:
            for start in range(0, len(forced), _TOGETHER):
                self.find_out(judged[text.key][: len(forced)][start : start + _TOGETHER], partial(self.judge, text))
            for spec in counted:
                self.generate(text, [spec])
        found = [row for run in every for row in self.priced(self.runs[run], costs)]
        for text in texts:
            own = [row for run in judged[text.key] for row in self.priced(self.runs[run], costs)]
            for arm in self.chosen(text, own):
                confirmed = [ArmSpec("plain", runtime=self.runtime), self.spec(arm["draft"], int(arm["draft_length"]))]
                self.generate(text, confirmed, f"confirming {arm['draft']}")
                found += [
                    row for run in self.generations(text, confirmed) for row in self.priced(self.runs[run], costs)
                ]
        return found

    def find_out(self, some: Sequence[Run], find: Callable[[Sequence[Run]], list[list[Row]]], what: str = "") -> None:
        """Find out what is not known of some runs, and show that; what is known is no step."""
        missing = [run for run in some if run not in self.runs]
        if missing:
            first = missing[0]
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            shown = what or _WHAT.get(first.measured, first.labels.get("arm", "")) + more
            self.watch.step(shown, self.steps(missing))
            self.runs.find_out(missing, find, environment(self.studied.model.device))

    def steps(self, some: Sequence[Run]) -> int:
        """Count the texts that are written or judged in those of some runs that are not known."""
        missing = [run for run in some if run not in self.runs]
        return sum(
            _TIMED if run.measured == "costs" else self.texts_of(run) * (_CALLS if "turns" in run.under else 1)
            for run in missing
        )

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
        """Return the run that judges a draft on some texts by teacher forcing."""
        study, longest = self.study, max(self.study.draft_lengths)
        under = {"batch": 1, "context": None, "chat": study.chat, **text.under, "draft": draft, "texts": text.key}
        under |= {"content": self.drafts[draft], "draft_lengths": list(study.draft_lengths)}
        reach = min(study.reach or longest, longest)
        return Run("teacher forcing", {**under, "reach": reach}, {**text.labels, "arm": draft})

    def judge(self, text: Run, some: Sequence[Run]) -> list[list[Row]]:
        """Judge drafts on texts that were written."""
        texts = texts_of(self.runs[text], self.studied.model.device)
        return estimate(self.studied, texts, text.under["temperature"], some)

    def spec(self, draft: str, length: int) -> ArmSpec:
        """Return the arm that generates with a draft."""
        given, rule = self.studied.given, "token" if self.forced(draft) else self.study.accept
        what = content(given.drafter(draft), given.rules.get(rule) or find_rule(rule))
        kept = given.lossless(rule)
        return ArmSpec("draft", draft, length, accept=rule, runtime=self.runtime, lossless=kept, content=what)

    def generations(self, text: Run, specs: Sequence[ArmSpec]) -> list[Run]:
        """Return the runs of arms on the prompts of texts: several are timed in turns, one alone is counted."""
        how: Row = {"repeats": 0, "texts": text.key}
        if len(specs) > 1:
            how |= {"repeats": 1, "turns": turns_of(specs)}
        of, labels = {name: text.under[name] for name in ("weights", "setting", "dtype")}, {"model": self.studied.name}
        runs = [run_of(of, self.cell(text), self.prompts(text), spec, labels, **how) for spec in specs]
        return [replace(run, labels={**run.labels, "arm": run.under["draft"] or "plain"}) for run in runs]

    def generate(self, text: Run, specs: Sequence[ArmSpec], what: str = "") -> None:
        """Generate with some arms from the prompts of texts, unless that is known."""
        studied, cell, prompts, timed = self.studied, self.cell(text), self.prompts(text), len(specs) > 1
        runs = self.generations(text, specs)

        def generated(some: Sequence[Run]) -> list[list[Row]]:
            texts = texts_of(self.runs[text], studied.model.device)
            arms = [make_arm(spec, studied.model, studied.given) for spec in specs]
            results = measure(studied.model, cell, arms, prompts, 1, int(timed), lambda _: None)
            # Sampled texts need not be those of the stock model.
            known = cell.sampled or not timed
            greedy = None if known else [[each.ids[0, each.prompt :].tolist()] for each in texts]
            found = [arm_rows(result, prompts, studied.tokenizer, expected=greedy) for result in results]
            return [found[runs.index(run)] if timed else untimed(found[0]) for run in some]

        self.find_out(runs, generated, what)

    def cell(self, text: Run) -> Cell:
        """Return the conditions of generations."""
        under = text.under
        return Cell(text.labels["workload"], under["temperature"], 1, None, under["max_new_tokens"], self.study.chat)

    def prompts(self, text: Run) -> list[Prompts]:
        """Return the prompts of texts, each a call."""
        return [Prompts.of_one_length(prompt) for prompt in self.studied.prompts[text.labels["workload"]]]

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

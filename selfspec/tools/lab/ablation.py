"""Run a whole study: every draft on every text, what is known left out, and its rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

from torch import Tensor

from selfspec.accept import find_rule
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import StudyError
from selfspec.measure.environment import environment
from selfspec.measure.expected_time import FittedWork, Size, TokenTimes, Work, fit
from selfspec.measure.own_text import Continuation
from selfspec.measure.teacher_forced import (
    DraftPath,
    TeacherForcedFigures,
    expected_rounds,
    teacher_forced_figures,
)
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, RuntimeName, make_arm, usual_runtime_name
from selfspec.tools.lab.drafts import content, is_judged_by_teacher_forcing, named_drafts
from selfspec.tools.lab.generations import arm_rows, run_of, turns_of
from selfspec.tools.lab.prices import Prices, costs_run, find_costs, timed_paths
from selfspec.tools.lab.runs import Row, Run, Runs
from selfspec.tools.lab.study import StudiedModel, Study, text_run, texts_of, write_texts
from selfspec.tools.lab.table import records, summarise
from selfspec.tools.lab.turns import ArmRun, measure

if TYPE_CHECKING:
    from pandas import DataFrame

# Drafts judged at once: enough to share what they begin with, few enough to lose little by an interruption.
_TOGETHER = 4

Progress = Callable[[int, int, float], None]
"""Called with the runs done, the runs in all, and the share of the expected work that is done, of what was missing."""


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


def untold(done: int, known: int, share: float) -> None:
    """Tell nobody how far work has come."""


def work_on(study: Study, load: Callable[[str], StudiedModel], runs: Runs, progress: Progress = untold) -> Finding:
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
        found += find_out(runs, study, studied, drafts, progress)
        # One model is in memory at a time.
        del studied
    return Finding(study, found)


def find_out(
    runs: Runs, study: Study, studied: StudiedModel, drafts: Mapping[str, str], progress: Progress = untold
) -> list[Row]:
    """Find out all that a study asks of some drafts of one model, except what is known; return its rows.

    Costs come first, while nothing else runs; then texts, estimates, and confirmations of some of the drafts.
    """
    return _Studying(runs, study, studied, drafts, progress).rows()


@dataclass(frozen=True)
class _Studying:
    """One model of a study at work."""

    runs: Runs
    study: Study
    studied: StudiedModel
    drafts: Mapping[str, str]
    progress: Progress

    def rows(self) -> list[Row]:
        """Find out what is missing; return everything."""
        study, studied = self.study, self.studied
        costs = costs_run(studied, self.drafts, study.pricing, self.runtime)
        grid = [*product(studied.prompts, study.temperatures)]
        texts = [text_run(studied, workload, temperature, study) for workload, temperature in grid]
        # Drafts that begin alike side by side, since they share that work.
        ordered = sorted(self.drafts, key=lambda draft: (not self.forced(draft), not draft.startswith("skip"), draft))
        judged = {text.key: [self.judging(draft, text) for draft in ordered] for text in texts}
        works = [text_work(study, studied.prompts[workload]) for workload, _ in grid]
        shares = {costs.key: price_work(study, studied).share}
        for text, work in zip(texts, works, strict=True):
            shares[text.key] = work.texts.share
            shares |= {
                run.key: (work.forced if run.measured == "teacher forcing" else work.counted).share
                for run in judged[text.key]
            }
        # What is known takes no time, and is no part of what is left.
        missing = {key: share for key, share in shares.items() if not self.runs.knows(key)}
        confirming = min(study.confirm, len(self.drafts)) * len(texts)
        confirmed_share = works[0].confirmed.share if works else 0.0
        whole = sum(missing.values()) + confirming * confirmed_share
        known, done, worked = len(shares) + confirming, len(shares) - len(missing), 0.0
        self.progress(done, known, 0.0)

        def tell(some: Sequence[Run], share: float = 0.0) -> None:
            nonlocal done, worked
            done += sum(run.key in missing for run in some) if share == 0.0 else len(some)
            worked += sum(missing.get(run.key, 0.0) for run in some) + share
            self.progress(min(done, known), known, min(worked / max(whole, 1e-9), 1.0))

        around = environment(studied.model.device)
        self.runs.find_out([costs], lambda some: [find_costs(studied, self.drafts, each) for each in some], around)
        tell([costs])
        for text in texts:
            self.runs.find_out([text], lambda some: [write_texts(studied, one) for one in some], around)
            tell([text])
        every = [costs, *texts]
        for text in texts:
            for part in _together(judged[text.key]):
                self.runs.find_out(part, lambda some, text=text: self.judge(text, some), around)  # type: ignore[misc]
                tell(part)
            every += judged[text.key]
        found = [row for run in every for row in self.priced(self.runs[run], costs)]
        for text in texts:
            own = [row for run in judged[text.key] for row in self.priced(self.runs[run], costs)]
            for arm in self.chosen(text, own):
                pair = self.confirming(arm, text)
                self.runs.find_out(pair, lambda some, text=text, pair=pair: self.confirm(text, pair), around)  # type: ignore[misc]
                tell([pair[1]], confirmed_share)
                found += [row for run in pair for row in self.priced(self.runs[run], costs)]
        return found

    @property
    def runtime(self) -> RuntimeName:
        """How passes are run: as `selfspec bench` and `generate` do."""
        named = self.study.runtime
        return usual_runtime_name(self.studied.model.device) if named is None else RuntimeName(named)

    def forced(self, draft: str) -> bool:
        """Return whether teacher forcing can judge a draft."""
        return is_judged_by_teacher_forcing(self.studied.given.drafter(draft), self.studied.adapter, self.studied.depth)

    def judging(self, draft: str, text: Run) -> Run:
        """Return the run that judges a draft on some texts, by teacher forcing, or by generation where that cannot."""
        study = self.study
        named = {"draft": draft, "content": self.drafts[draft], "texts": text.key}
        labels = {**text.labels, "arm": draft}
        if self.forced(draft):
            under = {**self._conditions(text), **named, "draft_lengths": list(study.draft_lengths)}
            under["reach"] = _reach(study)
            return Run("teacher forcing", under, labels)
        rule = content(self.studied.given.rules.get(study.accept) or find_rule(study.accept))
        how = {"accept": study.accept, "rule": rule, "runtime": str(self.runtime)}
        under = {**self._conditions(text), **named, **how, "draft_lengths": list(study.draft_lengths)}
        return Run("generation", under, labels)

    def _conditions(self, text: Run) -> Row:
        return {"batch": 1, "context": None, "chat": self.study.chat, **text.under}

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
            prompts = _prompts(texts)
            calls = [arm.decode(prompt, cell, number) for number, prompt in enumerate(prompts)]
            for row in arm_rows(ArmRun(arm, calls=[calls]), prompts, self.studied.tokenizer):
                counted = {name: value for name, value in row.items() if not name.endswith("seconds")}
                found.append({**counted, "draft_length": length, "lossless": self.studied.given.lossless(spec.accept)})
        return found

    def cell(self, run: Run) -> Cell:
        """Return the conditions of generations."""
        under = run.under
        return Cell(run.labels["workload"], under["temperature"], 1, None, under["max_new_tokens"], self.study.chat)

    def confirming(self, arm: Row, text: Run) -> list[Run]:
        """Return the runs of plain decoding and of a draft in turns."""
        rule = arm.get("accept") or "token"
        specs = (
            ArmSpec("plain", runtime=self.runtime),
            ArmSpec("draft", arm["draft"], int(arm["draft_length"]), accept=rule, runtime=self.runtime),
        )
        lossless = self.studied.given.lossless(rule)
        specs = (specs[0], replace(specs[1], content=self.drafts[arm["draft"]], lossless=lossless))
        prompts = [Prompts.of_one_length(prompt) for prompt in self.studied.prompts[text.labels["workload"]]]
        of = {name: text.under[name] for name in ("weights", "setting", "dtype", "seed")}
        how = {"repeats": 1, "turns": turns_of(specs), "texts": text.key}
        labels = {"model": self.studied.name}
        runs = [run_of(of, self.cell(text), prompts, spec, labels, **how) for spec in specs]
        return [replace(run, labels={**run.labels, "arm": run.under["draft"] or "plain"}) for run in runs]

    def confirm(self, text: Run, pair: Sequence[Run]) -> list[list[Row]]:
        """Generate from the same prompts by plain decoding and with the draft, in turns."""
        texts = texts_of(self.runs[text], self.studied.model.device)
        draft = pair[1].under
        specs = (
            ArmSpec("plain", runtime=self.runtime),
            ArmSpec("draft", draft["draft"], draft["draft_length"], accept=draft["accept"], runtime=self.runtime),
        )
        arms = [make_arm(spec, self.studied.model, self.studied.given) for spec in specs]
        prompts = _prompts(texts)
        results = measure(self.studied.model, self.cell(text), arms, prompts, 1, 1, lambda: None)
        # Sampled texts need not be those of the stock model.
        greedy = [[each.ids[0, each.prompt :].tolist()] for each in texts] if not text.under["temperature"] else None
        return [arm_rows(result, prompts, self.studied.tokenizer, expected=greedy) for result in results]

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


def _prompts(texts: Sequence[Continuation]) -> list[Prompts]:
    return [Prompts.of_one_length(text.ids[:, : text.prompt]) for text in texts]


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
    expected = expected_rounds([figures], length)
    return {
        "new_tokens": expected.tokens[0],
        "rounds": expected.rounds[0],
        "judged": list(expected.judged),
        "accepted": list(expected.accepted),
        # Every round drafts as much as it may.
        "shapes": [[length, length, expected.rounds[0]]],
        "first_judged": figures.agreed.shape[1],
        "first_accepted": float(figures.overlap[0].sum()),
        "agreed": float(figures.agreed[0].sum()),
    }


def _together(runs: Sequence[Run]) -> Iterator[Sequence[Run]]:
    """Yield what is judged at once: some drafts by teacher forcing, and each of the others by itself."""
    for measured, group in groupby(runs, lambda run: run.measured):
        some, size = list(group), 1 if measured == "generation" else _TOGETHER
        yield from (some[start : start + size] for start in range(0, len(some), size))


# In plain tokens: a draft step on average; a confirmed token, with the plain one beside it and both warm-ups; timing
# a draft; a counted token.
_OF_A_PATH, _CONFIRMED, _TIMED, _COUNTED = 0.7, 4.0, 260, 0.8


def sizes_of(study: Study) -> dict[str, Size]:
    """Return the sizes that a study may shrink, from what it declares."""
    fewest = {"max_new_tokens": 16, "confirm": 2, "reach": 1}
    usual = {"max_new_tokens": study.max_new_tokens, "confirm": study.confirm, "reach": _reach(study)}
    return {name: Size(usual[name], min(few, usual[name])) for name, few in fewest.items()}


def _reach(study: Study) -> int:
    longest = max(study.draft_lengths)
    return longest if study.reach is None else min(study.reach, longest)


@dataclass(frozen=True)
class TextWork:
    """Work for the texts of a workload at one temperature: writing them, and judging or confirming one draft."""

    texts: Work
    forced: Work
    counted: Work
    confirmed: Work


def text_work(study: Study, prompts: Sequence[Tensor]) -> TextWork:
    """Count the work for some prompts, `[1, tokens]` each."""
    count, read, lengths = len(prompts), sum(prompt.shape[1] for prompt in prompts), len(study.draft_lengths)
    new = study.max_new_tokens * count
    return TextWork(
        # What all drafts are compared with is read once for the texts.
        texts=Work(new, read + 2 * (read + new)),
        forced=Work(read=(read + new) * _reach(study) * _OF_A_PATH),
        counted=Work(new * lengths * _COUNTED, read * lengths),
        confirmed=Work(new * _CONFIRMED, 4 * read),
    )


def price_work(study: Study, studied: StudiedModel) -> Work:
    """Count the work of timing costs."""
    return Work(_TIMED * (1 + len(timed_paths(studied.depth))) if study.pricing == "measured" else 0)


def work(study: Study, studied: StudiedModel, drafts: int, sizes: Mapping[str, int], counted: int = 0) -> Work:
    """Count the tokens of a study of `drafts` of each of its models, `counted` of them judged by generation."""
    resized, total = resize(study, sizes), Work()
    for prompts in studied.prompts.values():
        each = text_work(resized, prompts)
        judged = each.forced.times(drafts - counted) + each.counted.times(counted)
        total += each.texts + judged + each.confirmed.times(min(resized.confirm, drafts))
    return (total.times(len(study.temperatures)) + price_work(study, studied)).times(len(study.models))


def resize(study: Study, sizes: Mapping[str, int]) -> Study:
    """Return the study with other sizes; those that are none of its own are left."""
    own: dict[str, Any] = {name: size for name, size in sizes.items() if hasattr(study, name)}
    return replace(study, **own)


def fit_study(
    study: Study,
    free: Mapping[str, Size],
    drafts: int,
    studied: StudiedModel,
    minutes: float,
    runs: Runs,
    counted: int = 0,
) -> FittedWork:
    """Choose the sizes of a study; where its folder was begun with some, these stay, so that what is known is used.

    `free` are the sizes that may shrink, `evaluations` (drafts) among them; `counted` drafts are judged by generation.
    """
    asked = Run("sizes", {**studied.origin, "minutes": minutes, "names": sorted(free)}, {"model": studied.name})
    begun = runs[asked][0] if asked in runs else {}
    bound = {name: Size(begun[name], begun[name]) if name in begun else size for name, size in free.items()}
    times = TokenTimes.measured(studied.model)
    fitted = fit(
        bound, lambda sizes: work(study, studied, sizes.get("evaluations", drafts), sizes, counted), times, minutes
    )
    if asked not in runs:
        runs.keep(asked.rows([dict(fitted.sizes)], {}))
    shrunk = {name: size for name, size in fitted.sizes.items() if size < free[name].usual}
    return replace(fitted, shrunk=shrunk)

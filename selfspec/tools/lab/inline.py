"""Offer the lab over models in memory: `selfspec.ablate(model, ...)` and `selfspec.bench(model, ...)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.accept import Rule
from selfspec.arguments import check_module, checked_path
from selfspec.draft import Drafter
from selfspec.errors import BenchError, PromptError, StudyError
from selfspec.measure.prompts import check_reads_text, read_given
from selfspec.measure.watch import Watch
from selfspec.model.registry import check_causal, find_adapter
from selfspec.tools.lab.ablation import work_on
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, make_arm, usual_runtime_name
from selfspec.tools.lab.drafts import Given, called
from selfspec.tools.lab.generations import Generations, Part, latest
from selfspec.tools.lab.report import provenances, require_packages, write_report
from selfspec.tools.lab.runs import Row, Runs, model_name
from selfspec.tools.lab.study import Pricing, StudiedModel, Study, listed
from selfspec.tools.lab.table import doubts, summarise

if TYPE_CHECKING:
    from pandas import DataFrame

_Prompts = Tensor | Sequence[str] | Sequence[Tensor]


def ablate(
    model: PreTrainedModel | Mapping[str, PreTrainedModel],
    prompts: _Prompts | Mapping[str, _Prompts],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafts: str | Drafter | Sequence[str | Drafter] = ("exits", "sublayers"),
    draft_lengths: int | Sequence[int] = (1, 2, 3, 4, 6, 8),
    temperatures: float | Sequence[float] = (0.0, 1.0),
    accept: str | Rule = "token",
    max_new_tokens: int = 64,
    reach: int | None = None,
    confirm: int = 6,
    pricing: Pricing = "measured",
    runtime: str | None = None,
    seed: int = 0,
    to: str | Path | None = None,
    watch: Watch | None = None,
) -> DataFrame:
    """Study what drafts of one or several models are worth.

    Args:
        model: the stock causal LM, which is left as it is; or several by name.
        prompts: what it writes on from, whole: texts, or token ids, `[texts, tokens]` or each `[1, tokens]`; or several
            workloads of these by name.
        tokenizer: for prompts that are texts.
        drafts: names, those that stand for many too (see docs/studies.md), or drafters.
        draft_lengths: to choose from.
        temperatures: 0 decodes greedily.
        accept: rule of drafts that are judged by generation.
        max_new_tokens: the most tokens that the model adds to each prompt.
        reach: positions of a draft that teacher forcing tells apart; None: all.
        confirm: drafts of each model, workload and temperature that are confirmed by real generation.
        pricing: costs `measured` here, or by the `weights` that a step reads.
        runtime: how passes are run; None: as `selfspec bench` does.
        seed: of sampled texts.
        to: folder to keep the study in, which the same call continues, with a report; None: it is not kept.
        watch: shows progress.

    Returns:
        A `pandas.DataFrame` with a line for each draft, draft length and set of conditions: see docs/columns.md. Its
        `attrs` have `doubts`, on figures that say less than they seem to, and `provenance`.

    Raises:
        UnsupportedModelError: a model has an encoder.
        StudyError: naming what cannot be.
    """
    require_packages()
    models = _named_models(model)
    for each in models.values():
        check_reads_text(each)
    place = None if to is None else checked_path("to", to, StudyError)
    every = listed(drafts)
    given = Given.of(every, [accept])
    try:
        workloads = {
            name: {each: read_given(own, some, tokenizer) for each, some in _named_workloads(prompts).items()}
            for name, own in models.items()
        }
    except PromptError as error:
        raise StudyError(f"prompts cannot be used: {error}") from error
    declared = {
        "models": list(models),
        "drafts": [called(each) if isinstance(each, Drafter) else each for each in every],
        "workloads": list(_named_workloads(prompts)),
        "texts": max((len(ids) for ids in next(iter(workloads.values())).values()), default=1),
        "draft_lengths": draft_lengths,
        "temperatures": temperatures,
        "accept": called(accept) if isinstance(accept, Rule) else accept,
        "max_new_tokens": max_new_tokens,
        "reach": reach,
        "confirm": confirm,
        "pricing": pricing,
        "runtime": runtime,
        "seed": seed,
    }
    study = Study.of(declared)

    def load(name: str) -> StudiedModel:
        return StudiedModel(name, models[name], find_adapter(models[name]), workloads[name], tokenizer, given)

    finding = work_on(study, load, Runs(place), watch or Watch())
    if place is not None:
        write_report("Study of drafts", finding.judged, asdict(study), place)
    return _told(finding.table, finding.rows)


def bench(
    model: PreTrainedModel | Mapping[str, PreTrainedModel],
    prompts: _Prompts | Mapping[str, _Prompts],
    drafts: str | Drafter | Sequence[str | Drafter],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    accept: Sequence[str | Rule] = (),
    temperatures: Sequence[float] = (0.0, 0.8),
    draft_length: int | None = None,
    nodes: int | None = None,
    max_new_tokens: int = 64,
    timed: bool = True,
    repeats: int = 5,
    warm_up: int = 3,
    to: str | Path | None = None,
    watch: Watch | None = None,
) -> DataFrame:
    """Measure drafts side by side on the same prompts, in turns with `model.generate` and plain decoding.

    Args:
        model: the stock causal LM, which is left as it is; or several by name.
        prompts: what it writes on from, whole: texts, or token ids, `[texts, tokens]` or each `[1, tokens]`; or several
            workloads of these by name.
        drafts: names, or drafters.
        tokenizer: for prompts that are texts, and to write texts down.
        accept: acceptance rules, by name or as rules; none: selfspec's default.
        temperatures: 0 decodes greedily.
        draft_length: tokens drafted each round; None: as each draft decides.
        nodes: the most tokens of a tree; None: drafts are chains.
        max_new_tokens: the most tokens of a text.
        timed: False: each draft decodes each prompt once, and acceptance alone is counted.
        repeats: how often each arm is timed.
        warm_up: how often it decodes all prompts before.
        to: folder for report, pictures, and tables of all texts, which the same call continues; None: nothing is kept.
        watch: shows progress.

    Returns:
        A `pandas.DataFrame` with a line for each arm and set of conditions: see docs/columns.md. Its `attrs` have
        `doubts`, on figures that say less than they seem to, and `provenance`.

    Raises:
        BenchError, PromptError, DraftConfigError, UnsupportedOptionError: naming what cannot be.
    """
    require_packages()
    place = None if to is None else checked_path("to", to, BenchError)
    every = listed(drafts)
    given, runs, rows = Given.of(every, accept), Runs(place), []
    for name, each in _named_models(model).items():
        own = ArmSpec("plain", runtime=usual_runtime_name(each.device))
        specs = [ArmSpec("generate"), own] if timed else []
        for draft in map(called, every):
            for rule in map(called, accept or ("",)):
                kept = given.lossless(rule or None)
                like = replace(own, kind="draft", draft=draft, length=draft_length, nodes=nodes)
                specs.append(replace(like, accept=rule or None, lossless=kept))
        parts: frozenset[Part] = frozenset({"speed", "costs"} if timed else {"acceptance"})
        generations = Generations(
            name=name,
            model=each,
            arms=[make_arm(spec, each, given) for spec in dict.fromkeys(specs)],
            repeats=repeats,
            warm_up=warm_up,
            parts=parts,
            tokenizer=tokenizer,
        )
        cells = {
            Cell(workload, temperature, 1, None, max_new_tokens): [
                *map(Prompts.of_one_length, read_given(each, some, tokenizer))
            ]
            for workload, some in _named_workloads(prompts).items()
            for temperature in temperatures
        }
        rows += generations.measure(cells, runs, watch or Watch())
    if place is not None:
        write_report("Benchmark", latest(runs.measured("generation")), {}, place)
    return _told(summarise(rows), rows)


def _told(table: DataFrame, rows: Sequence[Row]) -> DataFrame:
    table.attrs |= {"doubts": doubts(table), "provenance": provenances(rows)}
    return table


def _named_models(model: PreTrainedModel | Mapping[str, PreTrainedModel]) -> dict[str, PreTrainedModel]:
    """Return models by name: of a single one that of its folder or checkpoint, else that of its class."""
    if not isinstance(model, Mapping):
        check_module(model)
        model = {model_name(model): model}
    for each in model.values():
        check_module(each)
        check_causal(each)
    return dict(model)


def _named_workloads(prompts: _Prompts | Mapping[str, _Prompts]) -> dict[str, _Prompts]:
    return dict(prompts) if isinstance(prompts, Mapping) else {"prompts": prompts}

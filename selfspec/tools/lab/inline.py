"""Offer the lab over a model in memory: `selfspec.ablate(model, ...)` and `selfspec.bench(model, ...)`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.accept import Rule
from selfspec.arguments import check_module, checked_path
from selfspec.draft import Drafter
from selfspec.errors import BenchError, PromptError, StudyError
from selfspec.measure.expected_time import Unwatched, Watch
from selfspec.measure.prompts import read_given
from selfspec.model.registry import check_causal, find_adapter
from selfspec.tools.lab.ablation import work_on
from selfspec.tools.lab.arms import ArmSpec, Cell, Prompts, usual_runtime_name
from selfspec.tools.lab.bench_report import write_report
from selfspec.tools.lab.drafts import Given, called
from selfspec.tools.lab.measured import KIND, MeasuredCell
from selfspec.tools.lab.report import require_packages
from selfspec.tools.lab.runs import Runs
from selfspec.tools.lab.session import Part, Session
from selfspec.tools.lab.study import StudiedModel, Study

_GIVEN = "given"


def ablate(
    model: PreTrainedModel,
    prompts: Tensor | Sequence[str] | Sequence[Tensor],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    to: str | Path | None = None,
    **declared: Any,
) -> Any:
    """Study what drafts of a model are worth.

    Args:
        model: the stock causal LM; it is left as it is.
        prompts: what it writes on from, whole: texts, or token ids, `[texts, tokens]` or each `[1, tokens]`.
        tokenizer: for prompts that are texts.
        to: folder to keep the study in, which the same call continues; None: it is not kept.
        **declared: as in a study file: `drafts`, `draft_lengths`, `temperatures`, `seed`, `max_new_tokens`, `reach`,
            `confirm`, `accept`, `pricing`. Drafts are names or drafters, the rule a name or a rule.

    Returns:
        A `pandas.DataFrame` with one row for each draft, temperature and draft length.

    Raises:
        StudyError: naming what cannot be.
    """
    require_packages()
    check_module(model)
    check_causal(model)
    place = None if to is None else checked_path("to", to, StudyError)
    try:
        ids = read_given(model, prompts, tokenizer)
    except PromptError as error:
        raise StudyError(f"prompts cannot be used: {error}") from error
    own = {"models": _GIVEN, "workloads": _GIVEN, "texts": len(ids)}
    for taken in sorted((own.keys() | {"chat", "prompt_tokens"}) & declared.keys()):
        raise StudyError(f"{taken} follows from the model and its prompts; leave it out")
    drafts, rule = _listed(declared.get("drafts", ())), declared.get("accept", "token")
    given = Given.of(drafts, [rule])
    if drafts:
        declared["drafts"] = [called(each) if isinstance(each, Drafter) else each for each in drafts]
    declared["accept"] = called(rule) if isinstance(rule, Rule) else rule
    study = Study.of({**declared, **own})
    studied = StudiedModel(type(model).__name__, model, find_adapter(model), {_GIVEN: ids}, tokenizer, given)
    import pandas

    return pandas.DataFrame(work_on(study, lambda name: studied, Runs(place)).table)


def bench(
    model: PreTrainedModel,
    prompts: Tensor | Sequence[str] | Sequence[Tensor],
    drafts: Sequence[str | Drafter],
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
) -> Any:
    """Measure drafts side by side on the same prompts, in turns with `model.generate` and plain decoding.

    Args:
        model: the stock causal LM; it is left as it is.
        prompts: what it writes on from, whole: texts, or token ids, `[texts, tokens]` or each `[1, tokens]`.
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
        A `pandas.DataFrame` with one row for each arm and temperature; `attrs["doubts"]` says which figures to doubt.

    Raises:
        BenchError, PromptError, DraftConfigError, UnsupportedOptionError: naming what cannot be.
    """
    require_packages()
    check_module(model)
    check_causal(model)
    place = None if to is None else checked_path("to", to, BenchError)
    ids, given = read_given(model, prompts, tokenizer), Given.of(drafts, accept)
    own = ArmSpec("plain", runtime=usual_runtime_name(model.device))
    specs = [ArmSpec("generate"), own] if timed else []
    for draft in map(called, drafts):
        for rule in map(called, accept or ("",)):
            named, lossless = rule or None, given.lossless(rule or None)
            specs.append(ArmSpec("draft", draft, draft_length, nodes, named, runtime=own.runtime, lossless=lossless))
    parts: frozenset[Part] = frozenset({"speed", "costs"} if timed else {"acceptance"})
    session = Session(
        name=type(model).__name__,
        place=None,
        model=model,
        specs=list(dict.fromkeys(specs)),
        repeats=repeats,
        warm_up=warm_up,
        parts=parts,
        given=given,
        tokenizer=tokenizer,
    )
    asked = [*map(Prompts.of_one_length, ids)]
    cells = {Cell(_GIVEN, temperature, 1, None, max_new_tokens): asked for temperature in temperatures}
    runs = Runs(place)
    found = session.measure(cells, runs, watch or Unwatched())
    if place is not None:
        write_report([MeasuredCell.of(run) for run in runs.of_kind(KIND)], place)
    import pandas

    rows = [
        {
            "model": each.settings.model,
            "weights": each.settings.base[:8],
            "temperature": each.cell.temperature,
            **arm,
            "draft": arm["arm"]["draft"],
            "accept": arm["arm"]["accept"],
        }
        for each in found
        for arm in each.to_dict()["arms"]
    ]
    table = pandas.json_normalize(rows, sep="_")
    table.attrs["doubts"] = [said for each in found for said in each.doubts]
    return table


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]

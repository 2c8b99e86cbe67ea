"""A search on a checkpoint: its own texts, its prices, the search, and the file that `draft=` loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.draft import LayerSkip
from selfspec.draft.skip_file import write_skip_file
from selfspec.environment import environment
from selfspec.model.fingerprint import fingerprint
from selfspec.tools.studies.journal import storage_errors
from selfspec.tools.studies.pricing import costs_point, find_costs
from selfspec.tools.studies.search.bayesian import open_study, quiet_optuna
from selfspec.tools.studies.search.evaluate import Evaluator
from selfspec.tools.studies.search.plan import SearchPlan
from selfspec.tools.studies.search.prices import Prices
from selfspec.tools.studies.search.run import Found, search
from selfspec.tools.studies.search.space import Space
from selfspec.tools.studies.study import Study
from selfspec.tools.studies.subject import Subject
from selfspec.tools.studies.texts import texts_of, texts_point, write_texts

if TYPE_CHECKING:
    import optuna

_PRICES = "prices"


def find(
    subject: Subject,
    study: Study,
    plan: SearchPlan,
    storage: optuna.storages.BaseStorage | None,
    place: object,
    told: Callable[[int], None] = lambda evaluations: None,
) -> Found:
    """Search for the skip set of a model that promises the highest speed on texts that it writes itself.

    Args:
        subject: the model and its prompts; those of the first workload are used.
        study: texts, temperature (the first) and pricing.
        plan: the budget.
        storage: where the search is kept, to be gone on with or joined; None: nowhere.
        place: what messages call it.
        told: how many sets have been evaluated.

    Raises:
        DraftConfigError: there are no such skip sets.
        StorageError: the storage went away; what was evaluated is kept there.
    """
    space = Space.of(subject.model, subject.adapter, plan.fewest, plan.most)
    workload, temperature = next(iter(subject.prompts)), study.temperatures[0]
    point = texts_point(subject, workload, study.new_tokens, temperature, study.seeds[0])
    texts = texts_of(write_texts(subject, point), temperature, subject.model.device)
    costs = costs_point(subject, [], study.pricing)
    name = "search " + sha256(json.dumps([point.key, costs.key, _searched(plan)]).encode()).hexdigest()[:20]
    if storage is None:
        prices = Prices.from_dict(find_costs(subject, costs)["prices"])
        return search(Evaluator(subject.views, texts, prices, plan.draft_lengths, plan.reach), space, plan, told=told)
    with storage_errors(place), quiet_optuna():
        # All who join must weigh alike, so the first one's timings are everyone's.
        kept = open_study(storage, name, plan.seed)
        if _PRICES not in kept.user_attrs:
            kept.set_user_attr(_PRICES, find_costs(subject, costs)["prices"])
        prices = Prices.from_dict(kept.user_attrs[_PRICES])
        evaluator = Evaluator(subject.views, texts, prices, plan.draft_lengths, plan.reach)
        return search(evaluator, space, plan, storage, name, told)


def save(found: Found, subject: Subject, file: Path, about: Mapping[str, Any]) -> None:
    """Write the best set, bound to the model's weights.

    Args:
        found: by a search.
        subject: the model.
        file: to write.
        about: how it was found.

    Raises:
        StorageError: the file cannot be written.
    """
    best = found.best.to_dict()
    skip = LayerSkip(attention=best["attention"], mlp=best["mlp"])
    known = {
        "model": subject.name,
        "promises": best,
        "found": dict(about),
        "environment": environment(subject.model.device),
    }
    write_skip_file(skip, fingerprint(subject.model), file, known)


def _searched(plan: SearchPlan) -> dict[str, Any]:
    """What makes two searches one: all but how long they are to go on."""
    return {name: value for name, value in asdict(plan).items() if name not in ("evaluations", "seed")}

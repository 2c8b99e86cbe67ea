"""Bayesian optimisation of skip sets: optuna's TPE, for acceptance against cost, begun from sets known to be good."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from selfspec.tools.studies.search.evaluate import Evaluator, Score, SkipSet
from selfspec.tools.studies.search.space import Space, parameter

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

# Sets asked for at once: what they begin alike with is computed once.
_BATCH = 4
# Neighbours of a known set that are tried for one that is not, and batches without a new set before the search counts
# as exhausted.
_TRIES, _PATIENCE = 64, 8
_SIZE = "size"
SCORE = "score"
"""User attribute of a trial: what is known of its set."""


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Without optuna's log lines and its warnings of what is experimental."""
    import warnings

    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def open_study(storage: optuna.storages.BaseStorage | None, name: str, seed: int) -> optuna.Study:
    """Begin a study of acceptance against cost, or join it."""
    import optuna

    with quiet_optuna():
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=1, constant_liar=True)
        return optuna.create_study(
            storage=storage,
            study_name=name,
            sampler=sampler,
            directions=["maximize", "minimize"],
            load_if_exists=True,
        )


def recall(study: optuna.Study, evaluator: Evaluator) -> None:
    """Take over what a study knows, from an earlier run or from another worker."""
    for trial in study.get_trials(deepcopy=False):
        if SCORE in trial.user_attrs:
            score = Score.from_dict(trial.user_attrs[SCORE])
            evaluator.scores.setdefault(score.skipped, score)


def tell(study: optuna.Study, space: Space, scores: list[Score]) -> None:
    """Let a study know what is known, each set once."""
    import optuna

    known = {
        Score.from_dict(trial.user_attrs[SCORE]).skipped
        for trial in study.get_trials(deepcopy=False)
        if SCORE in trial.user_attrs
    }
    for score in scores:
        if score.skipped in known or not space.holds(score.skipped):
            continue
        study.add_trial(
            optuna.create_trial(
                params={**space.numbers(score.skipped), _SIZE: len(score.skipped)},
                distributions=_distributions(space),
                values=[score.alpha, score.cost],
                user_attrs={SCORE: score.to_dict()},
            )
        )


def optimise(
    study: optuna.Study, evaluator: Evaluator, space: Space, evaluations: int, told: Callable[[int], None]
) -> None:
    """Ask for sets and evaluate them until so many have been evaluated, by whomever.

    Where the sampler asks for a set that is known, a neighbour of it that is not takes its place.

    Args:
        study: of this model and text.
        evaluator: evaluates sets.
        space: sets that may be chosen.
        evaluations: in all, those before this call included.
        told: of every batch, how many sets have been evaluated.
    """
    import optuna

    in_vain = 0
    while evaluator.evaluations < evaluations and in_vain < _PATIENCE:
        trials = [study.ask(_distributions(space)) for _ in range(min(_BATCH, evaluations - evaluator.evaluations))]
        asked = [space.chosen(trial.params, trial.params[_SIZE]) for trial in trials]
        before = evaluator.evaluations
        sets = _unknown(asked, evaluator, space, random.Random(trials[0].number))
        evaluator.evaluate(sets)
        for trial, skipped in zip(trials, asked, strict=True):
            score = evaluator.scores.get(skipped)
            if score is None:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                continue
            trial.set_user_attr(SCORE, score.to_dict())
            study.tell(trial, [score.alpha, score.cost])
        tell(study, space, [evaluator.scores[skipped] for skipped in sets])
        in_vain = 0 if evaluator.evaluations > before else in_vain + 1
        recall(study, evaluator)
        told(evaluator.evaluations)


def _unknown(asked: list[SkipSet], evaluator: Evaluator, space: Space, draws: random.Random) -> list[SkipSet]:
    """Sets not evaluated yet, one for each that was asked for where there is one near it."""
    found: dict[SkipSet, None] = {}
    for skipped in asked:
        tried = skipped
        for _ in range(_TRIES):
            if tried not in evaluator.scores and tried not in found:
                found[tried] = None
                break
            tried = space.near(tried, draws)
    return list(found)


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    import optuna

    floats = {parameter(each): optuna.distributions.FloatDistribution(0.0, 1.0) for each in space.choices}
    return {**floats, _SIZE: optuna.distributions.IntDistribution(space.fewest, space.most)}

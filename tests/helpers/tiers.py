"""Which combinations of cases a test runs, and which of them only in a marked tier."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def in_turns(
    *axes: Collection[Any], mark: pytest.MarkDecorator = pytest.mark.contract, slow: Collection[str] = ()
) -> list[Any]:
    """Combine the values of some axes, for `parametrize`; few of the cases are in the plain tier.

    Each combination of all axes but the last comes once there, with the values of the last axis in turns.

    Args:
        axes: the values of each, or a dictionary of them by what they are called.
        mark: of all other combinations.
        slow: names of values of the first axis none of whose combinations are in the plain tier.
    """
    named = [
        list(axis.items()) if isinstance(axis, dict) else [(_name(value), value) for value in axis] for axis in axes
    ]
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in named)):
        values = [axis[place] for axis, place in zip(named, places, strict=True)]
        cases.append(
            pytest.param(
                *(value for _, value in values),
                id="-".join(name for name, _ in values),
                marks=mark if sum(places) % len(named[-1]) or values[0][0] in slow else (),
            )
        )
    return cases


def taking_turns(*axes: Sequence[Any]) -> list[Any]:
    """Combine the values of some axes, for `parametrize`: each combination of all but the last, which takes turns."""
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes[:-1])):
        values = [axis[place] for axis, place in zip(axes, (*places, sum(places) % len(axes[-1])), strict=True)]
        cases.append(pytest.param(*values, id="-".join(map(_name, values))))
    return cases


def _name(value: Any) -> str:
    # Addresses in a name would differ between the processes of one run.
    return getattr(value, "__name__", str(value))

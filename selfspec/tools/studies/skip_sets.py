"""Which skip sets a search may choose, drawn at random or near a given one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from transformers import PreTrainedModel

from selfspec.errors import DraftConfigError
from selfspec.model.adapter import Adapter
from selfspec.model.layer_path import Part, Sublayer, sublayers

SkipSet = frozenset[Sublayer]
"""Sublayers that a draft leaves out."""


@dataclass(frozen=True)
class Space:
    """The sets a search may choose.

    Attributes:
        choices: sublayers that can be left out.
        fewest: sublayers of a set, at least.
        most: at most; less than all of the network.
    """

    choices: tuple[Sublayer, ...]
    fewest: int
    most: int

    @classmethod
    def of(cls, model: PreTrainedModel, adapter: Adapter, fewest: int = 1, most: int | None = None) -> Space:
        """Return the space of a model.

        Args:
            model: the stock model.
            adapter: where its layers are.
            fewest: sublayers of a set, at least.
            most: at most; None: half of the network.

        Raises:
            DraftConfigError: there are no such sets.
        """
        layers = adapter.decoder_layers(model)
        choices = tuple(
            each
            for each in sublayers(len(layers))
            if each.part == Part.ATTENTION or adapter.modules_of(layers[each.layer], Part.MLP)
        )
        largest = len(choices) // 2 if most is None else most
        if not 1 <= fewest <= largest < len(choices):
            raise DraftConfigError(
                f"skip sets of {fewest} to {largest} sublayers are out of range; this model has {len(choices)} "
                f"sublayers, choose from 1..{len(choices) - 1}"
            )
        return cls(choices, fewest, largest)

    def holds(self, skipped: SkipSet) -> bool:
        """Return whether a set may be chosen."""
        return self.fewest <= len(skipped) <= self.most and skipped <= frozenset(self.choices)

    def random(self, seed: int) -> Iterator[SkipSet]:
        """Draw sets at random, size first; the same one may come again."""
        draws = Random(seed)
        while True:
            yield frozenset(draws.sample(self.choices, draws.randint(self.fewest, self.most)))

    def near(self, skipped: SkipSet, draws: Random) -> SkipSet:
        """Return a set that differs in one sublayer: left out as well, run again, or swapped for another."""
        inside, outside = sorted(skipped), [each for each in self.choices if each not in skipped]
        moves = ["swap"] + ["add"] * (len(skipped) < self.most) + ["drop"] * (len(skipped) > self.fewest)
        move = draws.choice(moves)
        less = frozenset({draws.choice(inside)}) if move in ("swap", "drop") else frozenset()
        more = frozenset({draws.choice(outside)}) if move in ("swap", "add") else frozenset()
        return skipped - less | more

"""Many draft paths over one text at once: what begins alike is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from selfspec.errors import UnsupportedOptionError
from selfspec.measure.teacher_forced.passes import WHOLE, Parts, TeacherForcedText, parts_run
from selfspec.model.early_head import DraftHead
from selfspec.model.layer_path import LayerPath, Part


@dataclass(frozen=True)
class DraftPath:
    """A draft path.

    Attributes:
        path: what a draft step runs, from tokens.
        head: what reads its last states; None: the model's own norm and head.

    Raises:
        UnsupportedOptionError: some of it runs in fewer bits, which teacher forcing does not read.
    """

    path: LayerPath
    head: DraftHead | None = None

    def __post_init__(self) -> None:
        if self.path.precision is not None:
            raise UnsupportedOptionError(
                "drafts in fewer bits cannot be teacher-forced; leave them out, or measure them with selfspec bench"
            )


def readings(text: TeacherForcedText, paths: Sequence[DraftPath]) -> Iterator[tuple[int, Tensor]]:
    """Read a text along many draft paths, in an order that shares the most work.

    Layers before a path's first missing sublayer are the full model's own, and are not run at all. Paths that go the
    same way after that share every layer up to where they part.

    Yields:
        The number of a path, and its logits of every drafted token as `TeacherForcedText.read` gives them.
    """
    ways = sorted((tuple(map(sorted, parts_run(each.path))), number) for number, each in enumerate(paths))
    yield from _visit(text, paths, ways, 0, None)


def _visit(
    text: TeacherForcedText,
    paths: Sequence[DraftPath],
    ways: Sequence[tuple[tuple[list[Part], ...], int]],
    layer: int,
    hidden: Tensor | None,
) -> Iterator[tuple[int, Tensor]]:
    """Continue from states that enter a layer; None: they are exact so far."""
    if layer == paths[ways[0][1]].path.depth:
        last = text.exact(layer) if hidden is None else hidden
        for _, number in ways:
            # An exit head reads behind the last layer that runs; nothing after that changed the states.
            yield number, text.read(last, paths[number].head)
        return
    for way, group in groupby(ways, key=lambda each: each[0][layer]):
        parts: Parts = frozenset(way)
        states = None
        if hidden is not None or parts != WHOLE:
            states = text.run(layer, parts, text.exact(layer) if hidden is None else hidden)
        yield from _visit(text, paths, list(group), layer + 1, states)

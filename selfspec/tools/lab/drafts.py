"""The drafts a study names, one by one (`exits`, `random:4x20`, ..., or a name), and the skip sets there are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from transformers import PreTrainedModel

from selfspec.draft import ExitHead, LayerSkip, SkipFile
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.exit_head import CONFIG, WEIGHTS
from selfspec.draft.reduced_vocabulary import ReducedVocabulary
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.errors import DraftConfigError, SelfSpecError, StudyError
from selfspec.files.json_text import read_json
from selfspec.model.adapter import Adapter
from selfspec.model.layer_path import Part, Sublayer, sublayers

_RANDOM = re.compile(r"random:(\d{1,18})x(\d{1,18})", re.ASCII)
# Draws beyond those wanted, of which some come again, before a study takes it that there are no more.
_PATIENCE = 1000


SkipSet = frozenset[Sublayer]
"""Sublayers that a draft leaves out."""


@dataclass(frozen=True)
class _Heads:
    exits: list[int]


@dataclass(frozen=True)
class Space:
    """The sets a search may choose: `fewest` to `most` of the sublayers that can be left out, never all of them."""

    choices: tuple[Sublayer, ...]
    fewest: int
    most: int

    @classmethod
    def of(cls, model: PreTrainedModel, adapter: Adapter, fewest: int = 1, most: int | None = None) -> Space:
        """Return the space of a model, up to half of the network where `most` is None."""
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

    def random(self, seed: int) -> Iterator[SkipSet]:
        """Draw sets at random, size first; the same one may come again."""
        draws = Random(seed)
        while True:
            yield frozenset(draws.sample(self.choices, draws.randint(self.fewest, self.most)))


def named_drafts(names: Iterable[str], model: PreTrainedModel, adapter: Adapter, seed: int) -> dict[str, str]:
    """Return the drafts of a study, in the order in which they are named, each with what its name does not say.

    Returns:
        Digests of what lies on disk, by the name that `draft_of` reads; empty where nothing does.
    """
    found: dict[str, str] = {}
    for name in names:
        try:
            for each in _expanded(name, model, adapter, seed):
                drafter = draft_of(each)
                drafter.check(len(adapter.decoder_layers(model)))
                drafter.check_model(model, adapter)
                found[each] = _content(drafter)
        except SelfSpecError as error:
            raise StudyError(f"drafts: {name}: {error}") from error
    return found


def draft_kind(name: str) -> str:
    """Return the kind of a draft: `exit`, `skip`, `skip-file` or `head`, with `+vocab` behind if it is reduced."""
    return name.partition(":")[0] + "+vocab" * ("+vocab:" in name)


def draft_of(name: str) -> LayerPathDrafter:
    """Return the drafter of a name."""
    try:
        drafter = parse_draft(name)
    except SelfSpecError as error:
        raise StudyError(
            f"{error}; a study also knows exits, layers, sublayers, random:SIZExCOUNT and heads:FOLDER"
        ) from error
    if not isinstance(drafter, LayerPathDrafter):
        raise StudyError(f"{name!r} drafts along no path of the model, so there is no layer to study")
    return drafter


def _expanded(name: str, model: PreTrainedModel, adapter: Adapter, seed: int) -> Iterator[str]:
    depth = len(adapter.decoder_layers(model))
    kind, _, rest = name.partition(":")
    if name == "exits":
        yield from (f"exit:{layer}" for layer in range(1, depth))
    elif name == "layers":
        yield from (f"skip:layers={layer}" for layer in range(depth))
    elif name == "sublayers":
        yield from (skip_name([each]) for each in Space.of(model, adapter).choices)
    elif kind == "random":
        drawn = _RANDOM.fullmatch(name)
        if drawn is None:
            raise StudyError("this is not understood; write random:4x20 for 20 sets of 4 sublayers")
        size, count = int(drawn[1]), int(drawn[2])
        draws = Space.of(model, adapter, size, size).random(Random(f"{seed} {name}").getrandbits(32))
        yield from islice(dict.fromkeys(map(skip_name, islice(draws, count + _PATIENCE))), count)
    elif kind == "heads":
        heads = read_json(Path(rest) / CONFIG, _Heads, StudyError, "write exit heads with selfspec train exit")
        yield from (f"head:{rest}@{layer}" for layer in heads.exits)
    else:
        yield name


def skip_name(skipped: Iterable[Sublayer]) -> str:
    """Return the name of a skip set."""
    attention, mlp = ([each.layer for each in sorted(skipped) if each.part == part] for part in Part)
    return draft_name(LayerSkip(attention, mlp))


def skip_set(name: str) -> SkipSet:
    """Return the sublayers that a skip set of that name leaves out."""
    drafter = draft_of(name)
    skip = drafter.skip if isinstance(drafter, SkipFile) else drafter
    if not isinstance(skip, LayerSkip):
        raise StudyError(f"drafts: {name!r} is no skip set")
    return skip.path(2 + max([*skip.attention, *skip.mlp, *skip.layers])).skipped


def _content(drafter: LayerPathDrafter) -> str:
    match drafter:
        case ExitHead(source=source):
            return hashlib.sha256((Path(source) / WEIGHTS).read_bytes()).hexdigest()[:16]
        case SkipFile(skip=skip):
            return draft_name(skip)
        case ReducedVocabulary(draft_with=draft_with, tokens=tokens):
            return f"{_content(draft_with)} {hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]}"
        case _:
            return ""

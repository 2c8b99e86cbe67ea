"""The drafts a study names, one by one: `exits`, `layers`, `sublayers`, `random:4x20`, `heads:FOLDER`, or a name."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import PreTrainedModel

from selfspec.draft import ExitHead, LayerSkip, SkipFile
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.exit_head import CONFIG, WEIGHTS
from selfspec.draft.named import draft_name, parse_draft
from selfspec.draft.reduced_vocabulary import ReducedVocabulary
from selfspec.errors import SelfSpecError, StudyError
from selfspec.files.json_text import read_json
from selfspec.model.adapter import Adapter
from selfspec.model.layer_path import Part, Sublayer
from selfspec.tools.studies.skip_sets import Space

_RANDOM = re.compile(r"random:(\d{1,18})x(\d{1,18})", re.ASCII)
# Draws beyond those wanted, of which some come again, before a study takes it that there are no more.
_PATIENCE = 1000


@dataclass(frozen=True)
class NamedDraft:
    """A draft of a study.

    Attributes:
        name: that finds it again, with `draft_of`.
        content: what it is, where the name alone does not say so: a digest of what lies on disk.
    """

    name: str
    content: str = ""


@dataclass(frozen=True)
class _Heads:
    """What a folder of exit heads says, as far as a study needs it."""

    exits: list[int]


def named_drafts(names: Iterable[str], model: PreTrainedModel, adapter: Adapter, seed: int) -> list[NamedDraft]:
    """Return the drafts of a study, each once, in the order in which they are named.

    Args:
        names: as the study has them.
        model: that drafts.
        adapter: where its layers are.
        seed: of random sets.

    Raises:
        StudyError: a name is not understood, or a draft does not fit the model.
    """
    found: dict[NamedDraft, None] = {}
    for name in names:
        for each in _expanded(name, model, adapter, seed):
            drafter = draft_of(each)
            try:
                drafter.check(len(adapter.decoder_layers(model)))
                drafter.check_model(model, adapter)
            except SelfSpecError as error:
                raise StudyError(f"drafts: {name}: {error}") from error
            found[NamedDraft(each, _content(drafter))] = None
    return list(found)


def draft_kind(name: str) -> str:
    """Return the kind of a draft: `exit`, `skip`, `skip-file` or `head`, with `+vocab` behind if it is reduced."""
    return name.partition(":")[0] + "+vocab" * ("+vocab:" in name)


def draft_of(name: str) -> LayerPathDrafter:
    """Return the drafter of a name.

    Raises:
        StudyError: it is no draft along a path of the model.
    """
    try:
        drafter = parse_draft(name)
    except SelfSpecError as error:
        raise StudyError(
            f"drafts: {error}; a study also knows exits, layers, sublayers, random:SIZExCOUNT and heads:FOLDER"
        ) from error
    if not isinstance(drafter, LayerPathDrafter):
        raise StudyError(f"drafts: {name!r} drafts along no path of the model, so there is no layer to study")
    return drafter


def _expanded(name: str, model: PreTrainedModel, adapter: Adapter, seed: int) -> Iterator[str]:
    depth = len(adapter.decoder_layers(model))
    if name == "exits":
        yield from (f"exit:{layer}" for layer in range(1, depth))
    elif name == "layers":
        yield from (f"skip:layers={layer}" for layer in range(depth))
    elif name == "sublayers":
        yield from (skip_name([each]) for each in Space.of(model, adapter).choices)
    elif name.startswith("random:"):
        drawn = _RANDOM.fullmatch(name)
        if drawn is None:
            raise StudyError(f"drafts: {name!r} is not understood; write random:4x20 for 20 sets of 4 sublayers")
        size, count = int(drawn[1]), int(drawn[2])
        try:
            space = Space.of(model, adapter, size, size)
        except SelfSpecError as error:
            raise StudyError(f"drafts: {name}: {error}") from error
        yield from _random(space, count, f"{seed} {name}")
    elif name.startswith("heads:"):
        folder = name.removeprefix("heads:")
        heads = read_json(Path(folder) / CONFIG, _Heads, StudyError, "write exit heads with selfspec train exit")
        yield from (f"head:{folder}@{layer}" for layer in heads.exits)
    else:
        yield name


def skip_name(skipped: Iterable[Sublayer]) -> str:
    """Return the name of a skip set."""
    parts = sorted(skipped)
    attention = [each.layer for each in parts if each.part == Part.ATTENTION]
    return draft_name(LayerSkip(attention, [each.layer for each in parts if each.part == Part.MLP]))


def skip_set(name: str) -> frozenset[Sublayer]:
    """Return the sublayers that a skip set of that name leaves out."""
    drafter = draft_of(name)
    skip = drafter.skip if isinstance(drafter, SkipFile) else drafter
    if not isinstance(skip, LayerSkip):
        raise StudyError(f"drafts: {name!r} is no skip set")
    depth = 2 + max([*skip.attention, *skip.mlp, *skip.layers])
    return skip.path(depth).skipped


def _random(space: Space, count: int, seed: str) -> Iterator[str]:
    draws = islice(space.random(random.Random(seed).getrandbits(32)), count + _PATIENCE)
    yield from islice(dict.fromkeys(map(skip_name, draws)), count)


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

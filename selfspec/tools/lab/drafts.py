"""The drafts that a study names, one by one (`exits`, `random:4x20`, ..., or a name), and skip sets."""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from inspect import getsource
from itertools import combinations, groupby, islice
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.accept import Rule, find_rule, rule_name
from selfspec.architecture import Adapter
from selfspec.control.profile import Profile
from selfspec.draft import Drafter, EarlyExit, LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.early_exit import trained_exits
from selfspec.draft.registry import draft_name, kinds, parse_draft, parts_of
from selfspec.errors import DraftConfigError, SelfSpecError, StudyError
from selfspec.model.identity import fingerprint
from selfspec.model.layer_path import Part, Sublayer, sublayers

_RANDOM = re.compile(r"random:(\d{1,18})x(\d{1,18})", re.ASCII)
_LONGEST_PATH = 256
# Draws beyond those wanted, of which some come again, before a study takes it that there are no more.
_PATIENCE = 1000


SkipSet = frozenset[Sublayer]
"""Sublayers that a draft leaves out."""


@dataclass(frozen=True)
class Space:
    """The sets a search may choose: `fewest` to `most` of the sublayers that can be left out, never all of them.

    `units` are what is left out together: each sublayer by itself, or layers whole.
    """

    units: tuple[SkipSet, ...]
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
        return cls(tuple(frozenset({each}) for each in choices), fewest, largest)

    @property
    def choices(self) -> tuple[Sublayer, ...]:
        """Sublayers that can be left out, first to last."""
        return tuple(sorted(each for unit in self.units for each in unit))

    @property
    def of_layers(self) -> Space:
        """The same space, of whole layers."""
        units = [frozenset(some) for _, some in groupby(self.choices, lambda each: each.layer)]
        return replace(self, units=tuple(units))

    def has(self, skipped: SkipSet) -> bool:
        """Return whether a set is made of units, whatever their number."""
        whole: SkipSet = frozenset()
        return skipped == whole.union(*(unit for unit in self.units if unit <= skipped))

    def random(self, seed: int) -> Iterator[SkipSet]:
        """Draw sets at random, size first; the same one may come again."""
        draws, choices = Random(seed), self.choices
        while True:
            yield frozenset(draws.sample(choices, draws.randint(self.fewest, self.most)))


@dataclass(frozen=True)
class Given:
    """Drafters and rules that a caller gives as objects, by their names in runs and reports; all others have names."""

    drafts: Mapping[str, Drafter] = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)

    @classmethod
    def of(cls, drafts: Iterable[str | Drafter], rules: Iterable[str | Rule] = ()) -> Given:
        """Keep the drafters and rules that are objects; two of one name are a StudyError."""
        every: list[Any] = [[each for each in drafts if isinstance(each, Drafter)]]
        every += [[each for each in rules if isinstance(each, Rule)]]
        for some in every:
            for name, times in Counter(map(called, some)).items():
                if times > 1:
                    raise StudyError(f"{times} of what is given are called {name}; study one at a time")
        found = [{called(each): each for each in some} for some in every]
        return cls(*found)

    def drafter(self, name: str) -> Drafter:
        """Return the drafter of a name; an unknown one is a DraftConfigError."""
        found = self.drafts[name] if name in self.drafts else parse_draft(name)
        if found is None:
            raise DraftConfigError("plain decoding is what every draft is compared with; name a draft")
        return found

    def lossless(self, rule: str | None) -> bool:
        """Return whether texts by a rule are distributed as the model's own; None is the default rule."""
        return rule is None or (self.rules.get(rule) or find_rule(rule)).lossless


def called(draft_or_rule: str | Drafter | Rule) -> str:
    """Return the name of a draft or a rule, or how it represents itself where it has none."""
    if isinstance(draft_or_rule, str):
        return draft_or_rule.strip()
    if isinstance(draft_or_rule, Drafter):
        return draft_name(draft_or_rule)
    return rule_name(draft_or_rule) or repr(draft_or_rule)


def named_drafts(
    names: Iterable[str], model: PreTrainedModel, adapter: Adapter, seed: int, given: Given | None = None
) -> dict[str, str]:
    """Return the drafts of a study in their order, by the name that `Given.drafter` reads, each with its `content`."""
    found: dict[str, str] = {}
    spelled: dict[str, str] = {}
    known = given or Given()
    for name in names:
        try:
            for each in [name] if name in known.drafts else _expanded(name, model, adapter, seed):
                drafter = known.drafter(each)
                drafter.check(len(adapter.decoder_layers(model)))
                drafter.check_model(model, adapter)
                # Two spellings of a draft are one draft.
                found.setdefault(spelled.setdefault(repr(drafter), each), content(drafter))
        except DraftConfigError as error:
            also = "; a study also knows exits, layers, pairs, sublayers, random:SIZExCOUNT and heads:FOLDER"
            raise StudyError(f"drafts: {name}: {error}{also * ('not understood' in str(error))}") from error
        except SelfSpecError as error:
            raise StudyError(f"drafts: {name}: {error}") from error
    return found


def path_of(draft: Drafter | None) -> LayerPathDrafter | None:
    """Return the path of the model that the last source of a draft runs; None: it runs none."""
    path = None if draft is None else draft.last
    return path if isinstance(path, LayerPathDrafter) else None


def paths_of(drafts: Iterable[Drafter | None]) -> dict[str, LayerPathDrafter]:
    """Return the paths of the model that some drafts run, by name: they are measured, and may draft alone."""
    return {draft_name(path): path for path in map(path_of, drafts) if path is not None}


def draft_kind(name: str) -> str:
    """Return the kind of a draft, without arguments: `exit`, `lookup+int8`, `module:Class`."""
    parts = [part.split(":") for part in parts_of(name)]
    return "+".join(part[0] if part[0] in kinds() else ":".join(part[:2]) for part in parts)


def columns_of(draft: Any) -> dict[str, Any]:
    """Return the columns that a draft's name says: its kind, its exit layer, or the layers and parts it leaves out."""
    if not isinstance(draft, str) or not draft:
        return {}
    try:
        drafter, kind = parse_draft(draft), draft_kind(draft)
    except SelfSpecError:
        # A drafter given as an object has no name to read.
        return {"kind": draft}
    if isinstance(drafter, EarlyExit):
        return {"kind": kind, "exit": drafter.layer}
    if not isinstance(drafter, LayerSkip):
        return {"kind": kind}
    skipped = sorted(skip_set(draft))
    found = {"kind": kind, "skipped": len(skipped)}
    layers = sorted({each.layer for each in skipped})
    if len(layers) == 2 and len(skipped) == 4:
        found |= {"layer": layers[0], "other_layer": layers[1]}
    if len(layers) == 1:
        part = "layer" if len(skipped) > 1 else ("attention", "MLP")[skipped[0].part]
        found |= {"layer": skipped[0].layer, "part": part}
    return found


def _expanded(name: str, model: PreTrainedModel, adapter: Adapter, seed: int) -> Iterator[str]:
    depth = len(adapter.decoder_layers(model))
    kind, _, rest = name.partition(":")
    if name == "exits":
        yield from (f"exit:{layer}" for layer in range(1, depth))
    elif name == "layers":
        yield from (f"skip:layers={layer}" for layer in range(depth))
    elif name == "pairs":
        yield from (f"skip:layers={one},{two}" for one, two in combinations(range(depth), 2))
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
        yield from (f"head:{rest}@{layer}" for layer in trained_exits(rest).about.exits)
    else:
        yield name


def skip_name(skipped: Iterable[Sublayer]) -> str:
    """Return the name of a skip set."""
    attention, mlp = ([each.layer for each in sorted(skipped) if each.part == part] for part in Part)
    return draft_name(LayerSkip(attention, mlp))


def skip_set(name: str) -> SkipSet:
    """Return the sublayers that a skip set of that name leaves out."""
    skip = parse_draft(name)
    if not isinstance(skip, LayerSkip):
        raise StudyError(f"drafts: {name!r} is no skip set")
    return skip.path(2 + max([*skip.attention, *skip.mlp, *skip.layers])).skipped


def content(*parts: Drafter | Profile | Rule | None) -> str:
    """Digest what drafts and rules are beyond their names, so that results for other contents are not taken for theirs.

    That is their fields, the weights and the files that these name, and code of another package.
    """
    found = [said for part in parts for said in _contents(part)]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def _contents(part: Any) -> Iterator[str]:
    kind = type(part)
    yield kind.__qualname__ if " at 0x" in repr(part) else repr(part)
    if not kind.__module__.startswith("selfspec."):
        with suppress(OSError, TypeError):
            yield getsource(sys.modules[kind.__module__])
    for name, value in getattr(part, "__dict__", {}).items():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Drafter | Profile) or (is_dataclass(each) and not isinstance(each, type)):
                yield from _contents(each)
            elif isinstance(each, nn.Module):
                yield fingerprint(each)
            elif isinstance(each, Tensor):
                yield repr(each.tolist())
            elif isinstance(each, int | float):
                yield f"{name}={each!r}"
            elif isinstance(each, str | Path) and len(str(each)) < _LONGEST_PATH and Path(each).exists():
                files = [each] if Path(each).is_file() else sorted(Path(each).iterdir())
                yield repr([(Path(file).name, (stat := Path(file).stat()).st_size, stat.st_mtime_ns) for file in files])

"""Drafters by name.

`exit:4`, `int8`, `int4+exit:20`, `int4:FILE`, `head:FOLDER@E`, `skip:attn=3,5;mlp=4;layers=7-9`, `skip-file:FILE`, any
of these `+vocab:FILE`, `assistant:FOLDER`, `lookup`, `suffix`, `suffix:FILE`, `recycle`, `recycle:FILE`,
`lookup+recycle`, `lookup+exit:4`, `union:suffix+recycle+exit:4`, `auto` or `none`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.assistant import Assistant
from selfspec.draft.cascade import Cascade, Free
from selfspec.draft.drafter import Drafter
from selfspec.draft.early_exit import EarlyExit
from selfspec.draft.exit_head import ExitHead
from selfspec.draft.layer_skip import MOST_LAYERS, LayerSkip
from selfspec.draft.low_precision import LowPrecision
from selfspec.draft.prompt_lookup import PromptLookup
from selfspec.draft.recycling import Recycling
from selfspec.draft.reduced_vocabulary import ReducedVocabulary
from selfspec.draft.skip_file import SkipFile
from selfspec.draft.spelling import misread
from selfspec.draft.suffixes import Suffixes
from selfspec.draft.union import Union
from selfspec.errors import DraftConfigError

PLAIN = "none"
"""What plain decoding, without a draft, is called."""

AUTO = "auto"
"""What the draft of a calibration profile is called; it takes a model to say what that is."""

ASSISTANT = "assistant:"
"""What comes before the folder of an assistant."""

_LOOK_UP = "lookup"
_SUFFIX = "suffix"
_RECYCLE = "recycle"
_UNION = "union:"
# What runs no model, and may come before other drafters.
_FREE = re.compile(r"(lookup|suffix|recycle)(?::(.+))?", re.DOTALL)
_PARTS = {"attn": "attention", "mlp": "mlp", "layers": "layers"}
# No model has layers of more digits, and Python reads no numbers of thousands of them.
_NUMBER = r"(\d{1,9})"
_EXIT = re.compile(rf"exit:{_NUMBER}", re.ASCII)
_LOW_PRECISION = re.compile(rf"int([48])(?::(.+?))?(?:\+exit:{_NUMBER})?", re.ASCII | re.DOTALL)
_HEAD = re.compile(rf"(.+)@{_NUMBER}", re.ASCII | re.DOTALL)
_RANGE = re.compile(rf"{_NUMBER}(?:-{_NUMBER})?", re.ASCII)


def parse_draft(text: str) -> Drafter | None:
    """The drafter that `text` names; None for plain decoding.

    Raises:
        DraftConfigError: it is not of the grammar, or a file that it names cannot be used.
        CheckpointError, ExitHeadError: what it names on disk cannot be used.
    """
    if not isinstance(text, str) or "\0" in text:
        raise misread(text)
    given = text.strip()
    if given == PLAIN:
        return None
    if given.startswith(_UNION):
        return Union(*_sources(text, given.removeprefix(_UNION)))
    *free, last = sources = list(_sources(text, given))
    kinds = [type(source) for source in sources if isinstance(source, Free)]
    if len(set(kinds)) < len(kinds):
        raise misread(text)
    for source in reversed(free):
        assert isinstance(source, Free)
        last = Cascade(source, last)
    return last


def _sources(text: str, given: str) -> Iterator[Drafter]:
    """The drafters that `given`, a part of `text`, names in order."""
    behind = "+"
    while behind:
        name, behind, then = given.partition("+")
        found = _FREE.fullmatch(name.strip())
        if found is None:
            yield _model_drafter(text, given.strip())
            return
        yield _free_source(text, found[1], found[2])
        given = then


def _free_source(text: str, name: str, file: str | None) -> Free:
    match name:
        case "lookup" if file is None:
            return PromptLookup()
        case "suffix":
            return Suffixes(file)
        case "recycle":
            return Recycling() if file is None else Recycling.from_file(file)
    raise misread(text)


def _model_drafter(text: str, given: str) -> LayerPathDrafter | Assistant:
    """The drafter with a model that `given`, a part of `text`, names."""
    if given.startswith(ASSISTANT):
        return Assistant(given.removeprefix(ASSISTANT))
    return _path_drafter(text, given)


def _path_drafter(text: str, given: str) -> LayerPathDrafter:
    """The drafter along a path that `given`, a part of `text`, names."""
    path, reduced, file = given.partition("+vocab:")
    if "+vocab:" in file:
        raise misread(text)
    if reduced:
        return ReducedVocabulary.from_file(_path_drafter(text, path.strip()), file)
    if given.startswith("head:"):
        return _exit_head(given.removeprefix("head:"))
    leaves_early = _EXIT.fullmatch(given)
    if leaves_early:
        return EarlyExit(layer=int(leaves_early[1]))
    low_precision = _LOW_PRECISION.fullmatch(given)
    if low_precision:
        return _low_precision(int(low_precision[1]), low_precision[2], low_precision[3])
    if given.startswith("skip-file:"):
        return SkipFile.from_file(given.removeprefix("skip-file:"))
    if given.startswith("skip:"):
        skipped = _skip_set(text, given.removeprefix("skip:"))
        return LayerSkip(skipped["attention"], skipped["mlp"], skipped["layers"])
    raise misread(text)


def draft_name(drafter: Drafter | None) -> str:
    """What a draft is called: `exit:4`, `skip:attn=3,5;mlp=4;layers=7`, `none`, or how any other represents itself."""
    match drafter:
        case None:
            return PLAIN
        case EarlyExit(layer=layer):
            return f"exit:{layer}"
        case LowPrecision(bits=bits, exit=leaves, saved=file) if file or drafter == LowPrecision(bits, exit=leaves):
            return f"int{bits}" + (f":{file}" if file else "") + ("" if leaves is None else f"+exit:{leaves}")
        case ReducedVocabulary(draft_with=draft_with, source=str(file)):
            return f"{draft_name(draft_with)}+vocab:{file}"
        case PromptLookup() if drafter == PromptLookup():
            return _LOOK_UP
        case Suffixes(corpus=file) if drafter == Suffixes(file):
            return _SUFFIX + (f":{file}" if file else "")
        case Recycling(saved=file) if file or drafter == Recycling():
            return _RECYCLE + (f":{file}" if file else "")
        case Cascade() if draft_name(drafter.first) != repr(drafter.first):
            return f"{draft_name(drafter.first)}+{draft_name(drafter.then)}"
        case Union() if all(draft_name(source) != repr(source) for source in drafter.sources):
            return _UNION + "+".join(map(draft_name, drafter.sources))
        case Assistant(source=str(folder)):
            return f"{ASSISTANT}{folder}"
        case SkipFile(source=source):
            return f"skip-file:{source}"
        case LayerSkip():
            parts = (("attn", drafter.attention), ("mlp", drafter.mlp), ("layers", drafter.layers))
            return "skip:" + ";".join(f"{name}={','.join(map(str, layers))}" for name, layers in parts if layers)
        case _:
            return repr(drafter)


def _exit_head(place: str) -> ExitHead:
    named = _HEAD.fullmatch(place)
    if named:
        return ExitHead.from_pretrained(named[1], int(named[2]))
    return ExitHead.from_pretrained(place)


def _low_precision(bits: int, file: str | None, exit_layer: str | None) -> LowPrecision:
    leaves = None if exit_layer is None else int(exit_layer)
    if file is None:
        return LowPrecision(bits, exit=leaves)
    found = LowPrecision.from_file(file, leaves)
    if found.bits != bits:
        raise DraftConfigError(f"{file} holds {found.bits} bits and not {bits}; write int{found.bits}:{file}")
    return found


def _skip_set(text: str, parts: str) -> dict[str, list[int]]:
    skipped: dict[str, list[int]] = {name: [] for name in _PARTS.values()}
    for part in parts.split(";"):
        name, _, ranges = part.strip().partition("=")
        if name not in _PARTS or skipped[_PARTS[name]]:
            raise misread(text)
        for numbers in ranges.split(","):
            skipped[_PARTS[name]] += _layers(text, numbers.strip())
    return skipped


def _layers(text: str, numbers: str) -> range:
    found = _RANGE.fullmatch(numbers)
    if found is None:
        raise misread(text)
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first or last >= MOST_LAYERS:
        raise misread(text)
    return range(first, last + 1)

"""Drafters by name: those of this package, those that other packages declare, and `module:Class`.

Examples: `exit:4`, `int4+exit:20`, `lookup+recycle+int8`, `exit:4+vocab:FILE`, `none`. A `+`
joins drafts if a name follows it; elsewhere it belongs to a file name.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

import selfspec.draft
from selfspec.arguments import ClassPath, shown
from selfspec.draft.cascade import Cascade
from selfspec.draft.drafter import GROUP, Declaration, Drafter
from selfspec.errors import DraftConfigError, SelfSpecError

PLAIN = "none"
"""Name of plain decoding, without a draft."""

AUTO = "auto"
"""Name of the draft of a calibration profile, which depends on the model."""

# A list of all drafts shows longer forms by their name alone.
_LONG_FORM = 13
# A kind and a number, with any separator between them.
_RUN_TOGETHER = re.compile(r"([a-z]+)[-_=@ ]?(\d+)", re.ASCII)


@cache
def kinds() -> Mapping[str, type[Drafter]]:
    """Return declared drafters by name, this package's first; raise DraftConfigError if a name is taken or unusable."""
    found: dict[str, type[Drafter]] = {}
    for module in sorted(each.name for each in pkgutil.walk_packages(selfspec.draft.__path__, "selfspec.draft.")):
        for kind in vars(import_module(module)).values():
            if isinstance(kind, type) and issubclass(kind, Drafter) and kind.__module__ == module:
                found |= {each.name: kind for each in vars(kind).get("declared", ())}
    order = ("layers", "nothing", "model")
    found = dict(sorted(found.items(), key=lambda each: (each[1].declared[0].written, order.index(each[1].runs))))
    for point in entry_points(group=GROUP):
        kind = _as_drafter(point.load(), point.value)
        for each in vars(kind).get("declared", ()):
            if found.setdefault(each.name, kind) is not kind:
                raise DraftConfigError(f"{point.value} declares the draft {each.name!r}, and there is one already")
    return found


def declarations() -> list[Declaration]:
    """Return the declarations of all drafters."""
    return [each for name, kind in kinds().items() for each in kind.declared if each.name == name]


def parse_draft(text: str) -> Drafter | None:
    """Return the drafter that `text` names, None for plain decoding; raise SelfSpecError if it cannot be used."""
    if not isinstance(text, str) or "\0" in text:
        raise _misread(text)
    if text.strip() == PLAIN:
        return None
    try:
        return _joined(parts_of(text.strip()))
    except ValueError as error:
        # Errors of selfspec have a message of their own.
        if isinstance(error, SelfSpecError):
            raise
        raise _misread(text) from None


def draft_name(drafter: Drafter | None) -> str:
    """Return the name of a draft, such as `lookup+int8` or `none`; its `repr` if it has no name."""
    return PLAIN if drafter is None else drafter.spelling or repr(drafter)


def parts_of(text: str) -> list[str]:
    """Split a name where a `+` comes before a drafter's name: `lookup+exit:4` into `lookup` and `exit:4`."""
    known = "|".join(re.escape(name) for name in kinds())
    of_a_class = r"[A-Za-z_][\w.]*:[A-Z]\w*"
    return [part.strip() for part in re.split(rf"\+(?=\s*(?:{known}|{of_a_class})(?:[:+\s]|$))", text)]


def _joined(parts: Sequence[str]) -> Drafter:
    sources: list[Drafter] = []
    for part in parts:
        name, colon, argument = part.partition(":")
        kind = kinds().get(name.strip())
        written = {each.name: each.written for each in kind.declared}[name.strip()] if kind else "alone"
        if kind is not None and written == "behind":
            if not sources:
                raise ValueError(part)
            sources[-1] = kind.spelled_behind(sources[-1], name.strip(), argument.strip() if colon else None)
            continue
        found = _foreign(part) if kind is None else kind.spelled(name.strip(), argument.strip() if colon else None)
        together = sources[-1].followed_by(found) if sources else None
        sources[-1 if together else len(sources) :] = [together or found]
    return sources[0] if len(sources) == 1 else Cascade(*sources)


def _foreign(part: str) -> Drafter:
    """Return the drafter that `module:Class` or `module:Class:argument` names."""
    named = ClassPath.read(part)
    if named is None:
        raise ValueError(part)
    try:
        found = named.load()
    except ModuleNotFoundError as error:
        if error.name is not None and f"{named.module}.".startswith(f"{error.name}."):
            raise ValueError(part) from None
        raise
    except AttributeError:
        raise DraftConfigError(f"draft {part!r}: the module {named.module} has no {named.name}") from None
    return _as_drafter(found, part).spelled(f"{named.module}:{named.name}", named.argument)


def _as_drafter(kind: object, named: str) -> type[Drafter]:
    if isinstance(kind, type) and issubclass(kind, Drafter):
        return kind
    raise DraftConfigError(
        f"{named} is no drafter; derive its class from selfspec.drafts.Drafter (docs/your_own_drafter.md)"
    )


def _misread(text: object) -> DraftConfigError:
    """Return the error for a draft that is not of the grammar, with the form to write or the likely meaning."""
    said = f"draft {shown(text)} is not understood"
    forms = {each.name: each.form for each in declarations()} | {PLAIN: PLAIN, AUTO: "auto or auto:FILE"}
    short = {f"{name}{form}" for name in forms for form in (":FOLDER", "[:FOLDER]")}
    alone = {name: form for name, form in forms.items() if not form.startswith("draft+")}
    listed = ", ".join(name if len(form) > _LONG_FORM or form in short else form for name, form in alone.items())
    behind = [form.removeprefix("draft") for form in forms.values() if form not in alone.values()]
    listed += f"; behind one of them {', '.join(behind)}; joined by +: lookup+int8"
    if not isinstance(text, str) or not text.strip():
        return DraftConfigError(f"{said}; write {listed}")
    parts = text.strip().split("+")
    if not all(part.strip() for part in parts):
        return DraftConfigError(f"{said}: nothing comes before or behind a +; write e.g. lookup+int8")
    meant = "+".join(_meant(part, list(forms)) for part in parts)
    if meant != text.strip():
        return DraftConfigError(f"{said}; did you mean {meant}? There are {listed}")
    named = [part.strip().partition(":")[0] for part in parts]
    known = list(dict.fromkeys(name for name in named if name in forms))
    if len(known) < len(set(named)):
        return DraftConfigError(f"{said}; write {listed}")
    examples = {each.name: each.example for each in declarations()}
    said_how = (", such as ".join(dict.fromkeys((forms[name], examples.get(name, name)))) for name in known)
    return DraftConfigError(f"{said}; write {'; '.join(said_how)}")


def _meant(part: str, names: Sequence[str]) -> str:
    kind, colon, rest = part.strip().partition(":")
    if kind in names:
        return part.strip()
    together = _RUN_TOGETHER.fullmatch(kind.lower())
    if together and not colon:
        name, number = together.groups()
        if name in names:
            return f"{name}:{number}"
        return name + number if name + number in names else part.strip()
    near = get_close_matches(kind.lower().replace("-", "").replace("_", ""), names, n=1, cutoff=0.7)
    return f"{near[0]}{colon}{rest}" if near else part.strip()

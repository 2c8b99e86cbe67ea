"""The message for a draft that cannot be read: how its kind is written, or which one was probably meant."""

from __future__ import annotations

import re
from difflib import get_close_matches

from selfspec.arguments import shown
from selfspec.errors import DraftConfigError

_FORMS = {
    "exit": "exit:E with a layer, such as exit:4",
    "int8": "int8, int8:FILE or int8+exit:E",
    "int4": "int4, int4:FILE or int4+exit:E",
    "skip": "skip:PART=LAYERS with attn, mlp or layers as PART, such as skip:attn=3,5;mlp=4;layers=7-9",
    "skip-file": "skip-file:FILE with a file by selfspec search",
    "head": "head:FOLDER or head:FOLDER@E with a folder by selfspec train exit",
    "assistant": "assistant:FOLDER",
    "lookup": "lookup, alone or before another draft, such as lookup+int8",
    "suffix": "suffix or suffix:FILE with a file by selfspec index, alone or before another draft",
    "recycle": "recycle or recycle:FILE, alone or before another draft, such as lookup+recycle+int8",
    "union": "union: before suffix, recycle and one more, such as union:suffix+recycle+exit:4",
    "vocab": "+vocab:FILE behind another draft, such as exit:4+vocab:v.json",
    "auto": "auto or auto:FILE",
    "none": "none",
}
_LIST = (
    "exit:E, int8, int4, skip:..., skip-file:FILE, head:FOLDER, assistant:FOLDER, lookup, suffix, recycle, union:..., "
    "auto or none"
)
# A kind and what belongs to it, whatever is between them.
_RUN_TOGETHER = re.compile(r"(exit|int)[-_=@ ]?(\d+)", re.ASCII)


def misread(text: object) -> DraftConfigError:
    """The error for a draft that is not of the grammar."""
    said = f"draft {shown(text)} is not understood"
    if not isinstance(text, str) or not text.strip():
        return DraftConfigError(f"{said}; write {_LIST}")
    meant = "+".join(_meant(part) for part in text.strip().split("+"))
    if meant != text.strip():
        return DraftConfigError(f"{said}; did you mean {meant}? There are {_LIST}")
    kinds = [part.partition(":")[0] for part in meant.split("+")]
    known = list(dict.fromkeys(kind for kind in kinds if kind in _FORMS))
    if len(known) < len(set(kinds)):
        return DraftConfigError(f"{said}; write {_LIST}")
    return DraftConfigError(f"{said}; write {'; '.join(_FORMS[kind] for kind in known)}")


def _meant(part: str) -> str:
    """The nearest kind of draft in place of a kind that there is not."""
    kind, colon, rest = part.strip().partition(":")
    if kind in _FORMS:
        return part.strip()
    together = _RUN_TOGETHER.fullmatch(kind.lower())
    if together and not colon:
        name, number = together.groups()
        return f"exit:{number}" if name == "exit" else f"int{number}" if number in ("4", "8") else part.strip()
    near = get_close_matches(kind.lower().replace("-", "").replace("_", ""), _FORMS, n=1, cutoff=0.7)
    return f"{near[0]}{colon}{rest}" if near else part.strip()

"""Grammars that an answer fits which calls tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from selfspec.serve.call_formats import CallFormat


@dataclass(frozen=True)
class CallGrammar:
    """What an answer fits that calls tools, or may.

    Attributes:
        form: how calls are written.
        tools: name and JSON schema of the arguments of each that may be called.
        needed: whether one must be; else text may stand before calls, or alone.
        many: whether several may be.
        otherwise: the schema that an answer fits which calls none; None: any text.
    """

    form: CallFormat
    tools: Mapping[str, Mapping[str, Any]]
    needed: bool
    many: bool = False
    otherwise: Mapping[str, Any] | None = None
    type: Literal["tools"] = "tools"

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """All that it holds."""
        return [*self.tools.values(), *([] if self.otherwise is None else [self.otherwise])]

    def structural_tag(self, style: str = "json") -> dict[str, Any]:
        """In xgrammar's terms; `style` is its name of how arguments are written."""
        form = self.form
        alone = not self.needed and self.otherwise is None

        def tag(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
            begin, end = f"{form.before}{name}{form.between}", form.after
            # Where text may come first, a call stands alone.
            begin, end = (form.begin.lstrip() + begin, end + form.end) if alone else (begin, end)
            content = _json(schema) | {"style": style}
            return {"type": "tag", "begin": begin, "content": content, "end": end}

        tags = [tag(name, schema) for name, schema in self.tools.items()]
        if alone:
            trigger = form.begin.lstrip() + form.before
            kind = {"type": "triggered_tags", "stop_after_first": not self.many}
            return _tagged({**kind, "triggers": [trigger], "tags": tags})
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": form.separator or "",
            "at_least_one": True,
            "stop_after_first": not self.many or form.separator is None,
        }
        ends = [{"type": "const_string", "value": text} for text in (form.begin, form.end)]
        parts = [part for part in (ends[0], calls, ends[1]) if part.get("value", "-")]
        sequence = {"type": "sequence", "elements": parts}
        return _tagged(
            sequence if self.otherwise is None else {"type": "or", "elements": [sequence, _json(self.otherwise)]}
        )


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": dict(schema), "max_whitespace_cnt": 1}


def _tagged(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}

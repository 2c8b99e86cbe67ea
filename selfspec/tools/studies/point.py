"""One thing a study finds out, by its content: asked for twice, it is done once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["texts", "costs", "estimate", "measure"]
"""What is done: writing texts, timing, judging drafts by teacher forcing, confirming them by generation."""


@dataclass(frozen=True)
class Point:
    """What is to be found out, and where it belongs.

    Attributes:
        kind: what is done.
        content: all that its result depends on.
        place: what reports call its model and workload, and the like: of no influence.
    """

    kind: Kind
    content: Mapping[str, Any]
    place: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The digest of its content."""
        written = json.dumps([self.kind, dict(self.content)], sort_keys=True)
        return hashlib.sha256(written.encode()).hexdigest()[:20]

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {"kind": self.kind, "content": dict(self.content), "place": dict(self.place)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Point:
        """From what `to_dict` gave."""
        return cls(content["kind"], content["content"], content["place"])


@dataclass(frozen=True)
class Result:
    """What came of a point.

    Attributes:
        point: what was to be found out.
        found: what was; empty after an error.
        error: what went wrong; None: nothing.
        seconds: it took.
        environment: what it was found with.
    """

    point: Point
    found: Mapping[str, Any]
    error: str | None
    seconds: float
    environment: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "point": self.point.to_dict(),
            "found": dict(self.found),
            "error": self.error,
            "seconds": self.seconds,
            "environment": dict(self.environment),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Result:
        """From what `to_dict` gave."""
        point = Point.from_dict(content["point"])
        return cls(point, content["found"], content["error"], content["seconds"], content["environment"])

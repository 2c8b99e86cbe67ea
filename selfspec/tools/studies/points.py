"""One thing a study finds out, identified by its content: asked for twice, it is done once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Point:
    """What is to be found out.

    Attributes:
        kind: write texts, time passes, judge a draft by teacher forcing, or confirm it by generation.
        content: everything the result depends on.
        place: what reports call its model, workload and so on; it does not influence the result.
    """

    kind: Literal["texts", "costs", "estimate", "measure"]
    content: Mapping[str, Any]
    place: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The digest of its kind and content."""
        written = json.dumps([self.kind, dict(self.content)], sort_keys=True)
        return hashlib.sha256(written.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Result:
    """What came of a point.

    Attributes:
        found: the findings; empty after an error.
        error: what went wrong; None if nothing did.
    """

    point: Point
    found: Mapping[str, Any]
    error: str | None = None
    seconds: float = 0.0
    environment: Mapping[str, Any] = field(default_factory=dict)

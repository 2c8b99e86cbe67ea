"""What one client may take, so that there is something left for the others."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.errors import UnsupportedOptionError


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of requests.

    Attributes:
        body_bytes: of a request's body.
        new_tokens: of an answer; None: what the context has room for.
        answers: of one request: prompts times `n`.
        request_seconds: until a request is answered to its end.
        client_seconds: in which a client has to send the headers of a request, then its body, and to take what it is
            sent.
        connections: open at once.
    """

    body_bytes: int = 4 * 2**20
    new_tokens: int | None = None
    answers: int = 128
    request_seconds: float = 600.0
    client_seconds: float = 20.0
    connections: int = 1000

    def __post_init__(self) -> None:
        for name in ("body_bytes", "new_tokens", "answers", "request_seconds", "client_seconds", "connections"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UnsupportedOptionError(f"{name} must be above 0, got {value}")

"""Strings that end an answer: found in text that comes piece by piece, and not sent."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string. What may become one is held back.

    Attributes:
        string: the one that came, after which nothing more is let through; None: none did.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.string: str | None = None

    @property
    def found(self) -> bool:
        """Whether one came."""
        return self.string is not None

    def push(self, text: str) -> str:
        """Take text; return what is certainly before any stop string."""
        if self.found:
            return ""
        self._held += text
        places = {string: self._held.find(string) for string in self._strings if string in self._held}
        if places:
            self.string = min(places, key=lambda string: places[string])
            return self._give(places[self.string])
        return self._give(len(self._held) - max(map(self._begun, self._strings), default=0))

    def ends(self, text: str) -> bool:
        """Whether a stop string would be found if this text came next."""
        return bool(text) and any(string in self._held + text for string in self._strings)

    @property
    def rest(self) -> str:
        """What is not let through: once one was found, all from it on of the text that brought it."""
        return self._held

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        return "" if self.found else self._give(len(self._held))

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        return given

    def _begun(self, string: str) -> int:
        """How much of the string the text ends with."""
        longest = min(len(string) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(string[:size])), 0)

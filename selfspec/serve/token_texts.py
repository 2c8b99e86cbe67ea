"""What single tokens are as text and as bytes, for log-probabilities."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from selfspec.decode.text_stream import continuation

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Bytes and text of tokens, each computed once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        # Text in front of a token: decoded alone, a token may lose its first space.
        self._before: list[int] = tokenizer("a", add_special_tokens=False).input_ids
        self._known: dict[int, bytes] = {}

    def raw(self, token: int) -> bytes:
        """The bytes of a token's text."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def text(self, token: int) -> str:
        """Its text; what is no whole character is replaced."""
        return self.raw(token).decode("utf-8", errors="replace")

    def _read(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None or token in self._special:
            return str(name or "").encode()
        byte = _BYTE_TOKEN.fullmatch(name)
        if byte:
            return bytes([int(byte[1], 16)])
        text = continuation(self._tokenizer, self._before, [token])
        if _REPLACEMENT in text and all(letter in _BYTES for letter in name):
            return bytes(_BYTES[letter] for letter in name)
        return text.encode()


def _byte_letters() -> dict[str, int]:
    """The letters in which byte-level vocabularies write bytes: printable ones as they are, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_letters()

"""Sizes in bytes, read and shown."""

from __future__ import annotations

import pytest

from selfspec.errors import UnsupportedOptionError
from selfspec.placement.plan import parse_bytes, shown_bytes


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [(1, 1), ("6GiB", 6 * 2**30), ("1.5 gib", 3 * 2**29), (" 500 MB ", 500_000_000), ("64B", 64), ("1TiB", 2**40)],
)
def test_sizes_are_read(size: str | int, bytes_: int) -> None:
    assert parse_bytes("memory", size) == bytes_


# Digits and letters of other scripts, too.
WORDS = ["", "6", "6 G", "-1GiB", "0GiB", "0.1B", "1e3GiB", "6 GiB each", "\uff16GiB", "\u0666GiB", "6\uff27iB"]


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None, *WORDS, "9" * 5000 + "GiB"], ids=lambda size: str(size)[:20])
def test_what_is_no_size_is_refused_by_name(size: object) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"memory=.*6GiB"):
        parse_bytes("memory", size)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "text"), [(512, "0.5 KiB"), (3 * 2**19, "1.50 MiB"), (6 * 2**30, "6.00 GiB")])
def test_sizes_are_shown(size: int, text: str) -> None:
    assert shown_bytes(size) == text

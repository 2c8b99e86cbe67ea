"""Packages: which versions are here, which are outside the tested ranges, and which extras are not complete."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from selfspec.compat import NEWEST_TESTED

_NAME = "selfspec"


@dataclass(frozen=True)
class Packages:
    """What is installed, by what selfspec says it needs.

    Attributes:
        versions: of each package that selfspec needs; None where it is missing.
        untested: packages of a version outside the range that selfspec states, each with that range.
        newer: packages within their range but newer than those that were tested, each with the newest tested.
        missing: for each extra that is not complete, the packages that it lacks.
    """

    versions: dict[str, str | None]
    untested: dict[str, str]
    newer: dict[str, str]
    missing: dict[str, list[str]]


def read_packages() -> Packages:
    """Read what is installed; empty where selfspec itself is not, but runs from its folder."""
    try:
        needed = [Requirement(line) for line in metadata.requires(_NAME) or ()]
        extras = metadata.metadata(_NAME).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return Packages({}, {}, {}, {})
    always = [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    versions = {each.name: _version(each.name) for each in always}
    untested = {
        each.name: str(each.specifier)
        for each in always
        if (found := versions[each.name]) is not None and not each.specifier.contains(found, prereleases=True)
    }
    newer = {
        name: newest
        for name, newest in NEWEST_TESTED.items()
        if name not in untested and (found := versions.get(name)) is not None and _minor(found) > _minor(newest)
    }
    missing: dict[str, list[str]] = {}
    for extra in extras:
        of_extra = [each for each in needed if each.marker is not None and each.marker.evaluate({"extra": extra})]
        lacking = [each.name for each in of_extra if each not in always and _version(each.name) is None]
        if lacking:
            missing[extra] = lacking
    return Packages(versions, untested, newer, missing)


def _minor(version: str) -> tuple[int, ...]:
    return Version(version).release[:2]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

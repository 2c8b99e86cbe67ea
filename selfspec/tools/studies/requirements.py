"""The packages that studies and searches need and decoding does not."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from selfspec.errors import StudyError

WORK = ("scipy", "sqlalchemy")
REPORT = ("matplotlib", "pandas", "plotly", "pyarrow")


def require_packages(packages: Sequence[str] = WORK) -> None:
    """Refuse before work starts what could not be done without a package that is missing.

    Raises:
        StudyError: naming the package and how to get it.
    """
    for package in packages:
        if find_spec(package) is None:
            raise StudyError(f"studies need {package}; pip install 'selfspec[ablate]'")

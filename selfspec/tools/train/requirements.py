"""The packages that training needs and decoding does not."""

from __future__ import annotations

from importlib.util import find_spec

from selfspec.errors import TrainingError
from selfspec.tools.train.course import Course


def require_packages(course: Course) -> None:
    """Refuse before work starts what could not be done without a package that is missing.

    Raises:
        TrainingError: naming the package and how to get it.
    """
    for package in ("accelerate", "matplotlib"):
        if find_spec(package) is None:
            raise TrainingError(f"training needs {package}; pip install 'selfspec[train]'")
    if course.tensorboard and find_spec("tensorboard") is None:
        raise TrainingError("logs for TensorBoard need the package tensorboard; pip install tensorboard")

"""Says which packages there are: those under selfspec/, and adapters/, which is imported as selfspec.adapters.

Everything else is in pyproject.toml. `selfspec/adapters` is a link to `adapters/` for type checkers and for runs
without an install; it is left out of the search, because a source distribution does not carry it.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["selfspec", "selfspec.*"], exclude=["selfspec.adapters"]), "selfspec.adapters"],
    package_dir={"selfspec.adapters": "adapters"},
)

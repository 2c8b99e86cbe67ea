"""The project's checks as sessions: `nox` runs the quick ones, `nox -s full` all that this machine can run."""

from __future__ import annotations

import os

import nox

nox.options.sessions = ["quick"]
nox.options.reuse_existing_virtualenvs = True

TIERS = "contract or statistical or tools or kernels or accelerator or processes"
"""Tests beside the quick ones that need nothing but the extras of `full`."""


@nox.session
def quick(session: nox.Session) -> None:
    """Check format, types and the quick tier of tests: minutes. Words after `--` go to pytest."""
    session.install("-c", "constraints.txt", "-e", ".[dev]", "./demo_model")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("pytest", *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Run everything: all tiers of tests, planted bugs, documentation and notebooks.

    Tests that need a GPU, another engine or real checkpoints skip themselves where there is none: see CONTRIBUTING.md.
    """
    quick(session)
    session.run("pytest", "-m", TIERS)
    session.run("pytest", "--kernels", "tests/accept", "tests/decode", "tests/draft", "tests/model")
    session.run("pytest", "-m", "gpu or real")
    session.run("pytest", "-n0", "-m", "engines")
    session.install("-c", "constraints.txt", "-e", ".[dev,clients,docs]")
    session.run("pytest", "-m", "clients")
    session.run("pytest", "-m", "docs")
    session.run("pytest", "-n0", "--nbmake", "docs/notebooks")
    site = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", "--site-dir", os.path.join(session.create_tmp(), "site"), env=site)
    with session.chdir("tests"):
        session.run("python", "-m", "mutations")

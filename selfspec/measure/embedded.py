"""The checkpoint of the demonstration, and prompts for it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from selfspec.errors import CheckpointError

# How the first held-out files of httpx and flask (both BSD-3-Clause), pytest and attrs (both MIT) begin.
_HTTPX = """from __future__ import annotations

import typing

import httpcore
import pytest

import httpx

if typing.TYPE_CHECKING:  # pragma: no cover
    from conftest import TestServer


def test_httpcore_all_exceptions_mapped() -> None:
"""
_FLASK = '''import sqlite3
from datetime import datetime

import click
from flask import current_app
from flask import g


def get_db():
    """Connect to the application's configured database.'''
_PYTEST = """from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field


def test_dataclasses() -> None:
"""
_ATTRS = '''# SPDX-License-Identifier: MIT

import pytest

import attr


class TestPatternMatching:
    """
    Pattern matching syntax test cases.
    """
'''

DEMO = "demo"
"""Name of the embedded model in commands and studies."""

PROMPTS = (_HTTPX, _FLASK, _PYTEST, _ATTRS)
"""Beginnings of Python files that the model was not trained on."""


def checkpoint_folder() -> Path:
    """Return the `transformers` folder of the embedded model, with its MODEL_CARD.md.

    Raises:
        CheckpointError: it is not installed.
    """
    found = find_spec("selfspec_demo_model")
    if found is None or not found.submodule_search_locations:
        raise CheckpointError(
            "the demo's model is a package of its own, and is not installed: pip install selfspec-demo-model, or "
            "./demo_model in a clone of selfspec"
        )
    return Path(found.submodule_search_locations[0]) / "model"


def model_place(model: str) -> str:
    """Return the folder or hub name of a model that commands and studies name."""
    return str(checkpoint_folder()) if model == DEMO else model

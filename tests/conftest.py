"""Fixtures of the whole suite. Its being here also puts this folder on the path, for `from tiny import ...`."""

from __future__ import annotations

import gc
import io
import json
import random
import re
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from helpers import tiny
from helpers.saved_folders import checkpoint_folder
from helpers.snapshot import changed, kernels, process_state
from helpers.snippets import Ending, Invoke, Said
from selfspec.cli.app import main

# The models are too small to share among threads, which on busy cores wait for each other.
torch.set_num_threads(1)

# Equal examples in every run, and no deadlines that a busy machine would miss.
settings.load_profile("ci")

MANY_CASES = 4
"""Of a test. A plain run, and a tier of these, has a quarter of those of a test with more."""
TIERS_OF_SOME_CASES = {"statistical", "tools", "accelerator"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", action="store_true", help="run every test on selfspec's CPU kernels")
    parser.addoption(
        "--share", type=int, default=1, metavar="N", help="one in N cases of `contract` and `statistical`, by seed"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported out of every later collection of garbage: it is most of what there is."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests that ask for an `architecture` each of them; in a plain run one test has half, another the rest."""
    named = [str(marker.args[0]) for marker in metafunc.definition.iter_markers("parametrize")]
    if "architecture" in metafunc.fixturenames and not any("architecture" in names for names in named):
        turn = zlib.crc32(metafunc.function.__name__.encode())
        cases = [
            pytest.param(name, marks=() if (turn + place) % 2 else pytest.mark.contract)
            for place, name in enumerate(sorted(tiny.BUILDERS))
        ]
        metafunc.parametrize("architecture", cases)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave a tier every fourth case of a test that has many, mixed by their names; `contract` has the others.

    Of the table of invariants, which says itself what is in a plain run, every draft is in a third of the tests.
    """
    tiers = set(re.findall(r"not (\w+)", " ".join(config.getini("addopts")))) - TIERS_OF_SOME_CASES
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not tiers & {mark.name for mark in item.iter_markers()}:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for turn, found in enumerate(cases.values()):
        others: list[pytest.Item] = []
        if found[0].path.parent.name == "invariants":
            others = [each for place, each in enumerate(found) if (place + turn) % 3] if len(found) > 1 else []
        elif len(found) > MANY_CASES:
            others = sorted(found, key=lambda item: zlib.crc32(item.nodeid.encode()))[ceil(len(found) / 4) :]
        for item in others:
            item.add_marker(pytest.mark.contract)
    _leave_a_share(config, items)


def _leave_a_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave one in `--share` cases of the longest tiers, drawn by the seed of the random order; all of the rest."""
    share, seed = config.getoption("share"), config.getoption("randomly_seed", 0)
    left = {item for item in items if zlib.crc32(f"{seed} {item.nodeid}".encode()) % share}
    left = {item for item in left if any(map(item.get_closest_marker, ("contract", "statistical")))}
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Draw what several tests share from a seed of its own, whichever of them asks for it first."""
    if fixturedef.scope == "function":
        return (yield)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return (yield)


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """Fails a test that other tests of its process would depend on."""
    before = process_state()
    yield
    left = changed(before, process_state())
    assert not left, f"left changed in the process: {', '.join(left)}"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _no_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests give the same on every machine: the CPU kernels run only where tests ask for them."""
    with kernels(None if request.config.getoption("--kernels") else "none"):
        yield


@pytest.fixture(autouse=True)
def _kernels_where_asked_for(request: pytest.FixtureRequest) -> Iterator[None]:
    with kernels(None) if request.node.get_closest_marker("kernels") else nullcontext():
        yield


@pytest.fixture
def verbosity_as_before() -> Iterator[None]:
    """Lets a test silence `transformers`, as programs do for their whole process."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield
    logging.set_verbosity(verbosity)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture
def llama() -> PreTrainedModel:
    return tiny.llama()


@pytest.fixture(scope="session")
def stories() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    return model


@pytest.fixture(scope="session")
def exact_stories() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float64)
    return model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint_folder())
    return found


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Invoke]:
    """The command line. What commands set for their whole process is undone."""
    verbosity = logging.get_verbosity()

    def run(*words: str, stdin: bytes = b"") -> Ending:
        # Nothing that was printed before is the command's.
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ending:
            main(words)
        printed = capsys.readouterr()
        assert isinstance(ending.value.code, int)
        return Ending(ending.value.code, printed.out, printed.err)

    yield run
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


@pytest.fixture
def said(invoke: Invoke) -> Said:
    """The JSON of a command, which is what its schema declares."""

    def run(*words: str, stdin: bytes = b"") -> dict[str, Any]:
        from helpers.json_schema import OUTPUTS

        ending = invoke(*words, "--output", "json", stdin=stdin)
        assert ending.status == 0, ending.stderr
        # What is no command is a checkpoint, which is inspected.
        command = " ".join(words[: 2 if words[0] == "train" else 1])
        OUTPUTS.get(command, OUTPUTS["inspect"]).model_validate_json(ending.stdout, strict=True)
        found: dict[str, Any] = json.loads(ending.stdout)
        return found

    return run

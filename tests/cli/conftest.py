"""Running the command line inside the test process, and the embedded checkpoint as its model."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from helpers.running import Ending, Invoke
from helpers.stories import checkpoint_folder
from selfspec.cli.app import main


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
def folder() -> str:
    """The embedded checkpoint."""
    return str(checkpoint_folder())


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the embedded checkpoint, to be damaged."""
    copy = tmp_path / "model"
    shutil.copytree(checkpoint_folder(), copy)
    return copy


@pytest.fixture(scope="session")
def stories() -> PreTrainedModel:
    """The embedded model."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    return model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """Its tokenizer."""
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint_folder())
    return found

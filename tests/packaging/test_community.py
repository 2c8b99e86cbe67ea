"""What stands around the code says the same as the code: README's first lines, versions, Pythons, forms for reports."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml
from memory_predictions import MACHINES, table
from packaging.requirements import Requirement
from packaging.version import Version
from transformers.utils import logging

import selfspec
from helpers.snippets import ROOT, snippets

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(file: str) -> Any:
    return yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = read("CITATION.cff")
    assert (citation["version"], citation["license"]) == (selfspec.__version__, PROJECT["license"])


def test_the_workflow_runs_every_python_and_the_oldest_versions() -> None:
    quick = read(".github/workflows/tests.yml")["jobs"]["quick"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: 3."
    supported = [f"3.{each.removeprefix(prefix)}" for each in PROJECT["classifiers"] if each.startswith(prefix)]
    assert quick["python"] == supported
    wanted = " ".join(f"{name}=={version}.*" for name, version in _oldest(["torch", "transformers"]))
    assert wanted in [each["versions"] for each in quick["include"]]


def _oldest(names: list[str]) -> list[tuple[str, str]]:
    ranges = {found.name: found.specifier for found in map(Requirement, PROJECT["dependencies"])}
    lowest = {name: min(Version(each.version) for each in ranges[name]) for name in names}
    return [(name, f"{version.major}.{version.minor}") for name, version in lowest.items()]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_page_of_memory_has_the_present_predictions(machine: str) -> None:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    assert machine in " ".join(page.split())
    assert table(MACHINES[machine]) in page


@pytest.mark.parametrize(("template", "asked"), [("bug", "selfspec doctor"), ("idea", "")])
def test_an_issue_template_has_what_a_form_needs(template: str, asked: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{template}.yml")
    assert form["name"]
    assert form["description"]
    labels = [field["attributes"]["label"] for field in form["body"]]
    assert all(labels)
    assert any(asked in label for label in labels)


def test_the_first_lines_print_what_readme_says() -> None:
    printed = io.StringIO()
    bars = logging.is_progress_bar_enabled()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(snippets("README.md", "python")[0], "README.md", "exec"), {})
    finally:
        if bars:
            logging.enable_progress_bar()
    assert printed.getvalue() == snippets("README.md", "text")[0]


def test_the_demo_is_reached_by_its_name_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, selfspec; assert 'selfspec.measure.embedded' not in sys.modules; "
        "assert (selfspec.demo.checkpoint_folder() / 'config.json').is_file(); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

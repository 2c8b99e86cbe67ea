"""What stands around the code says the same as the code: versions, Pythons, and what bug reports ask for."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import selfspec

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize("template", ["bug", "idea"])
def test_an_issue_template_has_what_a_form_needs(template: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{template}.yml")
    assert form["name"]
    assert form["description"]
    assert all(field["attributes"]["label"] for field in form["body"])


def test_bug_reports_ask_for_the_doctor() -> None:
    labels = {field["id"]: field["attributes"]["label"] for field in read(".github/ISSUE_TEMPLATE/bug.yml")["body"]}
    assert "selfspec doctor" in labels["doctor"]

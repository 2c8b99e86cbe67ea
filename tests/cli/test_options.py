"""What `--draft` means, and how groups of options become options."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass, field
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from selfspec.cli.options import grouped, read_draft
from selfspec.draft import Drafter, EarlyExit, LayerSkip
from selfspec.draft.registry import declarations
from selfspec.errors import DraftConfigError, SelfSpecError
from selfspec.measure.embedded import DEMO, checkpoint_folder, model_place


@pytest.mark.parametrize(
    ("text", "drafter"),
    [
        ("none", None),
        ("exit:4", EarlyExit(layer=4)),
        (" exit:12 ", EarlyExit(layer=12)),
        ("skip:attn=3,5;mlp=4;layers=2", LayerSkip(attention=[3, 5], mlp=[4], layers=[2])),
        ("skip:layers=3-5", LayerSkip(layers=[3, 4, 5])),
        ("skip: mlp=1, 7-8 ; attn=0", LayerSkip(attention=[0], mlp=[1, 7, 8])),
    ],
)
def test_grammar(text: str, drafter: Drafter | None) -> None:
    assert read_draft(text) == drafter


@pytest.mark.parametrize(
    "text",
    [
        *("", "None", "automatic"),
        *("exit", "exit:", "exit:-1", "exit:4.0", "exit:4,5", "exit:٣"),
        *("skip", "skip:", "skip:3", "skip:heads=1", "skip:attn", "skip:attn=", "skip:attn=1,", "skip:attn=5-3"),
        *("skip:attn=1--3", "skip:attn=0-99999999999", "skip:attn=1;attn=2", "skip:attn=1;"),
    ],
)
def test_anything_else_is_refused_with_how_to_write_it(text: str) -> None:
    kind = text.partition(":")[0]
    listed = "exit:E, head:FOLDER@E, skip, skip-file, experts:N, int8[:FILE], int4[:FILE], del:E-F"
    how = {"exit": "write exit:E", "skip": "write skip:PART"}.get(kind, listed)
    with pytest.raises(DraftConfigError, match=r"^--draft .* is not understood; ") as refused:
        read_draft(text)
    assert how in str(refused.value)
    assert len(str(refused.value).split()) < 40


@pytest.mark.parametrize("draft", [each.example for each in declarations()])
def test_the_drafts_that_are_listed_are_of_the_grammar(draft: str) -> None:
    message = ""
    try:
        read_draft(draft)
    except SelfSpecError as error:
        message = str(error)
    # The files of the examples are not there.
    assert "not understood" not in message
    assert not message.startswith("--")


def test_the_embedded_model_has_a_name() -> None:
    assert model_place(DEMO) == str(checkpoint_folder())
    assert model_place("./demo") == "./demo"


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Numbers to add."""

    first: Annotated[int, typer.Option(help="Comes first.")]
    more: Annotated[list[int], typer.Option("--another")] = field(default_factory=lambda: [3, 4])


def test_a_dataclass_becomes_a_panel_of_options() -> None:
    seen = []

    def add(
        name: Annotated[str, typer.Argument()],
        numbers: Numbers,
        twice: Annotated[bool, typer.Option("--twice")] = False,
    ) -> None:
        """Add."""
        seen.append((name, asdict(numbers), twice))

    app = typer.Typer()
    app.command()(grouped(add))
    assert CliRunner().invoke(app, ["a", "--first", "1", "--twice"]).exit_code == 0
    assert CliRunner().invoke(app, ["b", "--first", "1", "--another", "5"]).exit_code == 0
    assert seen == [("a", {"first": 1, "more": [3, 4]}, True), ("b", {"first": 1, "more": [5]}, False)]
    assert "Numbers to add" in CliRunner().invoke(app, ["--help"]).stdout
    assert CliRunner().invoke(app, ["c"]).exit_code == 2
    assert inspect.getdoc(grouped(add)) == "Add."

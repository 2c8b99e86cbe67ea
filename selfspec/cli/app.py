"""The command line's entry: `selfspec COMMAND`, or `selfspec MODEL`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from selfspec.cli.ablate import ablate
from selfspec.cli.bench import bench
from selfspec.cli.calibrate import calibrate
from selfspec.cli.chat import chat
from selfspec.cli.demo import demo
from selfspec.cli.doctor import doctor
from selfspec.cli.drafts import drafts
from selfspec.cli.export import export, pack
from selfspec.cli.generate import EPILOG, generate
from selfspec.cli.inspect import inspect
from selfspec.cli.options import grouped
from selfspec.cli.outcome import INTERRUPTED, asks_for_json, report, status_of
from selfspec.cli.plot import plot
from selfspec.cli.search import search
from selfspec.cli.serve import serve
from selfspec.cli.train import train
from selfspec.cli.verify import verify
from selfspec.errors import UnsupportedOptionError
from selfspec.version import __version__

app = typer.Typer(
    name="selfspec",
    help="Self-speculative decoding: one language model drafts for itself; the output is exactly its own.\n\n"
    "selfspec MODEL says what a checkpoint can do here, and which command is next.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, list[Callable[..., Any]]] = {
    "Decode": [generate, chat, serve, demo, inspect, doctor],
    "Measure": [calibrate, verify, bench],
    "Find drafts": [drafts, search, ablate, plot],
    "Hand over": [pack, export],
}
for title, commands in _COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=title, epilog=EPILOG if command is generate else None)(grouped(command))
app.add_typer(train, rich_help_panel="Find drafts")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def _names_model(word: str, commands: Sequence[str]) -> bool:
    """Whether the first word is a checkpoint and no command, not even one that is misspelt."""
    if word.startswith("-") or word in commands:
        return False
    return "/" in word or Path(word).exists() or not get_close_matches(word, commands)


def _check_once(command: Any, words: Sequence[str]) -> None:
    """Refuse an option that takes one value and is given twice: the last one would silently win."""
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    for option in command.params:
        given = [word for word in words if word.partition("=")[0] in option.opts and word.startswith("--")]
        if len(given) > 1 and not (option.multiple or option.is_flag or option.nargs == -1):
            raise UnsupportedOptionError(f"{option.opts[0]} is given {len(given)} times and takes one value")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its status: 0, 1 for a run that failed, 2 for bad input, 130 when interrupted.

    `arguments` are the words after `selfspec`; None: those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = asks_for_json(words)
    command: Any = typer.main.get_command(app)
    if words and _names_model(words[0], list(command.commands)):
        words.insert(0, inspect.__name__)
    try:
        _check_once(command, words)
        status = command.main(words, prog_name="selfspec", standalone_mode=False) or 0
    except Exception as error:
        report(error, as_json)
        sys.exit(status_of(error))
    # typer turns an interrupt that no command caught into this status.
    if status == INTERRUPTED:
        report(KeyboardInterrupt(), as_json)
    sys.exit(status)


if __name__ == "__main__":
    main()

"""The work of `selfspec train`, apart from its options: train with a progress bar, then show what came of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from selfspec.cli.options import OutputFormat
from selfspec.cli.outcome import print_json
from selfspec.cli.terminal import progress_bar
from selfspec.environment import versions
from selfspec.model.checkpoint import load_tokenizer, read_config
from selfspec.model.summary import describe_config
from selfspec.tools.train.average import Average, average
from selfspec.tools.train.corpus import packed, read_documents
from selfspec.tools.train.course import Course, Observer
from selfspec.tools.train.exit_job import ExitPlan, train_exit
from selfspec.tools.train.jobs import Source, train_layerskip
from selfspec.tools.train.recipe import Recipe
from selfspec.tools.train.vocabulary import check_vocabulary_file, most_frequent, write_vocabulary


def run_layerskip(
    source: Source, course: Course, recipe: Recipe | None, to: Path, threads: int | None, output: OutputFormat
) -> None:
    """Train by the LayerSkip recipe, or plainly without one, and print the figures before and after."""
    _prepare(threads)
    with shown_progress() as observe:
        report = train_layerskip(source, course, recipe, to, observe)
    show_report(report, to, output)


def run_exit(
    source: Source, course: Course, plan: ExitPlan, to: Path, threads: int | None, output: OutputFormat
) -> None:
    """Train exit heads, and print the figures before and after."""
    _prepare(threads)
    with shown_progress() as observe:
        report = train_exit(source, course, plan, to, observe)
    show_report(report, to, output)


def run_vocabulary(model: str, text: tuple[Path, ...], size: int, to: Path, output: OutputFormat) -> None:
    """Count tokens, write the most frequent ones, and print how much of the text they are."""
    _prepare(None)
    check_vocabulary_file(to)
    rows = describe_config(read_config(model)).vocabulary
    documents = [document for file in text for document in read_documents(file)]
    counted = most_frequent(packed(documents, load_tokenizer(model), 1), size, rows)
    write_vocabulary(counted, to)
    if output == "json":
        print_json({"file": str(to), "size": size, "coverage": counted.coverage, "versions": versions()})
    else:
        print(f"{to}: {size} of {rows} tokens, {counted.coverage:.2%} of the text")


def run_average(wanted: Average, to: Path, threads: int | None, output: OutputFormat) -> None:
    """Average two checkpoints, and print the figures before and after."""
    _prepare(threads)
    with progress_bar("averaging") as bar:
        bar.add_task("reading, averaging, measuring", total=None)
        report = average(wanted, to)
    show_report(report, to, output)


@contextmanager
def shown_progress() -> Iterator[Observer]:
    """Where training tells of its steps: a bar with the time left, or a line for each figure where there is no bar."""
    with progress_bar("training") as bar:
        task = bar.add_task("", total=None)

        def observe(step: int, steps: int, figures: Mapping[str, float]) -> None:
            said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name not in ("epoch",))
            if bar.disable and said:
                print(f"step {step}/{steps}: {said}", file=sys.stderr, flush=True)
            bar.update(task, total=steps, completed=step)
            if "loss" in figures:
                bar.update(task, description=f"loss {figures['loss']:.3f}")

        yield observe


def show_report(report: Mapping[str, Any], to: Path, output: OutputFormat) -> None:
    """Print what a training did to the figures on the held-out text."""
    if output == "json":
        print_json({**report, "folder": str(to), "versions": versions()})
        return
    table = Table(title=f"On held-out text; the result is in {to}", title_justify="left")
    for column in ("figure", "before", "after"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, after in report["after"].items():
        before = report["before"].get(name)
        table.add_row(name, "" if before is None else f"{before:.3f}", f"{after:.3f}")
    Console(highlight=False, markup=False).print(table)


def _prepare(threads: int | None) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    # Numbers too small to matter are many times slower than others on some processors.
    torch.set_flush_denormal(True)

"""The work of `selfspec verify`, apart from its options: load, verify, print."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import typer
from torch import Tensor
from transformers.utils import logging

from selfspec.cli.options import OutputFormat
from selfspec.cli.outcome import FAILED, print_json
from selfspec.cli.terminal import StepBar, progress_bar
from selfspec.cli.verify_tables import print_report
from selfspec.control.auto import named_draft
from selfspec.control.plan import Plan
from selfspec.draft import Drafter
from selfspec.environment import versions
from selfspec.errors import DraftConfigError
from selfspec.model.checkpoint import Checkpoint, DtypeName, find_device, load_checkpoint, read_config
from selfspec.model.registry import find_adapter
from selfspec.runtime.kernels.packed import pack
from selfspec.tools.verify import PROMPTS, Report, Settings, default_drafts, verify


@dataclass(frozen=True)
class Job:
    """What the command line asked for, read and checked as far as that needs no model.

    Attributes:
        model: folder or hub name.
        drafters: what drafts; None: a spread chosen from the depth.
        prompts: texts to continue; None: the built-in ones.
        settings: how much is verified, and how strictly.
        dtype: what to compute in.
        device: where.
        threads: CPU threads; None: torch's own choice.
        packed: whether weights are laid out for oneDNN.
        output: what stdout gets.
    """

    model: str
    drafters: Sequence[Drafter | Plan | str] | None
    prompts: Sequence[str] | None
    settings: Settings
    dtype: DtypeName
    device: str
    threads: int | None
    packed: bool
    output: OutputFormat


def run(job: Job) -> None:
    """Verify and print.

    Raises:
        SelfSpecError: the job cannot be done; nothing was printed.
        typer.Exit: the output is not exact; everything was printed.
    """
    logging.set_verbosity_error()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    find_device(job.device)
    # Weights may take minutes to load: what the configuration can tell is told before.
    depth = read_config(job.model).get_text_config(decoder=True).num_hidden_layers
    given = default_drafts(depth) if job.drafters is None else job.drafters
    for drafter in given:
        if isinstance(drafter, Drafter):
            drafter.check(depth)

    checkpoint = load_checkpoint(job.model, job.dtype, job.device)
    if job.packed:
        pack(checkpoint.model)
    drafters = _drafters(checkpoint, given)
    texts = job.prompts or PROMPTS
    started = time.perf_counter()
    report = _verified(checkpoint, [checkpoint.encode(text) for text in texts], drafters, job.settings)
    seconds = time.perf_counter() - started
    if job.output == "json":
        print_json(_result(job, texts, report, seconds))
    else:
        print_report(job.model, checkpoint.tokenizer, report, seconds)
    if not report.verdict.exact:
        raise typer.Exit(FAILED)


def _drafters(checkpoint: Checkpoint, given: Sequence[Drafter | Plan | str]) -> list[Drafter]:
    """The drafts, and in place of a profile those that it chooses.

    Raises:
        ProfileError: there is no profile that fits.
    """
    found: list[Drafter] = []
    for each in given:
        draft = named_draft(checkpoint.model, each) if isinstance(each, str) else each
        choices = [draft.choose(greedy).draft for greedy in (True, False)] if isinstance(draft, Plan) else [draft]
        if isinstance(draft, Plan):
            draft.check_model(checkpoint.model, find_adapter(checkpoint.model))
        # Greedy decoding and sampling may have the same draft.
        found += [choice for choice in dict.fromkeys(choices) if choice is not None]
    if not found:
        raise DraftConfigError("the profile chose plain decoding, which is always verified; name a draft")
    return found


def _verified(
    checkpoint: Checkpoint, prompts: Sequence[Tensor], drafters: Sequence[Drafter], settings: Settings
) -> Report:
    with progress_bar("verifying") as progress:
        return verify(checkpoint.model, prompts, drafters, settings, watch=StepBar(progress))


def _result(job: Job, texts: Sequence[str], report: Report, seconds: float) -> dict[str, Any]:
    found = report.to_dict()
    return {
        **found,
        "checkpoint": job.model,
        "settings": {**found["settings"], "prompts": list(texts), "threads": torch.get_num_threads()},
        "seconds": seconds,
        "versions": versions(),
    }

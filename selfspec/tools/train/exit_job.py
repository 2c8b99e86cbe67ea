"""Whole trainings of exit heads: from a checkpoint and text, or prompts, to a side-car and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from selfspec.errors import TrainingError
from selfspec.model.checkpoint import Checkpoint
from selfspec.model.fingerprint import fingerprint
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import Split, packed, read_documents, shuffled, split
from selfspec.tools.train.course import Course, Observer
from selfspec.tools.train.exit_heads import ExitHeads
from selfspec.tools.train.exit_lesson import ExitLesson, ExitLoss
from selfspec.tools.train.folder import RunFolder
from selfspec.tools.train.jobs import Source, described, load_base, processes_on, read_split, run_lesson
from selfspec.tools.train.own_text import kept_own_text
from selfspec.tools.train.recipe import Recipe
from selfspec.tools.train.requirements import require_packages
from selfspec.tools.train.side_car import write_side_car
from selfspec.tools.train.vocabulary import most_frequent


@dataclass(frozen=True)
class ExitPlan:
    """What kind of exit heads are trained.

    Attributes:
        exits: exit layers; empty: a quarter and a third of the depth.
        rank: width of each head's MLP; None: twice the model's.
        loss: what heads minimise.
        vocabulary: tokens that can be drafted, the most frequent ones of the text; None: all.
        own_texts: texts that the model itself writes to learn from, from beginnings of the given text; 0: learn from
            the given text.
        beginning: tokens of each beginning.
    """

    exits: tuple[int, ...] = ()
    rank: int | None = None
    loss: ExitLoss = "both"
    vocabulary: int | None = None
    own_texts: int = 0
    beginning: int = 16


def train_exit(source: Source, course: Course, plan: ExitPlan, to: Path, observe: Observer) -> dict[str, Any]:
    """Train exit heads for a base that stays as it is.

    Args:
        source: base and text.
        course: how long and how fast.
        plan: what kind of heads.
        to: the folder that becomes the side-car. The same call goes on with an interrupted training there.
        observe: told of every step.

    Returns:
        The report, also in `training.json`: agreement, alpha and predicted speed-up of each exit before and after.

    Raises:
        CheckpointError, UnsupportedModelError: the base cannot be loaded.
        CorpusError: a text cannot be read or is too short.
        TrainingError: the settings do not fit, the folder is taken, or the loss became NaN.
        StorageError: the folder cannot be written to, or the disk is full; what was finished is kept.
        KeyboardInterrupt: interrupted; repeat the call to go on.
    """
    require_packages(course)
    processes = processes_on(source.device)
    folder = RunFolder(to)
    if processes.is_main_process:
        folder.check()
    base = load_base(source)
    model = base.loaded.model.float()
    adapter = find_adapter(model)
    depth = len(adapter.decoder_layers(model))
    exits = plan.exits or tuple(sorted({max(1, depth // 4), max(1, depth // 3)}))
    Recipe(exits=exits).exits_of(depth)
    hidden: int = model.config.get_text_config(decoder=True).hidden_size
    mark = fingerprint(model)

    settings = {"source": described(source), "base": mark, "course": asdict(course), "plan": asdict(plan)}
    with processes.main_process_first():
        text = _text(source, course, plan, base.loaded, processes.num_processes, folder, settings)
    tokens = None
    if plan.vocabulary is not None:
        rows = model.get_output_embeddings().weight.shape[0]
        tokens = torch.tensor(most_frequent(text.train, plan.vocabulary, rows).tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(course.seed)
        heads = ExitHeads(hidden, plan.rank or 2 * hidden, exits).to(model.device)
    lesson = ExitLesson(model, adapter, heads, plan.loss, tokens, text.held_out)

    def rounded() -> None:
        heads.to(base.dtype).float()

    def save(new: Path) -> None:
        with torch.no_grad():
            figures = lesson.evaluate()
        best = max(exits, key=lambda exit_layer: figures[f"speedup_{exit_layer}"])
        write_side_car(heads, tokens, best, mark, base.dtype, figures, new)

    return run_lesson(lesson, course, text, processes, folder, settings, rounded, save, observe)


def _text(
    source: Source,
    course: Course,
    plan: ExitPlan,
    base: Checkpoint,
    processes: int,
    folder: RunFolder,
    settings: Mapping[str, Any],
) -> Split:
    if not plan.own_texts:
        return read_split(source, course, base.tokenizer, processes)
    if not 1 <= plan.beginning < course.length:
        raise TrainingError(f"beginnings of {plan.beginning} tokens leave nothing to write in {course.length}")
    documents = [document for file in source.text for document in read_documents(file)]
    beginnings = packed(shuffled(documents, course.seed), base.tokenizer, plan.beginning, plan.own_texts)
    # What the model writes is kept there.
    folder.begin(settings)
    blocks = kept_own_text(base.model, beginnings, course.length, course.seed, folder.path)
    return split(blocks, min(source.held_out_blocks, max(1, len(blocks) // 10)))

"""The work of `selfspec generate`, apart from its options: load, generate, show."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from selfspec.accept import find_rule
from selfspec.api import SelfSpeculative, wrap
from selfspec.cli.display import Display, DraftDisplay, PlainDisplay, SilentDisplay
from selfspec.cli.ending import FailedRunError
from selfspec.cli.json_output import print_json
from selfspec.cli.options import OutputFormat
from selfspec.cli.sampling_option import SamplingChoice
from selfspec.cli.shaping_option import ShapingChoice
from selfspec.cli.stats_table import print_stats
from selfspec.cli.text_stream import TextStream, decoded
from selfspec.control.plan import Plan
from selfspec.decode.generation import Generation
from selfspec.decode.output import RowRound
from selfspec.draft import Drafter
from selfspec.environment import versions
from selfspec.errors import NonFiniteLogitsError
from selfspec.model.checkpoint import Checkpoint, DtypeName, find_device, load_checkpoint, read_config
from selfspec.runtime.kernels.packed import pack


@dataclass(frozen=True)
class Job:
    """What the command line asked for, read and checked as far as that needs no model.

    Attributes:
        model: folder or hub name.
        prompt: text to continue.
        draft: what drafts, as it was written.
        drafter: what drafts, as `selfspec.wrap` takes it; None for plain decoding.
        draft_length: tokens drafted each round; None: as many as pay.
        max_new_tokens: the most tokens to generate.
        sampling: how to sample.
        shaping: penalties and stop strings.
        accept: name of the rule that judges drafts; None: the default one.
        dtype: what to compute in.
        device: where.
        threads: CPU threads; None: torch's own choice.
        packed: whether weights are laid out for oneDNN.
        show_drafts: whether drafts are shown, rejected tokens included.
        stats: whether counts are printed on stderr.
        output: what stdout gets.
    """

    model: str
    prompt: str
    draft: str
    drafter: Drafter | Plan | str | None
    draft_length: int | None
    max_new_tokens: int
    sampling: SamplingChoice
    shaping: ShapingChoice
    accept: str | None
    dtype: DtypeName
    device: str
    threads: int | None
    packed: bool
    show_drafts: bool
    stats: bool
    output: OutputFormat


def run(job: Job) -> None:
    """Generate and show.

    Raises:
        SelfSpecError: the job cannot be done; nothing was printed.
        FailedRunError: it was interrupted, or the target's logits were not finite; what was committed is printed.
    """
    logging.set_verbosity_error()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    find_device(job.device)
    rule = None if job.accept is None else find_rule(job.accept)
    # Weights may take minutes to load: what the configuration can tell is told before.
    config = read_config(job.model).get_text_config(decoder=True)
    if isinstance(job.drafter, Drafter):
        job.drafter.check(config.num_hidden_layers)

    checkpoint = load_checkpoint(job.model, job.dtype, job.device)
    if job.packed:
        pack(checkpoint.model)
    spec = wrap(checkpoint.model, draft=job.drafter, draft_length=job.draft_length, accept=rule)
    prompt = checkpoint.encode(job.prompt)
    generation = _begin(spec, checkpoint, prompt, job)
    rounds: list[RowRound] = []
    ended_by = _show_rounds(generation, _display(job, checkpoint, prompt), rounds)
    if not generation.lossless:
        print(f"note: --accept {job.accept} is not lossless; this text is not the model's own", file=sys.stderr)
    if job.stats:
        print_stats(generation.stats)
    result = _result(job, checkpoint, prompt, generation, rounds)
    if ended_by is not None:
        raise FailedRunError(ended_by, result)
    if job.output == "json":
        print_json(result)


def _begin(spec: SelfSpeculative, checkpoint: Checkpoint, prompt: Tensor, job: Job) -> Generation:
    spec.model.generation_config = _bare(spec.model)
    options = {**job.sampling.generation_options(), **job.shaping.generation_options()}
    return spec.stream(
        prompt,
        seed=job.sampling.seed,
        max_new_tokens=job.max_new_tokens,
        tokenizer=checkpoint.tokenizer,
        **options,
    )


def _bare(model: PreTrainedModel) -> GenerationConfig:
    """The checkpoint's generation settings without its sampling defaults: the command line alone says how to sample."""
    given = model.generation_config
    return GenerationConfig(
        bos_token_id=given.bos_token_id, eos_token_id=given.eos_token_id, pad_token_id=given.pad_token_id
    )


def _show_rounds(
    generation: Generation, display: Display, rounds: list[RowRound]
) -> KeyboardInterrupt | NonFiniteLogitsError | None:
    """Show each round as it comes and keep it in `rounds`; return what ended the run early, if anything."""
    ended_by: KeyboardInterrupt | NonFiniteLogitsError | None = None
    try:
        for committed in generation:
            rounds.append(committed.rows[0])
            display.show(committed.rows[0])
    except (KeyboardInterrupt, NonFiniteLogitsError) as error:
        ended_by = error
    generation.close()
    display.finish()
    return ended_by


def _display(job: Job, checkpoint: Checkpoint, prompt: Tensor) -> Display:
    if job.output == "json":
        return SilentDisplay()
    stream = TextStream(checkpoint.tokenizer, prompt[0].tolist())
    return DraftDisplay(stream, sys.stdout) if job.show_drafts else PlainDisplay(stream, sys.stdout)


def _result(
    job: Job, checkpoint: Checkpoint, prompt: Tensor, generation: Generation, rounds: list[RowRound]
) -> dict[str, Any]:
    prompt_ids: list[int] = prompt[0].tolist()
    new_ids = [token for committed in rounds for token in committed.tokens]
    sequence = prompt_ids + new_ids
    tokenizer = checkpoint.tokenizer
    result = {
        "prompt": job.prompt,
        "prompt_token_ids": prompt_ids,
        "token_ids": new_ids,
        "sequence": sequence,
        # Cut from the whole, because a text decoded by itself may lose the space it begins with.
        "text": decoded(tokenizer, sequence)[len(decoded(tokenizer, prompt_ids)) :],
        "settings": {
            "model": job.model,
            "draft": job.draft,
            "draft_length": job.draft_length if job.drafter else None,
            "max_new_tokens": job.max_new_tokens,
            "dtype": str(checkpoint.model.dtype).removeprefix("torch."),
            "device": str(checkpoint.model.device),
            "threads": torch.get_num_threads(),
            "sampling": job.sampling.to_dict(),
            "shaping": job.shaping.to_dict(),
            "accept": job.accept,
        },
        "lossless": generation.lossless,
        "stats": generation.stats.to_dict(),
        "versions": versions(),
    }
    if job.show_drafts:
        result["rounds"] = [
            {"draft": list(row.draft), "accepted": row.accepted, "tokens": list(row.tokens)} for row in rounds
        ]
    return result

"""`selfspec generate`: continue a prompt, printing the text as it is committed."""

from __future__ import annotations

import secrets
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli.loading import NOTHING, check_draft, draft_option, load_drafting
from selfspec.cli.options import Budget, DraftLength, ModelOptions, Nodes, Output
from selfspec.cli.outcome import FailedRunError, print_json
from selfspec.cli.terminal import by_depth, console, require_colours, two_digits
from selfspec.decode.text_stream import TextStream, continuation
from selfspec.errors import NonFiniteLogitsError, PromptError, UnsupportedOptionError

if TYPE_CHECKING:
    from selfspec.cli.display import DraftDisplay, PlainDisplay
    from selfspec.decode.generation import Generation
    from selfspec.decode.output import RowRound
    from selfspec.decode.stats import Stats

EPILOG = (
    "Drafts: `exit:4`, `int8`, `skip:attn=3,5`, `lookup`, `recycle` and others, or several, as in `lookup+int8`; "
    "`selfspec drafts` lists all of them."
)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling."""

    temperature: Annotated[float, typer.Option(min=0, help="0: greedy decoding; above 0: sampling.")] = 0.0
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the N likeliest tokens.")] = None
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Sample from the likeliest tokens that sum to probability X.")
    ] = None
    min_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Sample from tokens at least X times as likely as the likeliest.")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Repeat a sampled text on this machine; random by default.")] = None

    def __post_init__(self) -> None:
        if self.temperature == 0:
            for name in ("top_k", "top_p", "min_p"):
                if getattr(self, name) is not None:
                    raise UnsupportedOptionError(
                        f"--{name.replace('_', '-')} has no effect on greedy decoding; add --temperature 1 to sample, "
                        "or drop it"
                    )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UnsupportedOptionError(f"--seed must be from 0 to 2**63 - 1, got {self.seed}")

    def seeded(self) -> Sampling:
        """With a fresh seed where one is needed and none is given, so that every sampled text can be repeated."""
        if self.temperature == 0:
            return replace(self, seed=None)
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    def generation_options(self) -> dict[str, Any]:
        """Keywords of `generate`. Every filter is named, because `transformers` has a top-k of 50 by default."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "min_p": self.min_p,
        }


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """Penalties and stop strings."""

    repetition_penalty: Annotated[float, typer.Option(help="Above 1: make tokens of the text so far less likely.")] = (
        1.0
    )
    no_repeat_ngram_size: Annotated[int, typer.Option(min=0, help="Let no run of N tokens come twice; 0: let it.")] = 0
    stop_strings: Annotated[
        list[str] | None, typer.Option("--stop-string", help="Stop after this text; may be repeated.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is shown."""

    show_drafts: Annotated[
        bool,
        typer.Option("--show-drafts", help="Colour accepted, own and rejected tokens; with json, list the rounds."),
    ] = False
    stats: Annotated[bool, typer.Option("--stats", help="Print counts and times on stderr.")] = False
    output: Output = "text"


def generate(
    model: ModelOptions,
    sampling: Sampling,
    shaping: Shaping,
    shown: Shown,
    budget: Budget,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the text to continue, less its last line break.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFT",
            help="What drafts: see Drafts below. Default: `none`; with --memory, look-ups and rounded copies of "
            "what is streamed.",
        ),
    ] = None,
    draft_length: DraftLength = None,
    nodes: Nodes = None,
    accept: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="`token`, `block` or `coupled`; `relaxed-typical` and `relaxed-top-k` are faster and not lossless. "
            "Default: `block` where tokens are sampled, else `token`.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Generate at most N tokens.")] = 128,
) -> None:
    """Continue a prompt: --prompt, --prompt-file or standard input.

    Prints the new text alone. How to sample is what the options say; the sampling defaults of the checkpoint are not
    used.
    """
    option = draft_option(draft, NOTHING)
    text = _read_prompt(prompt, prompt_file)
    if shown.show_drafts and shown.output == "text":
        require_colours(sys.stdout)

    import torch

    from selfspec.accept import find_rule
    from selfspec.cli.display import DraftDisplay, PlainDisplay
    from selfspec.control.draft_policy import DraftPolicy
    from selfspec.control.named import control_of
    from selfspec.decode.option_values import Scope, check_values
    from selfspec.draft.registry import draft_name
    from selfspec.environment import versions
    from selfspec.model.checkpoint import Checkpoint

    sampling = sampling.seeded()
    options = {**sampling.generation_options(), **asdict(shaping), "max_new_tokens": max_new_tokens}
    rule = None if accept is None else find_rule(accept)
    control = None if draft_length is None and nodes is None else control_of(draft_length, nodes)
    check_draft(model, option, budget, nodes)
    check_values(options.get, Scope(vocabulary=0, rows=1))

    loaded = load_drafting(model, option, budget)
    spec, checkpoint = loaded.spec, Checkpoint(loaded.spec.model, loaded.tokenizer)
    own = None if isinstance(spec.draft, DraftPolicy) else spec.draft
    named = draft_name(own) if draft is None else draft.strip()
    ids = checkpoint.encode(text)
    mask = torch.ones_like(ids)
    generation = spec.stream(
        ids,
        mask,
        seed=sampling.seed,
        draft_length=control,
        accept=rule,
        tokenizer=checkpoint.tokenizer,
        **options,
    )
    prompt_ids: list[int] = ids[0].tolist()
    display = None
    if shown.output == "text":
        stream = TextStream(checkpoint.tokenizer, prompt_ids)
        display = DraftDisplay(stream, sys.stdout) if shown.show_drafts else PlainDisplay(stream, sys.stdout)
    rounds: list[RowRound] = []
    ended_by = _show_rounds(generation, display, rounds)
    new_ids = [token for row in rounds for token in row.tokens]
    if not generation.lossless:
        why = f"--kv-cache {budget.kv_cache}" if rule is None or rule.lossless else f"--accept {accept}"
        print(f"note: {why} is not lossless; this text is not the model's own", file=sys.stderr)
    if shown.stats:
        _print_stats(generation.stats)
    result = {
        "prompt": text,
        "prompt_token_ids": prompt_ids,
        "token_ids": new_ids,
        "sequence": prompt_ids + new_ids,
        "text": continuation(checkpoint.tokenizer, prompt_ids, new_ids),
        "settings": {
            "model": model.model,
            "draft": named,
            "draft_length": None if spec.draft is None else draft_length,
            "nodes": nodes,
            "max_new_tokens": max_new_tokens,
            "dtype": str(checkpoint.model.dtype).removeprefix("torch."),
            "device": str(checkpoint.model.device),
            "threads": torch.get_num_threads(),
            "memory": budget.memory,
            "context": None if spec.limits is None else spec.limits.context,
            "kv_cache": budget.kv_cache,
            "sampling": asdict(sampling),
            "shaping": asdict(shaping),
            "accept": accept,
        },
        "lossless": generation.lossless,
        "stats": generation.stats.to_dict(),
        "versions": versions(),
    }
    if shown.show_drafts:
        result["rounds"] = [
            {
                "draft": list(row.draft),
                "accepted": row.accepted,
                "rejected": list(row.rejected),
                "tokens": list(row.tokens),
            }
            for row in rounds
        ]
    if ended_by is not None:
        raise FailedRunError(ended_by, result)
    if shown.output == "json":
        print_json(result)


def _read_prompt(text: str | None, file: Path | None) -> str:
    """The prompt from its one source; standard input is read only where neither option is given.

    Files and pipes usually end with a line break that is not meant: one is dropped.
    """
    if text is not None and file is not None:
        raise PromptError("give the prompt once: --prompt or --prompt-file")
    if text is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise PromptError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it in")
    source = "--prompt" if text is not None else "standard input" if file is None else str(file)
    try:
        if text is not None:
            text.encode("utf-8")
            return text
        content = sys.stdin.buffer.read() if file is None else file.read_bytes()
        found = content.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeError as error:
        raise PromptError(f"{source} is not UTF-8 text ({error}); convert it first") from error
    except OSError as error:
        raise PromptError(f"{source} cannot be read: {error.strerror or error}") from error
    if not found:
        raise PromptError(f"{source} is empty; give some text, or --prompt '' to start from the bos token alone")
    return found


def _show_rounds(
    generation: Generation, display: PlainDisplay | DraftDisplay | None, rounds: list[RowRound]
) -> KeyboardInterrupt | NonFiniteLogitsError | None:
    """Show each round as it comes and keep it in `rounds`; return what ended the run early, if anything."""
    ended_by = None
    try:
        for committed in generation:
            rounds.append(committed.rows[0])
            if display is not None:
                display.show(committed.rows[0])
    except (KeyboardInterrupt, NonFiniteLogitsError) as error:
        ended_by = error
    generation.close()
    if display is not None:
        display.finish()
    return ended_by


def _print_stats(stats: Stats) -> None:
    from rich.table import Table

    from selfspec.kernels import native

    table = Table("count", "value", box=None, show_header=False, pad_edge=False)
    seconds = sum(stats.seconds.values())
    rate = f", {stats.new_tokens / seconds:.1f} tokens/s" if seconds else ""
    table.add_row("new tokens", f"{stats.new_tokens} in {seconds:.2f} s{rate}")
    table.add_row("rounds", str(stats.rounds))
    table.add_row("mean accepted length", two_digits(stats.mean_accepted_length))
    if stats.drafted:
        table.add_row(
            "acceptance rate", f"{two_digits(stats.acceptance_rate)} of {stats.judged} judged, {stats.drafted} drafted"
        )
        table.add_row("acceptance by depth", by_depth(stats.accepted_per_depth, stats.judged_per_depth))
    else:
        table.add_row("drafted", "nothing")
    table.add_row("seconds", ", ".join(f"{phase} {spent:.3f}" for phase, spent in stats.seconds.items()))
    table.add_row("KV cache", f"{stats.cache_bytes:,} bytes")
    if stats.substitute_bytes:
        table.add_row("substitutes", f"{stats.substitute_bytes:,} bytes")
    if stats.draft_bytes:
        table.add_row("drafter", f"{stats.draft_bytes:,} bytes")
    table.add_row("CPU kernels", "used" if native.are_loaded() else "not built: selfspec kernels")
    console(stderr=True).print(table)

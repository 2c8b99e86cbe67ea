"""`selfspec generate`: continue a prompt, printing the text as it is committed."""

from __future__ import annotations

import math
import secrets
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.style import Style
from rich.text import Text

from selfspec.cli.options import DraftingOptions, MemoryOptions, ModelOptions, Output, read_text
from selfspec.cli.outcome import FailedRunError
from selfspec.cli.terminal import console, facts_table
from selfspec.decode.text_stream import TextStream, continuation
from selfspec.errors import NonFiniteLogitsError, PromptError, UnsupportedModelError, UnsupportedOptionError

if TYPE_CHECKING:
    from selfspec.decode.generation import Generation
    from selfspec.decode.output import RowRound, Stats

EPILOG = (
    "Drafts: `exit:4`, `int8`, `skip:attn=3,5`, `lookup`, `recycle` and others, or several, as in `lookup+int8`; "
    "`selfspec drafts` lists all of them."
)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
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

    def seeded(self) -> SamplingOptions:
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

    repetition_penalty: Annotated[float, typer.Option(help="Above 1: make tokens that came before less likely.")] = 1.0
    no_repeat_ngram_size: Annotated[int, typer.Option(min=0, help="Let no run of N tokens come twice; 0: off.")] = 0
    stop_strings: Annotated[
        list[str] | None, typer.Option("--stop-string", help="Stop after this text; may be repeated.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class DraftingPlain(DraftingOptions):
    """Draft."""

    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFT",
            help="What drafts: see Drafts below. Default: `none`; with --memory, look-ups and rounded copies of "
            "what is streamed.",
        ),
    ] = None

    by_default: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is shown."""

    show_drafts: Annotated[
        bool,
        typer.Option("--show-drafts", help="Colour accepted, own and rejected tokens; with json, list the rounds."),
    ] = False
    stats: Annotated[bool, typer.Option("--stats", help="Print counts and times on stderr.")] = False
    output: Output = "text"


@dataclass(frozen=True)
class Generated:
    """`selfspec generate`.

    Attributes:
        token_ids: the new tokens.
        sequence: prompt and new tokens.
        text: the new tokens as text.
        settings: what was asked for, defaults included; `sampling.seed` repeats the run.
        stats: counts and times, as `selfspec.decode.output.Stats` names them; rates without data are null.
        rounds: with `--show-drafts`.
    """

    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    sequence: list[int]
    text: str
    settings: dict[str, Any]
    lossless: bool
    stats: dict[str, Any]
    rounds: list[RowRound] | None = None


def generate(
    model: ModelOptions,
    sampling: SamplingOptions,
    shaping: Shaping,
    shown: Shown,
    budget: MemoryOptions,
    drafting: DraftingPlain,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the text to continue, less its last line break.")
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="How drafts are judged: `selfspec drafts` lists the rules. Default: a lossless one, block by block "
            "where tokens are sampled, else token by token.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Generate at most N tokens.")] = 128,
    prediction: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File that the new text is expected to be, as before an edit; it drafts first."
        ),
    ] = None,
) -> Generated:
    """Continue a prompt: --prompt, --prompt-file or standard input.

    Prints the new text alone. How to sample is what the options say; the sampling defaults of the checkpoint are not
    used.
    """
    text = _read_prompt(prompt, prompt_file)
    predicted = None if prediction is None else read_text(f"--prediction {prediction}", prediction.read_bytes)
    if shown.show_drafts and shown.output == "text" and not console().is_terminal:
        raise UnsupportedOptionError(
            "--show-drafts marks tokens by colour, and standard output is no terminal; set FORCE_COLOR=1 to colour it "
            "nevertheless, or use --output json, which then lists every round"
        )

    import torch

    from selfspec.accept import find_rule
    from selfspec.control.profile import Profile
    from selfspec.decode.generation import has_own_generate
    from selfspec.decode.options import Scope, check_values
    from selfspec.draft.registry import draft_name
    from selfspec.measure.checkpoint import Checkpoint

    sampling = sampling.seeded()
    options = {**sampling.generation_options(), **asdict(shaping), "max_new_tokens": max_new_tokens}
    rule = None if accept is None else find_rule(accept)
    control = drafting.control()
    drafting.check(model, budget)
    check_values(options.get, Scope(vocabulary=0, readable=0, rows=1))

    loaded = drafting.load(model, budget, text=text, new_tokens=max_new_tokens)
    spec, checkpoint = loaded.spec, Checkpoint(loaded.spec.model, loaded.tokenizer)
    if has_own_generate(spec.model):
        raise UnsupportedModelError(
            f"{type(spec.model).__name__} does not read text; decode with selfspec.wrap(model, draft).generate(...)"
        )
    own = None if isinstance(spec.draft, Profile) else spec.draft
    ids = checkpoint.encode(text)
    generation = spec.stream(
        ids,
        torch.ones_like(ids),
        seed=sampling.seed,
        draft_length=control,
        accept=rule,
        tokenizer=checkpoint.tokenizer,
        prediction=predicted,
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
        print(f"note: --accept {accept} is not lossless; this text is not the model's own", file=sys.stderr)
    if shown.stats:
        _print_stats(generation.stats)
    settings = {
        "model": model.model,
        "draft": draft_name(own) if drafting.draft is None else drafting.draft.strip(),
        "draft_length": None if spec.draft is None else drafting.draft_length,
        "nodes": drafting.nodes,
        "max_new_tokens": max_new_tokens,
        "dtype": str(checkpoint.model.dtype).removeprefix("torch."),
        "device": str(checkpoint.model.device),
        "threads": torch.get_num_threads(),
        "memory": budget.memory,
        "context": None if spec.limits is None else spec.limits.context,
        "sampling": asdict(sampling),
        "shaping": asdict(shaping),
        "accept": accept,
        "prediction": None if prediction is None else str(prediction),
    }
    result = Generated(
        prompt=text,
        prompt_token_ids=prompt_ids,
        token_ids=new_ids,
        sequence=prompt_ids + new_ids,
        text=continuation(checkpoint.tokenizer, prompt_ids, new_ids),
        settings=settings,
        lossless=generation.lossless,
        stats=generation.stats.to_dict(),
        rounds=rounds if shown.show_drafts else None,
    )
    if ended_by is not None:
        raise FailedRunError(ended_by, result)
    return result


def _read_prompt(text: str | None, file: Path | None) -> str:
    """The prompt from its one source; standard input is read only where neither option is given.

    Files and pipes usually end with a line break that is not meant: one is dropped.
    """
    if text is not None and file is not None:
        raise PromptError("give the prompt once: --prompt or --prompt-file")
    if text is not None:
        return read_text("--prompt", text.encode)
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise PromptError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it in")
    source, read = ("standard input", sys.stdin.buffer.read) if file is None else (str(file), file.read_bytes)
    found = read_text(source, read).removesuffix("\n").removesuffix("\r")
    if not found:
        raise PromptError(f"{source} is empty; give some text, or --prompt '' to start from the bos token alone")
    return found


def _show_rounds(
    generation: Generation, display: PlainDisplay | None, rounds: list[RowRound]
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


# Strokes and weight besides colours, so that NO_COLOR leaves the three apart.
_ACCEPTED = Style(color="green")
_OWN = Style(bold=True)
_REJECTED = Style(color="red", dim=True, strike=True)


class PlainDisplay:
    """Writes the text as it is committed, and a line break at the end."""

    def __init__(self, stream: TextStream, out: IO[str]) -> None:
        self._stream = stream
        self._out = out

    def show(self, committed: RowRound) -> None:
        """Write a round's text."""
        self._write(self._stream.push(committed.tokens))

    def finish(self) -> None:
        """Write the rest and a line break."""
        self._write(self._stream.finish() + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class DraftDisplay(PlainDisplay):
    """Writes accepted draft tokens, the target's own tokens and rejected draft tokens, each in its own style."""

    def __init__(self, stream: TextStream, out: IO[str]) -> None:
        super().__init__(stream, out)
        self._console = Console(file=out, highlight=False, markup=False, soft_wrap=True)
        legend = (
            ("accepted draft", _ACCEPTED),
            " | ",
            ("the target's own", _OWN),
            " | ",
            ("rejected draft", _REJECTED),
            " (+n: tokens of other branches)",
        )
        self._console.print(Text.assemble(*legend), end="\n\n")

    def show(self, committed: RowRound) -> None:
        """Write a round: what was accepted, what was rejected, and then the target's own token."""
        self._write(self._stream.push(committed.tokens[: committed.accepted]), _ACCEPTED)
        rejected = self._stream.foresee(committed.rejected)
        others = len(committed.draft) - committed.accepted - len(committed.rejected)
        rejected += f"(+{others})" if others else ""
        # A line that was not committed must not break the text.
        self._write(rejected.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"), _REJECTED)
        self._write(self._stream.push(committed.tokens[committed.accepted :]), _OWN)

    def _write(self, text: str, style: Style = _OWN) -> None:
        self._console.print(Text(text, style), end="")
        self._console.file.flush()


def _print_stats(stats: Stats) -> None:
    from selfspec.kernels import native

    def two_digits(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.2f}"

    seconds = sum(stats.seconds.values())
    rate = f", {stats.new_tokens / seconds:.1f} tokens/s" if seconds else ""
    facts = {
        "new tokens": f"{stats.new_tokens} in {seconds:.2f} s{rate}",
        "rounds": str(stats.rounds),
        "mean accepted length": two_digits(stats.mean_accepted_length),
    }
    if stats.drafted:
        judged = f"{stats.judged} judged, {stats.drafted} drafted"
        facts["acceptance rate"] = f"{two_digits(stats.acceptance_rate)} of {judged}"
        depths = zip(stats.accepted_per_depth, stats.judged_per_depth, strict=True)
        facts["acceptance by depth"] = " ".join(two_digits(a / j if j else math.nan) for a, j in depths) or "-"
    else:
        facts["drafted"] = "nothing"
    facts["seconds"] = ", ".join(f"{phase} {spent:.3f}" for phase, spent in stats.seconds.items())
    held = {"KV cache": stats.cache_bytes, "substitutes": stats.substitute_bytes, "drafter": stats.draft_bytes}
    facts |= {name: f"{size:,} bytes" for name, size in held.items() if size or name == "KV cache"}
    facts["CPU kernels"] = native.absence() or "used"
    console(stderr=True).print(facts_table(facts))

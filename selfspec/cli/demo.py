"""`selfspec demo`: in twenty seconds, the embedded model with and without a draft, side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from selfspec.cli.options import Device, Draft, Output, Threads, prepare_process, read_draft
from selfspec.cli.outcome import FailedCheckError, FailedRunError
from selfspec.cli.terminal import progress_bar
from selfspec.errors import DraftConfigError, PromptError
from selfspec.measure.embedded import DEMO, model_place
from selfspec.measure.spare_cores import CoreWatch, SpareCores

if TYPE_CHECKING:
    import torch

    from selfspec.measure.checkpoint import Checkpoint
    from selfspec.tools.lab.arms import Cell, OwnArm
    from selfspec.tools.lab.generations import ArmRun
    from selfspec.tools.lab.runs import Row

# Look-ups alone, the exit that the embedded model was taught, and what needs no training.
_DRAFTS = ("lookup", "exit:4", "int8")
# Tokens of the texts that are shown, and a seed for which they are legible.
_SHOWN, _SEED = 40, 3
# Of what is sampled.
_TEMPERATURE = 0.8
# Seconds to compare, print and end the process when time is up.
_REST = 2.0
_INDENT, _COLUMNS = "    ", 80
_SPEED = "whole_speedup_over_generate"
_MEANING = """\
Times as fast: whole calls. The rest is greedy: time to the first tokens, tokens
a second after them, and tokens for each pass of the whole model.
exit:4 needs a model that was trained to exit early, as this one was. The other
drafts need no training: int8 is the model's own weights in 8 bits, lookup
copies from the text. planes is plain decoding over the same weights in 12 bits."""
_NEXT = """\
  selfspec MODEL             # what it can do here, which draft, what that gains
  selfspec generate MODEL --draft lookup+int8 --prompt "..." --stats
  selfspec pack MODEL --to FOLDER   # a bfloat16 model in 3/4 of its memory
  selfspec calibrate MODEL   # which draft is the fastest here? for --draft auto
  selfspec verify MODEL      # is the output the model's own here?"""


class TokensDifferError(FailedCheckError):
    """Self-speculation gave other tokens than plain decoding: a bug of selfspec."""


@dataclass(frozen=True)
class Demonstrated:
    """`selfspec demo`.

    Attributes:
        identical: whether every greedy text equals plain decoding's.
        arms: each way to decode, greedily and sampled, by columns of the lab's table (docs/columns.md).
        texts: `prompt` and `text`, the greedy one.
        cores: that this process may use, and how many of them were free.
        weight_bytes: of the weights as they are, and in planes, `packed_bytes`; None: no kernels multiply by these.
    """

    settings: dict[str, Any]
    headline: str
    identical: bool
    arms: list[dict[str, Any]]
    turns: int
    texts: list[dict[str, str]]
    seconds: float
    cores: SpareCores
    cpu_kernels: bool
    weight_bytes: int
    packed_bytes: int | None


def demo(
    draft: Draft = "lookup+int8",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Generate N tokens a text.")] = 48,
    seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="End within about X seconds, loading included, after one turn.")
    ] = 21.0,
    device: Device = "cpu",
    threads: Threads = None,
    output: Output = "text",
) -> Demonstrated:
    """Watch a small model write with and without a draft: how much faster it is here, and that the text is the same.

    Takes some twenty seconds. Exit status 1 if any greedy token is not `model.generate`'s. The embedded model has 10M
    parameters, writes Python, and was taught to exit early (see its MODEL_CARD.md).
    """
    started, watch = time.perf_counter(), CoreWatch()
    draft = draft.strip()
    with Console(stderr=True).status("Loading torch, transformers and a model"):
        if read_draft(draft) is None:
            raise DraftConfigError("the demo compares drafts with plain decoding; give --draft exit:4, say")

        import torch

        from selfspec.api import load
        from selfspec.kernels import native
        from selfspec.measure.checkpoint import load_checkpoint
        from selfspec.measure.embedded import PROMPTS
        from selfspec.tools.lab.arms import ArmSpec, Cell, OwnArm, Prompts, make_arm
        from selfspec.tools.lab.generations import ENDLESS, measure

        checkpoint = load_checkpoint(model_place(DEMO), "float32", device)
    spare = watch.read()
    prepare_process(spare.threads(torch.get_num_threads()) if threads is None else threads)
    model, prompts = checkpoint.model, [checkpoint.encode(text) for text in PROMPTS]
    longest = max(prompt.shape[1] for prompt in prompts)
    if longest + max_new_tokens > model.config.max_position_embeddings:
        raise PromptError(f"--max-new-tokens {max_new_tokens} exceeds the model's context of 2048; give fewer")
    drafts = list(dict.fromkeys((*_DRAFTS, draft)))
    specs = [ArmSpec("generate"), ArmSpec("plain"), *(ArmSpec("draft", each) for each in drafts)]
    arms, packed = [make_arm(spec, model) for spec in specs], None
    if native.available() and model.device.type == "cpu":
        packed = load(model_place(DEMO), weights="planes", dtype="float32", draft=False)
        arms.append(OwnArm(ArmSpec("other", "planes"), packed))

    screen = Console(quiet=output == "json", highlight=False, markup=False, soft_wrap=True)
    screen.print(_about(spare, model.device), end="\n\n")
    for arm in (arms[1], arms[2 + drafts.index(draft)]):
        assert isinstance(arm, OwnArm)
        _show(screen, checkpoint, arm, min(max_new_tokens, _SHOWN))
    until = started + seconds - _REST
    greedy, sampled = (Cell(DEMO, temperature, 1, longest, max_new_tokens) for temperature in (0.0, _TEMPERATURE))
    screen.print(
        f"Now {len(arms)} ways to decode, in turns, on {len(prompts)} such texts of {max_new_tokens} tokens ..."
    )
    screen.print()
    with progress_bar("measuring") as bar:
        begun = time.perf_counter()
        length = max(until - begun, 0.1)

        def tick(_: int) -> None:
            bar.reach(min(time.perf_counter() - begun, length), length)

        asked = [Prompts.of_one_length(prompt) for prompt in prompts]
        for arm in arms:
            arm.decode(asked[0], greedy, seed=0)
        # Passes are recorded when they first run.
        found = {}
        for cell, share in ((greedy, 0.5), (sampled, 1.0)):
            limit = begun + share * (until - begun)
            found[cell] = measure(model, cell, arms, asked, ENDLESS, 0, tick, until=limit)
    pairs = [[_line(runs[place], cell, runs[0]) for cell, runs in found.items()] for place in range(len(arms))]
    stock = [*chain(*found[greedy][0].calls)]
    differing = [each[0]["arm"] for each in pairs if each[0]["equal"] < 1]
    headed = pairs[2 + drafts.index(draft)]
    result = Demonstrated(
        settings={
            "draft": draft,
            "temperature": _TEMPERATURE,
            "max_new_tokens": max_new_tokens,
            "seconds": seconds,
            "threads": torch.get_num_threads(),
        },
        headline=headline(headed[0], not differing),
        identical=not differing,
        arms=[line for pair in pairs for line in pair],
        turns=len(stock),
        texts=[
            {"prompt": text, "text": checkpoint.tokenizer.decode([*ids[0].tolist(), *call.rows[0]])}
            for text, ids, call in zip(PROMPTS, prompts, stock, strict=False)
        ],
        seconds=time.perf_counter() - started,
        cores=spare,
        cpu_kernels=native.available(),
        weight_bytes=sum(weight.nbytes for weight in model.parameters()),
        packed_bytes=None if packed is None else sum(weight.nbytes for weight in packed.model.parameters()),
    )
    screen.print(*_report(result, pairs, headed, on_cpu=model.device.type == "cpu"), sep="\n")
    if differing:
        message = f"greedy tokens of {', '.join(differing)} differ from the model's own; please report this as a bug"
        raise FailedRunError(TokensDifferError(message), result)
    return result


def _line(run: ArmRun, cell: Cell, stock: ArmRun) -> Row:
    """Return an arm's figures by the names of the lab's columns; the demo has no pandas to make its table with.

    Ratios are those of whole calls of one turn; they, times and rates are medians over turns.
    """
    from selfspec.measure.estimate import Estimate
    from selfspec.tools.lab.table import spread

    calls, firsts = [*chain(*run.calls)], [*chain(*stock.calls)]
    pairs = [*zip(calls, firsts, strict=True)]
    ratios = [own.tokens * first.seconds / (own.seconds * first.tokens) for own, first in pairs]
    behind = [(each.tokens - each.first_tokens) / max(each.seconds - each.first_seconds, 1e-9) for each in calls]
    equal = {} if cell.sampled else {"equal": statistics.fmean(own.rows == first.rows for own, first in pairs)}
    return {
        "arm": run.arm.spec.name.removeprefix("selfspec "),
        "temperature": cell.temperature,
        **spread(_SPEED, Estimate.of_median(ratios)),
        "whole_tokens_per_second": statistics.median(each.tokens / each.seconds for each in calls),
        "mean_accepted_length": sum(each.tokens for each in calls) / sum(each.passes for each in calls),
        "first_token_seconds": statistics.median(each.first_seconds for each in calls),
        "tokens_per_second": statistics.median(behind),
        **equal,
    }


def headline(headed: Row, identical: bool) -> str:
    """Say in a line what a draft is worth, by its greedy figures."""
    speed = headed[_SPEED]
    said = f"{speed:.1f}x faster than" if speed >= 1.05 else f"{speed:.2f}x the speed of"
    text = "identical text" if identical else "THE TEXT DIFFERS"
    return f"{said} model.generate, {headed['mean_accepted_length']:.1f} tokens per pass, {text}"


def _speed(row: Row, digits: int, unit: str = "") -> str:
    """Write a speed with its interval, if it has one: `1.23 (1.10-1.31)`."""
    low, high = (row.get(f"{_SPEED}_{end}", 0.0) for end in ("low", "high"))
    interval = f" ({low:.{digits}f}-{high:.{digits}f}{unit})" if low < high else ""
    return f"{row[_SPEED]:.{digits}f}{unit}{interval}"


def _about(spare: SpareCores, device: torch.device) -> str:
    """Say what runs where."""
    import torch

    from selfspec.device import device_name

    threads = torch.get_num_threads()
    on_cpu = device.type == "cpu"
    where = f"{threads} thread{'s' * (threads > 1)}" if on_cpu else str(device)
    free = f" ({spare.free:.1f} of {spare.cores} cores free)" if on_cpu and spare.free is not None else ""
    return f"A model of 10M parameters that writes Python, on {where}{free};\nfloat32, {device_name(device)}"


def _show(screen: Console, checkpoint: Checkpoint, arm: OwnArm, new: int) -> None:
    """Show a text as an arm decodes it, behind the last two lines of its prompt; all arms have the same draws."""
    import torch

    from selfspec.decode.text_stream import TextStream
    from selfspec.measure.embedded import PROMPTS

    def write(text: str) -> None:
        screen.out(text.replace("\n", "\n" + _INDENT), end="")

    draft, ids = arm.spec.draft, checkpoint.encode(PROMPTS[1])
    title = f"{draft}, the same random draws; a bar ends each pass of the model:"
    screen.print(title if draft else "Plain decoding, a token a pass:", style="bold")
    write(_INDENT + "\n".join(PROMPTS[1].splitlines()[-2:]))
    stream, lengths = TextStream(checkpoint.tokenizer, ids[0].tolist()), []
    for committed in arm.wrapped.stream(
        ids,
        torch.ones_like(ids),
        seed=_SEED,
        accept="coupled",
        do_sample=True,
        temperature=_TEMPERATURE,
        top_k=0,
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
    ):
        lengths.append(len(committed.tokens))
        write(stream.push(committed.rows[0].tokens) + ("|" if draft else ""))
    write(stream.finish() + "\n")
    screen.print(f"({sum(lengths)} tokens in {len(lengths)} passes)", end="\n\n", style="dim")


def _report(
    result: Demonstrated, arms: Sequence[Sequence[Row]], headed: Sequence[Row], on_cpu: bool
) -> Iterator[Text | str]:
    """Say what was measured in lines of 80 columns, the arm of the headline in bold, and what to type next."""
    from selfspec.kernels import native

    yield Text(result.headline, "bold")
    greedy, sampled = (_speed(row, 1, "x") for row in headed)
    yield f"{headed[0]['arm']}: greedy {greedy}, at temperature {_TEMPERATURE:g} {sampled}"
    if result.packed_bytes is not None:
        whole, packed = (each / 1e6 for each in (result.weight_bytes, result.packed_bytes))
        yield f"planes: weights of {packed:.0f} MB in place of {whole:.0f} MB, not one bit changed"
    yield ""
    columns = "{:<15}{:<19}{:<19}{:<9}{:<10}{}"
    yield columns.format("times as fast", "greedy", f"temperature {_TEMPERATURE:g}", "prompt", "decoding", "a pass")
    for each in arms:
        first = each[0]
        greedy, sampled = (
            f"1.00  {row['whole_tokens_per_second']:.0f} tokens/s" if each is arms[0] else _speed(row, 2)
            for row in each
        )
        prompt, decoding = f"{first['first_token_seconds'] * 1e3:.0f} ms", f"{first['tokens_per_second']:.0f}/s"
        row = columns.format(
            first["arm"][:14], greedy, sampled, prompt, decoding, f"{first['mean_accepted_length']:.1f}"
        )
        yield Text(row, "bold" if each is headed else "")
    yield ""
    several = result.turns > 1
    measured = f"Medians of {result.turns} turns and their interval" if several else "One turn: too few for intervals"
    yield f"{measured}; {result.seconds:.0f} seconds in all."
    yield _MEANING
    if on_cpu and not result.cpu_kernels:
        yield fill(f"The CPU kernels, which make all of this faster, do not run: {native.absence()}.", _COLUMNS)
    yield ""
    yield Text("A model of your own, MODEL being its folder or its name on the hub:", "bold")
    yield _NEXT

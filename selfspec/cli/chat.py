"""`selfspec chat`: a conversation in the terminal, over one cache."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from selfspec.cli.generate import SamplingOptions
from selfspec.cli.options import (
    DraftingOptions,
    MemoryOptions,
    ModelOptions,
    Output,
    Template,
    read_template,
    read_text,
)
from selfspec.cli.outcome import FailedRunError
from selfspec.cli.terminal import console
from selfspec.errors import NonFiniteLogitsError, PromptError, SelfSpecError, StorageError

if TYPE_CHECKING:
    from selfspec.cli.conversation import ChatTurn, Conversation

_TELLING = 32
_HELP = """\
/reset         forget the conversation; the system message stays
/save FILE     write the conversation to a JSON file
/predict FILE  the next answer is expected to be this file, as before an edit, and comes sooner where it is
/help          show these lines
/quit          leave, as Ctrl-D does
Ctrl-C ends an answer and keeps what was said of it.
A message that begins with a slash is written with two: //etc"""


@dataclass(frozen=True, kw_only=True)
class Talk:
    """Conversation."""

    system: Annotated[str | None, typer.Option(help="Begin with this system message.")] = None
    template: Template = None
    max_new_tokens: Annotated[int, typer.Option(min=1, help="End an answer after N tokens.")] = 1024


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Tokens, seconds and acceptance of an answer.

    Attributes:
        kept_tokens: of the prompt that were in the cache.
        seconds: by phase.
    """

    prompt_tokens: int
    kept_tokens: int
    new_tokens: int
    drafted: int
    accepted: int
    rounds: int
    finished: bool
    seconds: dict[str, float]

    def __str__(self) -> str:
        decoding = sum(spent for phase, spent in self.seconds.items() if phase != "prefill")
        # Fewer tell more of the first round than of the speed.
        rate = f", {self.new_tokens / decoding:.0f} a second" if decoding and self.new_tokens >= _TELLING else ""
        accepted = f", {self.accepted} of {self.drafted} draft tokens accepted" if self.drafted else ""
        return (
            f"{self.new_tokens} tokens{rate}{accepted}; {self.kept_tokens} of {self.prompt_tokens} prompt tokens kept"
        )


@dataclass(frozen=True)
class Chatted:
    """`selfspec chat`.

    Attributes:
        messages: the conversation, `role` and `content` each.
    """

    messages: list[dict[str, Any]]
    turns: list[Answer]
    settings: dict[str, Any]


def chat(
    model: ModelOptions,
    talk: Talk,
    sampling: SamplingOptions,
    budget: MemoryOptions,
    drafting: DraftingOptions,
    output: Output = "text",
) -> Chatted:
    """Talk with a model. Each turn reads only what the cache does not hold yet.

    Messages are read a line each, from the terminal or from standard input. `/help` lists the commands. Answers go to
    stdout, figures to stderr; with json, the whole conversation is printed at its end.
    """
    source = read_template(talk.template)
    drafting.check(model, budget)

    from selfspec.cli.conversation import Conversation
    from selfspec.decode.options import Scope, check_values
    from selfspec.model.checkpoint import load_tokenizer
    from selfspec.serve.chat.template import ChatTemplate

    sampling = sampling.seeded()
    options = sampling.generation_options()
    check_values({**options, "max_new_tokens": talk.max_new_tokens}.get, Scope(vocabulary=0, readable=0, rows=1))
    options["draft_length"] = drafting.control()
    # A template that does not fit is told before the weights are read.
    ChatTemplate(load_tokenizer(model.place), source)
    loaded = drafting.load(model, budget)
    template = ChatTemplate(loaded.tokenizer, source)
    conversation = Conversation(loaded.spec, loaded.tokenizer, template, talk.system, talk.max_new_tokens, options)
    session = _Session(conversation, model.model, sampling.seed, quiet=output == "json")
    failed = session.run()
    settings = {"model": model.model, "draft": drafting.draft, "sampling": asdict(sampling), **asdict(talk)}
    settings["template"] = None if talk.template is None else str(talk.template)
    result = Chatted(conversation.messages, session.turns, settings)
    if failed is not None:
        raise FailedRunError(failed, result)
    return result


class _Session:
    """Reads lines, says answers, keeps their figures in `turns`, and obeys commands."""

    def __init__(self, conversation: Conversation, model: str, seed: int | None, quiet: bool) -> None:
        self._conversation = conversation
        self._model = model
        self._seed = seed
        self._quiet = quiet
        self._saved: set[Path] = set()
        self._aside = console(stderr=True)
        self._prediction: str | None = None
        self.turns: list[Answer] = []

    def run(self) -> SelfSpecError | None:
        """Answer until the input ends; return the error of a line that was passed over, or that ended it."""
        if sys.stdin.isatty():
            self._note("/help lists the commands, Ctrl-C ends an answer, Ctrl-D the chat")
        with _on_interrupt(signal.SIG_IGN):
            return self._talk()

    def _talk(self) -> SelfSpecError | None:
        failed: SelfSpecError | None = None
        for line in _lines(self._note):
            if isinstance(line, PromptError):
                failed = failed or line
                self._note(f"error: {line}")
                continue
            command, _, argument = line.partition(" ")
            if command == "/quit":
                break
            try:
                if line.startswith("/") and not line.startswith("//"):
                    self._obey(command, argument.strip())
                elif line.strip():
                    self._answer(line.removeprefix("/"))
            except (PromptError, StorageError) as error:
                if not sys.stdin.isatty():
                    return error
                self._note(f"error: {error}")
        return failed

    def _answer(self, text: str) -> None:
        seed = None if self._seed is None else (self._seed + len(self.turns)) % 2**63
        failed: str | None = None
        turn: ChatTurn | None = None
        ended = False

        def end(*_: object) -> None:
            # After a round all that was said is kept. Whoever presses again does not wait for the first one.
            nonlocal ended
            if ended and (turn is None or not turn.tokens):
                _raise_once()
            ended = True

        try:
            with _on_interrupt(end):
                turn = self._conversation.ask(text, seed, self._prediction)
                for piece in turn:
                    self._say(piece)
                    if ended:
                        failed = "ended here"
                        break
        except KeyboardInterrupt:
            failed = "ended here"
        except NonFiniteLogitsError as error:
            failed = str(error)
        if turn is None:
            self._note("ended before the answer began")
            return
        self._prediction = None
        self._say(turn.close() + "\n")
        stats = turn.stats
        figures = Answer(
            prompt_tokens=len(turn.prompt),
            kept_tokens=turn.kept,
            new_tokens=len(turn.tokens),
            drafted=stats.drafted,
            accepted=stats.accepted,
            rounds=stats.rounds,
            finished=turn.finished,
            seconds=stats.seconds,
        )
        self.turns.append(figures)
        self._note(f"{figures}" + (f"; {failed}" if failed else ""))

    def _obey(self, command: str, name: str) -> None:
        if command in ("/save", "/predict") and not name:
            raise PromptError(f"{command} needs a file: {command} FILE")
        if command == "/reset":
            self._conversation.reset()
            self._note("the conversation is forgotten")
        elif command == "/save":
            self._save(Path(name).expanduser())
        elif command == "/predict":
            self._prediction = read_text(f"/predict {name}", Path(name).expanduser().read_bytes)
            self._note(f"the next answer is expected to be {name}")
        elif command == "/help":
            self._note(_HELP)
        else:
            raise PromptError("there is no such command; /help lists them, and a message may begin with two slashes")

    def _save(self, file: Path) -> None:
        from selfspec.files.writing import write_json

        if file.exists() and file.absolute() not in self._saved:
            raise StorageError(f"{file} is there already; name another file, or remove it first")
        write_json(file, {"model": self._model, "messages": self._conversation.messages})
        self._saved.add(file.absolute())
        self._note(f"saved {len(self._conversation.messages)} messages to {file}")

    def _say(self, text: str) -> None:
        if not self._quiet:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _note(self, text: str) -> None:
        if not self._quiet:
            self._aside.print(text, style="dim", soft_wrap=True)


@contextmanager
def _on_interrupt(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Handle Ctrl-C so for a while."""
    kept = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, kept)


def _raise_once(*_: object) -> NoReturn:
    """End an answer or the reading of a line; whoever presses twice has nothing else ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _lines(note: Callable[[str], None]) -> Iterator[str | PromptError]:
    """The lines of a terminal, with editing and history, or of standard input; what is no text is an error.

    What is pasted into a terminal is one line, whatever breaks are in it.
    """
    if not sys.stdin.isatty():
        lines = iter(sys.stdin.buffer)
        while True:
            with _on_interrupt(_raise_once):
                read = next(lines, None)
            if read is None:
                return
            yield _decoded(read)
    # Lines can be edited once this is imported, where there is such a thing.
    with suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            with _on_interrupt(_raise_once):
                line = input("> ")
        except KeyboardInterrupt:
            print()
            note("Ctrl-D or /quit leaves")
        except EOFError:
            print()
            return
        else:
            yield line


def _decoded(line: bytes) -> str | PromptError:
    try:
        return line.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeError as error:
        return PromptError(
            f"a line of standard input is not UTF-8 text ({error}) and was passed over; convert it first"
        )

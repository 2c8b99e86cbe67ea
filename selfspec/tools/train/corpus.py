"""Text for training: from files or from the model itself, shuffled by document and packed into blocks of tokens."""

from __future__ import annotations

import gzip
import hashlib
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import CorpusError, TrainingError
from selfspec.files.json_text import read_described, write_described
from selfspec.files.writing import check_output_file, write_sealed
from selfspec.measure.prompts import Message, json_lines
from selfspec.measure.stock import end_tokens, own_text
from selfspec.measure.summary import describe_config
from selfspec.model.checkpoint import load_tokenizer, read_config
from selfspec.tools.lab.arms import Prompts
from selfspec.tools.train.recipe import Course, Texts

# Documents given to the tokenizer at once: enough to use its threads, few enough to stop soon after enough tokens.
_BATCH = 64
# Texts that the model writes at once.
_WRITTEN = 32
_ABOUT = "own_text"
_MESSAGE = ("role", "content")


@dataclass(frozen=True)
class _About:
    """The header of a file of the model's own text: its format, and the tokens of each text."""

    format: Literal[2]
    length: int


@dataclass(frozen=True)
class Blocks:
    """Tokens in blocks of one length, `[blocks, length]`, and those that are learnt, in conversations the answers."""

    ids: Tensor
    learnt: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> Blocks:
        """Take tokens that are all learnt."""
        return cls(ids, torch.ones_like(ids, dtype=torch.bool))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one block, as loaders stack them."""
        return {"ids": self.ids[index], "learnt": self.learnt[index]}

    def chosen(self, places: Tensor | slice) -> Blocks:
        """Return some of the blocks."""
        return Blocks(self.ids[places], self.learnt[places])

    def batches(self, size: int, device: torch.device) -> Iterator[Blocks]:
        """Yield all blocks, some at a time, on a device."""
        for start in range(0, len(self), size):
            some = self.chosen(slice(start, start + size))
            yield Blocks(some.ids.to(device), some.learnt.to(device))

    @property
    def before_learnt(self) -> Tensor:
        """True where the next token is learnt, `[blocks, length]`; the last place, whose next is unknown, as itself."""
        return torch.cat([self.learnt[:, 1:], self.learnt[:, -1:]], 1)


@dataclass(frozen=True)
class Split:
    """A text in two parts that share no block, to learn from and to measure on; both have something to learn."""

    train: Blocks
    held_out: Blocks

    def __post_init__(self) -> None:
        for part in (self.train, self.held_out):
            if not part.learnt[:, 1:].any():
                raise CorpusError("the text holds no answer to learn or to measure on; give more conversations")


@dataclass(frozen=True)
class Conversation:
    """Messages, of which the model learns the answers."""

    messages: tuple[Message, ...]

    @property
    def asks(self) -> bool:
        """True if the last message is not an answer."""
        last: str = self.messages[-1]["role"]
        return last != "assistant"

    @property
    def text(self) -> str:
        """All messages, without their roles."""
        return "\n\n".join(each["content"] for each in self.messages)


Document = str | Conversation


def identified(file: Path) -> dict[str, str]:
    """Name a text file by its name and content, so that a changed text is another."""
    return {"name": file.name, "sha256": hashlib.sha256(_content(file)).hexdigest()}


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> CorpusError:
    reason = getattr(error, "strerror", None) or error
    return CorpusError(f"{file} cannot be read as text ({reason}); give UTF-8 text or JSONL, plain or as .gz")


def read_documents(file: Path) -> list[Document]:
    """Read the documents of a text file, in its order.

    A `.jsonl` file has one JSON object a line, with its text under `text` or a conversation under `messages`; any other
    file is one document of plain text. With `.gz` behind the name it is unpacked first. A CorpusError: it cannot be
    read, is no UTF-8, is truncated, holds something else, or holds no text.
    """
    try:
        content = _content(file)
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error
    documents = list(_lines(file, text)) if file.name.removesuffix(".gz").endswith(".jsonl") else [text]
    documents = [document for document in documents if plain_text(document).strip()]
    if not documents:
        raise CorpusError(f"{file} holds no text")
    return documents


def plain_text(document: Document) -> str:
    """Return a document as text, whoever says it."""
    return document if isinstance(document, str) else document.text


def encoded(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the tokens of each document, and which are learnt.

    Each text comes behind the token that begins or ends one, unless it begins with that itself. Conversations are
    written by the chat template; of them the answers are learnt, up to the token that ends each. A CorpusError: there
    is no chat template, or it rewrites what was said before an answer.
    """
    mark = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    for start in range(0, len(documents), _BATCH):
        some = documents[start : start + _BATCH]
        texts = [each for each in some if isinstance(each, str)]
        # Longer than the model's context, and meant to be: blocks are cut from it.
        tokens = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ())
        for each in some:
            if isinstance(each, Conversation):
                yield _conversation(each, tokenizer)
            else:
                ids: list[int] = next(tokens)
                whole = ids if mark is None or ids[:1] == [mark] else [mark, *ids]
                yield whole, [True] * len(whole)


def _conversation(said: Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    learnt: list[bool] = []
    for place, message in enumerate(said.messages):
        if message["role"] == "assistant":
            before = _templated(tokenizer, said.messages[:place], answering=True)
            ids_now = _templated(tokenizer, said.messages[: place + 1], answering=False)
            if ids_now[: len(before)] != before or before[: len(ids)] != ids:
                raise CorpusError(
                    "the chat template writes what was said before an answer in another way once it is there, so "
                    "answers cannot be told from the rest; give conversations as text"
                )
            answer = ids_now[len(before) :]
            ends = [at for at, token in enumerate(answer) if token == tokenizer.eos_token_id]
            last = ends[0] + 1 if ends else len(answer)
            learnt += [False] * (len(before) - len(ids)) + [True] * last + [False] * (len(answer) - last)
            ids = ids_now
    if said.asks:
        asked = _templated(tokenizer, said.messages, answering=True)
        ids, learnt = asked, learnt + [False] * (len(asked) - len(learnt))
    return ids, learnt


def _templated(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], answering: bool) -> list[int]:
    if not tokenizer.chat_template:
        raise CorpusError("the checkpoint has no chat template to write conversations by; give them as text")
    try:
        ids = tokenizer.apply_chat_template(
            [dict(each) for each in messages], add_generation_prompt=answering, return_dict=False
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise CorpusError(f"the chat template refuses a conversation ({' '.join(str(error).split())})") from error
    return [int(token) for token in ids]


def packed(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, length: int, most: int | None = None
) -> Blocks:
    """Pack documents into blocks without padding, at most `most`; refuse text that is too short for one."""
    ids: list[int] = []
    learnt: list[bool] = []
    for tokens, which in encoded(documents, tokenizer):
        ids += tokens
        learnt += which
        if most is not None and len(ids) >= most * length:
            break
    count = len(ids) // length if most is None else min(most, len(ids) // length)
    if count == 0:
        raise CorpusError(f"the text has {len(ids)} tokens, too few for one block of {length}; give more text")
    return Blocks(*(torch.tensor(each[: count * length]).view(count, length) for each in (ids, learnt)))


def beginnings(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, number: int, tokens: int, length: int
) -> list[list[int]]:
    """Return beginnings for a model to continue: the first tokens of texts, and conversations up to each answer.

    An answer that a conversation lacks is one of these. Texts of fewer than `tokens` and beginnings of `length` or more
    are left out. Where there are fewer than `number`, they come again; a CorpusError if there is none.
    """
    found: list[list[int]] = []
    for document, (ids, learnt) in zip(documents, encoded(documents, tokenizer), strict=True):
        if isinstance(document, Conversation):
            answers = [at for at in range(1, len(ids)) if learnt[at] and not learnt[at - 1]]
            answers += [len(ids)] if document.asks else []
            found += [ids[:at] for at in answers if at < length]
        elif len(ids) >= tokens:
            found.append(ids[:tokens])
        if len(found) >= number:
            break
    if not found:
        raise CorpusError(f"no text has {tokens} tokens to begin with, nor a conversation room for an answer")
    return [found[place % len(found)] for place in range(number)]


def spread(blocks: Blocks, most: int) -> Blocks:
    """Return at most `most` of the blocks, evenly spaced over all of them."""
    count = min(most, len(blocks))
    return blocks.chosen(torch.arange(count) * len(blocks) // count)


def all_documents(files: Sequence[Path], seed: int) -> list[Document]:
    """Read the documents of all files to learn from, in an order that the seed decides."""
    if not files:
        raise TrainingError("no text to train on; give a file")
    documents = [document for file in files for document in read_documents(file)]
    random.Random(seed).shuffle(documents)
    return documents


def given_text(
    documents: Sequence[Document], texts: Texts, course: Course, tokenizer: PreTrainedTokenizerBase, processes: int
) -> Split:
    """Return documents in blocks, no more of them than the course takes, and blocks to measure on."""
    wanted, length = course.steps * course.batch * course.accumulate * processes, course.length
    if texts.held_out is None:
        return split(packed(documents, tokenizer, length, wanted + texts.held_out_blocks), texts.held_out_blocks)
    measured = spread(packed(read_documents(texts.held_out), tokenizer, length), texts.held_out_blocks)
    return Split(packed(documents, tokenizer, length, wanted), measured)


def split(blocks: Blocks, held_out: int) -> Split:
    """Split off the first blocks to measure on, no more than a tenth, from those to learn from."""
    if len(blocks) < 2:
        raise CorpusError(
            "the text fills a single block, which is to be held out; give more text, shorter sequences, or a held-out "
            "text of its own"
        )
    count = min(held_out, max(1, len(blocks) // 10))
    return Split(blocks.chosen(slice(count, None)), blocks.chosen(slice(count)))


def written_text(
    model: PreTrainedModel,
    begun: Sequence[Sequence[int]],
    course: Course,
    texts: Texts,
    kept: Path,
    temperature: float = 1.0,
) -> Split:
    """Let a model continue beginnings, without top-k or top-p; at temperature 0 greedily.

    Texts are kept batch by batch, so that an interrupted call resumes. The course's length includes beginnings. Tokens
    behind one that ends the text are not learnt.
    """
    written = Blocks.of(torch.empty(0, course.length, dtype=torch.long))
    if kept.exists():
        remedy = "remove it to have the text written again"
        found = read_described(kept, _ABOUT, _About, TrainingError, remedy)
        if (length := found.about.length) != course.length:
            raise TrainingError(f"{kept} has texts of {length} tokens, and not of {course.length}; {remedy}")
        written = Blocks(found.tensors["ids"], found.tensors["learnt"].bool())
    # Beginnings of like length need little padding.
    order = sorted(range(len(begun)), key=lambda place: len(begun[place]))
    ends = torch.tensor(sorted(end_tokens(model)), dtype=torch.long)
    for start in range(len(written), len(begun), _WRITTEN):
        rows = [torch.tensor(begun[place]) for place in order[start : start + _WRITTEN]]
        asked = Prompts.padded([row[None] for row in rows])
        some, mask = asked.ids.to(model.device), asked.mask.to(model.device)
        more = own_text(model, some, course.length - some.shape[1], temperature, course.seed + start, mask).cpu()
        more = torch.stack([row.roll(len(first) - some.shape[1]) for row, first in zip(more, rows, strict=True)])
        learnt = torch.stack(
            [_learnt(row, len(first), some.shape[1], ends) for row, first in zip(more, rows, strict=True)]
        )
        written = Blocks(torch.cat([written.ids, more]), torch.cat([written.learnt, learnt]))
        content = {"ids": written.ids, "learnt": written.learnt.to(torch.uint8)}
        write_described(kept, _ABOUT, asdict(_About(2, course.length)), content)
    back = torch.tensor(order).argsort()
    return split(written.chosen(back), texts.held_out_blocks)


def _learnt(row: Tensor, first: int, padded: int, ends: Tensor) -> Tensor:
    """Return which tokens of a text the model wrote, up to its end; a row that was padded on the left ends sooner."""
    places = torch.arange(len(row))
    ended = torch.isin(row, ends) & (places >= first)
    behind = ended.cumsum(0) - ended.long() > 0
    return (places >= first) & (places < len(row) - (padded - first)) & ~behind


def _lines(file: Path, text: str) -> Iterator[Document]:
    for number, line in json_lines(text, file, CorpusError):
        messages, said = line.get("messages"), line.get("text")
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            yield Conversation(tuple({name: each[name] for name in _MESSAGE} for each in messages))
        elif isinstance(said, str) and not messages:
            yield said
        else:
            raise CorpusError(
                f'line {number} of {file} has neither a string under "text" nor a conversation under "messages"'
            )


def _is_message(given: Any) -> bool:
    return isinstance(given, dict) and all(isinstance(given.get(name), str) for name in _MESSAGE)


def most_frequent(ids: Tensor, size: int, vocabulary: int) -> Tensor:
    """Return the `size` most frequent token ids of a model with `vocabulary`, ascending; among equals the smaller."""
    if not 1 <= size <= vocabulary:
        raise TrainingError(f"a reduced vocabulary of {size} tokens is out of range: this model has {vocabulary}")
    counts = torch.bincount(ids.flatten(), minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def count_vocabulary(model: str, text: Sequence[Path], size: int, to: Path) -> float:
    """Write the `size` most frequent tokens of a text as JSON, and return their share of it; needs no weights."""
    check_output_file(to)
    if to.exists():
        raise TrainingError(f"{to} exists; give another name with --to")
    rows = describe_config(read_config(model)).vocabulary
    documents = [document for file in text for document in read_documents(file)]
    ids = packed(documents, load_tokenizer(model), 1).ids
    tokens = most_frequent(ids, size, rows)
    coverage = float(torch.isin(ids, tokens).double().mean())
    write_sealed(to, {"coverage": coverage, "tokens": tokens.tolist()})
    return coverage

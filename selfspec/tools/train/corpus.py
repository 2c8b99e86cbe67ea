"""Text for training: from files or from the model itself, shuffled by document and packed into blocks of tokens."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import CorpusError, DraftConfigError, TrainingError
from selfspec.files.described_tensors import DescribedTensors, write_described
from selfspec.files.json_text import first_error
from selfspec.measure.own_text import own_text
from selfspec.tools.train.settings import Course, Texts

# Documents given to the tokenizer at once: enough to use its threads, few enough to stop soon after enough tokens.
_BATCH = 64
# Texts that the model writes at once.
_WRITTEN = 32
_ABOUT = "own_text"


@dataclass(frozen=True)
class _About:
    """What a file of the model's own text says of itself: its format, and the tokens of each text."""

    format: Literal[1]
    length: int


@dataclass(frozen=True)
class Split:
    """A text in two parts that share no block, to learn from and to measure on: token ids `[blocks, length]`."""

    train: Tensor
    held_out: Tensor


@dataclass(frozen=True)
class _Record:
    """A line of JSONL."""

    text: str


def read_documents(file: Path) -> list[str]:
    """The documents of a text file, in its order.

    A `.jsonl` file has one JSON object a line with its text under `text`; any other file is one document of plain
    text. With `.gz` behind the name it is unpacked first.

    Raises:
        CorpusError: the file cannot be read, is no UTF-8, is truncated, holds something else, or holds no text.
    """
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(
            f"{file} cannot be read as text ({reason}); give UTF-8 text or JSONL, plain or as .gz"
        ) from error
    documents = list(_lines(file, text)) if file.name.removesuffix(".gz").endswith(".jsonl") else [text]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise CorpusError(f"{file} holds no text")
    return documents


def packed(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, most: int | None = None
) -> Tensor:
    """Documents as blocks `[blocks, length]` without padding, each document behind the token that begins or ends one.

    At `most` blocks it stops.
    """
    mark = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    prefix = [] if mark is None else [mark]
    ids: list[int] = []
    for start in range(0, len(documents), _BATCH):
        if most is not None and len(ids) >= most * length:
            break
        # Longer than the model's context, and meant to be: blocks are cut from it.
        batch = tokenizer(list(documents[start : start + _BATCH]), add_special_tokens=False, verbose=False)
        for document in batch["input_ids"]:
            ids += prefix + document
    count = len(ids) // length if most is None else min(most, len(ids) // length)
    if count == 0:
        raise CorpusError(f"the text has {len(ids)} tokens, too few for one block of {length}; give more text")
    return torch.tensor(ids[: count * length]).view(count, length)


def spread(blocks: Tensor, most: int) -> Tensor:
    """At most `most` of the blocks, evenly spaced over all of them."""
    count = min(most, len(blocks))
    return blocks[torch.arange(count) * len(blocks) // count]


def all_documents(files: Sequence[Path], seed: int) -> list[str]:
    """The documents of all files to learn from, in an order that the seed decides."""
    if not files:
        raise TrainingError("no text to train on; give a file")
    documents = [document for file in files for document in read_documents(file)]
    random.Random(seed).shuffle(documents)
    return documents


def given_text(
    documents: Sequence[str], texts: Texts, course: Course, tokenizer: PreTrainedTokenizerBase, processes: int
) -> Split:
    """Documents in blocks: no more of them than the course takes, and what is measured on."""
    wanted, length = course.steps * course.batch * course.accumulate * processes, course.length
    if texts.held_out is None:
        return split(packed(documents, tokenizer, length, wanted + texts.held_out_blocks), texts.held_out_blocks)
    measured = spread(packed(read_documents(texts.held_out), tokenizer, length), texts.held_out_blocks)
    return Split(packed(documents, tokenizer, length, wanted), measured)


def split(blocks: Tensor, held_out: int) -> Split:
    """The first blocks to measure on, but no more than a tenth, and the others to learn from."""
    if len(blocks) < 2:
        raise CorpusError(
            "the text fills a single block, which is to be held out; give more text, shorter sequences, or a held-out "
            "text of its own"
        )
    count = min(held_out, max(1, len(blocks) // 10))
    return Split(blocks[count:], blocks[:count])


def written_text(model: PreTrainedModel, beginnings: Tensor, course: Course, texts: Texts, kept: Path) -> Split:
    """Let a model continue beginnings at temperature 1, without top-k or top-p.

    What was written is kept batch by batch, so that an interrupted call resumes.

    Beginnings are `[texts, beginning]`; the course's length counts them in.
    """
    written = torch.empty(0, course.length, dtype=torch.long)
    if kept.exists():
        written = _kept_text(kept, course.length)
    for start in range(written.shape[0], len(beginnings), _WRITTEN):
        ids = beginnings[start : start + _WRITTEN].to(model.device)
        more = own_text(model, ids, course.length - ids.shape[1], 1.0, course.seed + start)
        written = torch.cat([written, more.cpu()])
        write_described(kept, _ABOUT, asdict(_About(1, course.length)), {"ids": written})
    return split(written, texts.held_out_blocks)


def _kept_text(kept: Path, length: int) -> Tensor:
    remedy = "remove it to have the text written again"
    try:
        found = DescribedTensors(kept, "text that the model wrote", _ABOUT, _About, "pt", remedy)
        found.check_names(("ids",))
        return found.read_like("ids", torch.empty(found.read("ids").shape[0], length, dtype=torch.long))
    except DraftConfigError as error:
        raise TrainingError(str(error)) from error


def _lines(file: Path, text: str) -> Iterator[str]:
    reader = TypeAdapter(_Record)
    # Not `splitlines`: a JSON string may hold other line separators than this.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield reader.validate_json(line, strict=True).text
            except ValidationError as error:
                raise CorpusError(
                    f'line {number} of {file} is no JSON object with a string under "text" ({first_error(error)})'
                ) from error

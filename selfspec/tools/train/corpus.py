"""Text for training: from files or from the model itself, shuffled by document and packed into blocks of tokens."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import CorpusError, TrainingError
from selfspec.files.json_text import parse_json
from selfspec.files.writing import whole
from selfspec.measure.own_text import own_text
from selfspec.tools.train.settings import Course, Texts

# Documents given to the tokenizer at once: enough to use its threads, few enough to stop soon after enough tokens.
_BATCH = 64
# Texts that the model writes at once.
_WRITTEN = 32


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks of token ids.

    Args:
        ids: `[blocks, length]`.
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index]}


@dataclass(frozen=True)
class Split:
    """A text in two parts that share no block.

    Attributes:
        train: what is learnt from.
        held_out: what is measured on.
    """

    train: Blocks
    held_out: Blocks


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
    name = file.name.removesuffix(".gz")
    documents = list(_lines(file, text)) if name.endswith(".jsonl") else [text]
    if not any(document.strip() for document in documents):
        raise CorpusError(f"{file} holds no text")
    return [document for document in documents if document.strip()]


def packed(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, most: int | None = None
) -> Blocks:
    """Documents as blocks without padding, each document behind the token that begins or ends one.

    Args:
        documents: in the order in which they are packed.
        tokenizer: of the model.
        length: tokens of a block.
        most: blocks to stop after; None: pack all.

    Raises:
        CorpusError: there is not enough text for one block.
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
    return Blocks(torch.tensor(ids[: count * length]).view(count, length))


def shuffled(documents: Sequence[str], seed: int) -> list[str]:
    """The documents in an order that the seed decides."""
    order = list(documents)
    random.Random(seed).shuffle(order)
    return order


def split(blocks: Blocks, held_out: int) -> Split:
    """The first blocks to measure on, the others to learn from.

    Raises:
        CorpusError: nothing would be left to learn from.
    """
    if len(blocks) <= held_out:
        raise CorpusError(
            f"the text fills {len(blocks)} blocks, and {held_out} are to be held out; give more text, shorter "
            "sequences, or a held-out text of its own"
        )
    return Split(Blocks(blocks.ids[held_out:]), Blocks(blocks.ids[:held_out]))


def spread(blocks: Blocks, most: int) -> Blocks:
    """At most `most` of the blocks, evenly spaced over all of them."""
    count = min(most, len(blocks))
    return Blocks(blocks.ids[torch.arange(count) * len(blocks) // count])


def all_documents(texts: Texts, seed: int) -> list[str]:
    """The documents of all files to learn from, shuffled.

    Raises:
        CorpusError: a file cannot be read.
        TrainingError: no file is given.
    """
    if not texts.text:
        raise TrainingError("no text to train on; give a file")
    return shuffled([document for file in texts.text for document in read_documents(file)], seed)


def given_text(
    documents: Sequence[str], texts: Texts, course: Course, tokenizer: PreTrainedTokenizerBase, processes: int
) -> Split:
    """Documents in blocks: no more of them than the course takes, and what is measured on.

    Raises:
        CorpusError: the held-out file cannot be read, or there is too little text.
    """
    wanted, length = course.blocks * processes, course.length
    if texts.held_out is not None:
        measured = spread(packed(read_documents(texts.held_out), tokenizer, length), texts.held_out_blocks)
        return Split(packed(documents, tokenizer, length, wanted), measured)
    return _held_out(packed(documents, tokenizer, length, wanted + texts.held_out_blocks), texts)


def written_text(model: PreTrainedModel, beginnings: Blocks, course: Course, texts: Texts, kept: Path) -> Split:
    """Let a model continue beginnings at temperature 1, without top-k or top-p.

    What was written is kept batch by batch, so that an interrupted call resumes.

    Args:
        model: writes.
        beginnings: token ids, `[texts, beginning]`.
        course: names the tokens of a text, beginning included, and the seed.
        texts: names how much is measured on.
        kept: the file for what was written.

    Raises:
        TrainingError: that file cannot be read.
        StorageError: it cannot be written.
    """
    written = _read_written(kept) if kept.exists() else torch.empty(0, course.length, dtype=torch.long)
    for start in range(written.shape[0], len(beginnings), _WRITTEN):
        ids = beginnings.ids[start : start + _WRITTEN].to(model.device)
        more = own_text(model, ids, course.length - ids.shape[1], 1.0, course.seed + start)
        written = torch.cat([written, more.cpu()])
        with whole(kept) as draft:
            save_file({"ids": written}, draft)
    return _held_out(Blocks(written), texts)


def _held_out(blocks: Blocks, texts: Texts) -> Split:
    # Of a short text, a tenth.
    return split(blocks, min(texts.held_out_blocks, max(1, len(blocks) // 10)))


def _read_written(file: Path) -> Tensor:
    try:
        return load_file(file)["ids"]
    except (SafetensorError, OSError, KeyError) as error:
        raise TrainingError(
            f"{file} is truncated or corrupt ({error}); remove it to have the text written again"
        ) from error


def _lines(file: Path, text: str) -> Iterator[str]:
    # Not `splitlines`: a JSON string may hold other line separators than this.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            raise CorpusError(f"line {number} of {file} is not JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise CorpusError(f'line {number} of {file} is no object with a string under "text"')
        yield record["text"]

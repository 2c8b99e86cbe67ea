"""GGUF, the files of GGML: what a file says of itself, where its tensors lie, and what `transformers` reads of it.

The header is read here: the package gguf takes minutes for a large vocabulary. Configurations are made by
`transformers` from a file of the header alone, tokenizers from the file itself.
"""

from __future__ import annotations

import logging
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from selfspec.errors import CheckpointError, UnsupportedOptionError

SUFFIX = ".gguf"

# Formats of numbers by the type of a value; strings and lists have types of their own.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9
_TOKENS = "tokenizer.ggml.tokens"
# Tokens that end a text, besides that of the end of the text itself: of a turn, and of a message that goes on.
_ENDS = ("eos", "eot", "eom")


@dataclass(frozen=True)
class GgufTensor:
    """Locates a tensor: its shape as torch has it, the number of its type, and its first byte in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def numel(self) -> int:
        """Count its numbers."""
        return prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """Holds what a file says of itself: numbers and strings, lists of numbers, of lists of strings the length alone."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """GGML's name of the architecture."""
        return str(self.facts["general.architecture"])


def is_gguf(place: Path | None) -> bool:
    """Return whether a place is a GGUF file, by its name."""
    return place is not None and place.suffix == SUFFIX and place.is_file()


def read_header(file: Path) -> GgufHeader:
    """Read the header of a file. CheckpointError: it is none, or ends too early."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return _Reader(memory).header()
    except (OSError, ValueError, struct.error, KeyError) as error:
        raise CheckpointError(
            f"{file} is no whole GGUF file of version 2 or 3 ({type(error).__name__}: {error}); download it again"
        ) from error


class _Reader:
    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._at = memory, 0

    def header(self) -> GgufHeader:
        if self._memory[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version, tensors, facts = self._numbers("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        found = {self._string(): self._value() for _ in range(facts)}
        places = {self._string(): self._tensor() for _ in range(tensors)}
        step = found.get("general.alignment", 32)
        first = -(-self._at // step) * step
        moved = {name: GgufTensor(each.shape, each.kind, first + each.start) for name, each in places.items()}
        return GgufHeader({"general.architecture": found["general.architecture"], **found}, moved)

    def _numbers(self, spelled: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{spelled}", self._memory, self._at)
        self._at += struct.calcsize(f"<{spelled}")
        return found

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        self._at += length
        if self._at > len(self._memory):
            raise ValueError("it ends within its header")
        return self._memory[self._at - length : self._at].decode()

    def _value(self) -> Any:
        (kind,) = self._numbers("I")
        if kind == _STRING:
            return self._string()
        if kind != _LIST:
            return self._numbers(_NUMBERS[kind])[0]
        kind, count = self._numbers("IQ")
        if kind != _STRING:
            return list(self._numbers(f"{count}{_NUMBERS[kind]}"))
        for _ in range(count):
            (length,) = self._numbers("Q")
            self._at += length
        return count

    def _tensor(self) -> GgufTensor:
        (dims,) = self._numbers("I")
        shape = self._numbers(f"{dims}Q")
        kind, start = self._numbers("IQ")
        return GgufTensor(shape[::-1], kind, start)


def config_of(file: Path) -> PreTrainedConfig:
    """Make the configuration of a file by `transformers`. Errors are those of `transformers`, and CheckpointError."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedOptionError(
            "GGUF files are read with the package gguf, which is not installed: pip install 'selfspec[gguf]'"
        ) from error
    header = read_header(file)
    with TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / file.name, header.architecture)
        adders: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_int64,
            float: writer.add_float64,
            str: writer.add_string,
        }
        for name, value in header.facts.items():
            if name.startswith(("GGUF.", _TOKENS, "tokenizer.ggml.merges")) or name == "general.architecture":
                continue
            if type(value) in adders:
                adders[type(value)](name, value)
            elif not name.startswith("tokenizer."):
                writer.add_array(name, value)
        size = f"{header.architecture}.vocab_size"
        if size not in header.facts and _TOKENS in header.facts:
            writer.add_int64(size, header.facts[_TOKENS])
        for name in header.tensors:
            writer.add_tensor(name, np.zeros(1, np.float32))
        # It tells by logs what it writes.
        logger = logging.getLogger("gguf.gguf_writer")
        logger.addFilter(_is_loud)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            logger.removeFilter(_is_loud)
            writer.close()
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=file.name, trust_remote_code=False)
    config.name_or_path = str(file)
    facts = header.facts
    ends = [facts[f"tokenizer.ggml.{each}_token_id"] for each in _ENDS if f"tokenizer.ggml.{each}_token_id" in facts]
    for name, found in {
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": (ends[0] if len(set(ends)) == 1 else sorted(set(ends))) if ends else None,
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id"),
    }.items():
        setattr(config, name, found)
    return config


def _is_loud(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO


def tokenizer_of(file: Path) -> PreTrainedTokenizerBase:
    """Make the tokenizer of a file, with its chat template, by `transformers`."""
    # What AutoTokenizer comes to as well, after it has read the file by the package gguf.
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    return tokenizer

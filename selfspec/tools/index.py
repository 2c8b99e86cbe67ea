"""Write a corpus of texts, which `suffix:FILE` drafts from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from selfspec.draft.prompt_lookup import NONE, Tokens
from selfspec.draft.suffixes import ABOUT, LONGEST, AboutCorpus
from selfspec.errors import DraftConfigError
from selfspec.files.json_text import write_described
from selfspec.model.identity import Vocabulary


def write_corpus(file: str | Path, texts: Iterable[Sequence[int]], vocabulary: Vocabulary) -> int:
    """Write a corpus of texts of token ids, in one piece or not at all; return its number of tokens.

    Raises DraftConfigError if the texts hold no tokens, StorageError if the file cannot be written.
    """
    between = np.array([NONE], dtype=np.int32)
    parts: list[Tokens] = [each for text in texts for each in (np.asarray(text, dtype=np.int32), between)]
    tokens = np.concatenate(parts) if parts else between
    if len(tokens) == len(parts) // 2:
        raise DraftConfigError("a corpus needs texts with tokens; give others")
    ends = sorted_ends(tokens, LONGEST)
    parts_of_it = {"tokens": torch.from_numpy(tokens), "ends": torch.from_numpy(ends)}
    write_described(Path(file), ABOUT, asdict(AboutCorpus(2, vocabulary)), parts_of_it)
    return len(tokens) - len(parts) // 2


def sorted_ends(tokens: Tokens, longest: int) -> Tokens:
    """Sort the places after each token of a text by the tokens before them, the nearest first; `[tokens]`.

    Ranks by some tokens sort by twice as many (doubling; Manber and Myers, 1993). Places with at least `longest` equal
    tokens keep the text's order.
    """
    ranks, known = tokens.astype(np.int64) - NONE + 1, 1
    while True:
        keys = ranks * (int(ranks.max(initial=0)) + 1)
        keys[known:] += ranks[:-known]
        order = np.argsort(keys, kind="stable")
        if 2 * known >= longest:
            return (order + 1).astype(np.int32)
        ordered = keys[order]
        ranks[order] = np.cumsum(np.diff(ordered, prepend=ordered[:1]) != 0) + 1
        known *= 2

"""Tasks: whole prompts, with the texts or the tests that answers are held against."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.errors import PromptError
from selfspec.measure.prompts import Workload


@dataclass(frozen=True)
class Task:
    """A prompt to answer.

    Attributes:
        prompt: as text.
        ids: `[1, prompt]`.
        reference: a good answer; None where the workload has none.
        test: Python that raises after a wrong answer, to be run after prompt and answer; None where there is none.
    """

    prompt: str
    ids: Tensor
    reference: str | None
    test: str | None


def tasks_of(
    workload: Workload, tokenizer: PreTrainedTokenizerBase, number: int, most_tokens: int, beginning: int
) -> list[Task]:
    """Up to `number` tasks, spread evenly over the texts of a workload.

    Prompts keep their last `most_tokens` tokens. A document, which is no prompt, gives its first `beginning` ones.

    Raises:
        PromptError: no text has a token.
    """
    count = min(number, len(workload.texts))
    found = []
    for place in range(count):
        text = workload.texts[place * len(workload.texts) // count]
        ids: list[int] = tokenizer(text.text[: 16 * beginning] if text.whole else text.text).input_ids
        ids = ids[:beginning] if text.whole else ids[-most_tokens:]
        if ids:
            prompt = tokenizer.decode(ids, skip_special_tokens=True) if text.whole else text.text
            found.append(Task(prompt, torch.tensor([ids]), text.reference, text.test))
    if not found:
        raise PromptError(f"the texts of workload {workload.name!r} have no tokens; give others")
    return found


def digest(tasks: Sequence[Task]) -> str:
    """What tells two sets of tasks apart."""
    content = str([(task.ids.tolist(), task.reference, task.test) for task in tasks])
    return hashlib.sha256(content.encode()).hexdigest()[:12]

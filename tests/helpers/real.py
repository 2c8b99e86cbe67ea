"""A real checkpoint under test."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import selfspec
from selfspec.measure.stock import bare

_LENGTH, _NODES = 4, 8


class Real:
    """A real checkpoint in float32: its own greedy texts, and those of drafts, each wrapper made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        # Of its generation defaults only the special tokens count.
        self.model: PreTrainedModel = bare(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
        self.drafting = cache(self._drafting)

    def ids(self, prompt: str) -> Tensor:
        """The tokens of a prompt, as the chat template writes it where there is one, `[1, prompt]`."""
        if self.tokenizer.chat_template is None:
            return torch.tensor([self.tokenizer(prompt).input_ids])
        turn = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return torch.tensor([self.tokenizer(text, add_special_tokens=False).input_ids])

    def stock(self, ids: Tensor, new: int) -> list[int]:
        """What `model.generate` adds greedily."""
        text = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        found: list[int] = text[0, ids.shape[1] :].tolist()
        return found

    def _drafting(self, draft: str) -> selfspec.SelfSpeculative:
        trees = draft.startswith(("union:", "tree "))
        control = selfspec.FixedLength(_LENGTH, nodes=_NODES) if trees else selfspec.FixedLength(_LENGTH)
        return selfspec.wrap(self.model, draft.removeprefix("tree "), draft_length=control)

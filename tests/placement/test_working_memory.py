"""What a pass over a prompt holds is no more than a budget sets aside for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BloomConfig, BloomForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.placement.place import place
from selfspec.placement.plan import Bandwidth, Plan
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromDisk

# What allocators hold on to is not in tensors.
_NOT_IN_TENSORS = 80 * 2**20


class _Held(TorchDispatchMode):
    """Counts bytes of tensors that are made within it: those that are there, and the most that were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                self._count(each.untyped_storage())
        self.most = max(self.most, self.now)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self._known:
            self._known.add(place)
            self.now += size
            weakref.finalize(storage, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self._known.remove(place)
        self.now -= size


def _wide() -> PreTrainedModel:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
    return tiny.llama(dtype=torch.float32, max_position_embeddings=4096, **sizes)


def _long() -> PreTrainedModel:
    return tiny.llama(dtype=torch.float32, max_position_embeddings=32768, num_hidden_layers=1)


def _bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=64, n_layer=1, n_head=8, eos_token_id=49))


def _gpt_oss() -> PreTrainedModel:
    kept = {"num_hidden_layers": 1, "max_position_embeddings": 4096, "eos_token_id": 49, "pad_token_id": 49}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return GptOssForCausalLM(
        GptOssConfig(vocab_size=50, hidden_size=64, intermediate_size=64, **kept, **heads, **experts)
    )


@pytest.mark.parametrize(
    ("make", "context", "tokens"),
    [
        (_wide, 4096, 2000),
        # Masks are most of it.
        pytest.param(_long, 32768, 32500, marks=pytest.mark.contract),
        # Eager attention: scores are.
        (_bloom, 2048, 2000),
        pytest.param(_gpt_oss, 4096, 4000, marks=pytest.mark.contract),
    ],
)
def test_a_long_prompt_is_read_within_what_is_set_aside_for_it(
    tmp_path: Path, make: Callable[[], PreTrainedModel], context: int, tokens: int
) -> None:
    make().save_pretrained(tmp_path)
    surveyed = survey(str(tmp_path), None, context, FromDisk())
    spec = selfspec.wrap(place(surveyed, Plan(0, 1, None, 0, Bandwidth(10e9, 1e9), 1.0)))
    held = _Held()
    with held:
        output = spec.generate(tiny.prompt(tokens), max_new_tokens=1, do_sample=False)
    memory = surveyed.memory
    assert held.most > output.stats.cache_bytes
    assert held.most <= output.stats.cache_bytes + memory.working - _NOT_IN_TENSORS


@pytest.mark.parametrize(("tied", "bits"), [(True, 8), (True, 4), (False, 8)])
def test_copies_of_a_head_that_stays_are_set_aside_where_they_are_made(tmp_path: Path, tied: bool, bits: int) -> None:
    model = tiny.llama(dtype=torch.float32, vocab_size=20_000, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    memory = survey(str(tmp_path), None, 64, FromDisk()).memory
    spec = selfspec.load(tmp_path, "64GiB", device="cpu", context=64, draft=f"int{bits}")
    spec.generate(tiny.prompt(5), max_new_tokens=4, draft_length=2, do_sample=False)
    aside = sum(memory.substitutes[f"int{bits}"]) + memory.kept_substitutes[f"int{bits}"]
    assert 20_000 * 32 * bits // 8 < spec.substitutes.nbytes <= aside

"""How often a round waits for the device: once, when it commits. Counted on a CPU, by what would wait elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.runtime.model_state import reads_values

NEW = 30
DRAFTS = {
    "plain": None,
    "exit": selfspec.drafts.EarlyExit(2),
    "sublayers": selfspec.drafts.LayerSkip(attention=[1], mlp=[2]),
    "layers": selfspec.drafts.LayerSkip(layers=[0, 2]),
    "int8": selfspec.drafts.LowPrecision(layers=[2, 3]),
}
_TAKING = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu)


class Waits(TorchFunctionMode):
    """Counts what needs values or shapes that the device has yet to find out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _TAKING
        with _Reads(self):
            return func(*args, **(kwargs or {}))


class _Reads(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._waits.count += reads_values(func, args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 9}], ids=str
)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_a_round_of_fixed_length_waits_once(
    llama: PreTrainedModel, draft: selfspec.drafts.Drafter | None, rule: str, options: dict[str, Any], rows: int
) -> None:
    spec = selfspec.wrap(llama, draft, draft_length=3, accept=rule)
    generation = spec.stream(tiny.prompt(5, batch=rows), max_new_tokens=NEW, seed=1, **options)
    next(generation)
    waits = []
    for _ in range(3):
        with Waits() as counted:
            next(generation)
        waits.append(counted.count)
    assert waits == [1, 1, 1]


def test_a_control_that_looks_at_confidences_waits_for_each_token(llama: PreTrainedModel) -> None:
    control = selfspec.ConfidenceStop(0.0, longest=3)
    generation = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=control).stream(
        tiny.prompt(5), max_new_tokens=NEW, do_sample=False
    )
    next(generation)
    with Waits() as counted:
        next(generation)
    assert counted.count == 3

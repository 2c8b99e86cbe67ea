"""Estimates of many draft paths at once, against the loop's own draft steps, one at a time."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from helpers import tiny
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.measure.teacher_forced import DraftPath, LayerViews, TeacherForcedText, readings
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.registry import find_adapter
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

_REACH = 3
_FIRST = 4
_PATHS = [
    LayerPath.up_to(tiny.DEPTH, Sublayer(2, Part.ATTENTION)),
    LayerPath.without(tiny.DEPTH, [Sublayer(1, Part.ATTENTION)]),
    LayerPath.without(tiny.DEPTH, [Sublayer(1, Part.ATTENTION), Sublayer(3, Part.MLP)]),
    LayerPath.without(tiny.DEPTH, [Sublayer(1, Part.ATTENTION), Sublayer(1, Part.MLP)]),
    LayerPath.without(tiny.DEPTH, [Sublayer(0, Part.MLP), Sublayer(2, Part.ATTENTION), Sublayer(3, Part.ATTENTION)]),
    LayerPath.without(tiny.DEPTH, [Sublayer(3, Part.MLP)]),
]


def _steps(model: PreTrainedModel, path: LayerPath, row: torch.Tensor, start: int) -> torch.Tensor:
    """What the loop's draft steps say from `start` on, teacher-forced, `[reach, vocab]`."""
    cache = SharedCache(tiny.DEPTH, 1, row.shape[0], _REACH, torch.device("cpu"))
    passes = ModelRunner(model, find_adapter(model), cache)
    cache.reserve(row.shape[0])
    passes.prefill(row[None, :start], [start])
    cache.commit([start])
    tokens = enumerate(row[None, start : start + _REACH].split(1, 1))
    return torch.stack([passes.run(PassRequest(path, token, first=step - 1)).logits[0, 0] for step, token in tokens])


@torch.no_grad()
def test_every_path_says_what_the_loop_would_draft(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    ids = tiny.prompt(14, batch=2)
    text = TeacherForcedText(LayerViews(model, find_adapter(model)), ids, _FIRST, _REACH)
    text.check()
    seen = set()
    for number, logits in readings(text, [DraftPath(path) for path in _PATHS]):
        seen.add(number)
        for row in range(2):
            for start in (_FIRST - 1, 9):
                expected = _steps(model, _PATHS[number], ids[row], start)
                for copy in range(_REACH):
                    found = logits[copy, row, start + copy - (_FIRST - 1)]
                    torch.testing.assert_close(found, expected[copy], rtol=0, atol=1e-9)
    assert seen == set(range(len(_PATHS)))


@torch.no_grad()
def test_what_begins_alike_is_computed_once() -> None:
    model = tiny.llama()
    views = LayerViews(model, find_adapter(model))
    ids = tiny.prompt(10)

    def layers_run(paths: list[LayerPath]) -> int:
        text = TeacherForcedText(views, ids, _FIRST)
        assert len(list(readings(text, [DraftPath(path) for path in paths]))) == len(paths)
        return text.passes // ids.numel()

    assert layers_run([LayerPath.full(tiny.DEPTH)]) == 0
    assert layers_run([LayerPath.up_to(tiny.DEPTH, Sublayer(layer, Part.ATTENTION)) for layer in (1, 2, 3)]) == 0
    # Layer 1 without its attention, then 2 and 3.
    assert layers_run([_PATHS[1]]) == 3
    # They part at layer 3 only.
    assert layers_run([_PATHS[1], _PATHS[2]]) == 4
    assert layers_run([_PATHS[1], _PATHS[2], _PATHS[1]]) == 4


@torch.no_grad()
def test_what_cannot_be_read_so_is_refused() -> None:
    from selfspec.errors import UnsupportedModelError

    model = tiny.llama()
    hybrid = next(adapter for adapter in ADAPTERS.values() if adapter.recurrent)
    with pytest.raises(UnsupportedModelError, match="measure it by generation"):
        LayerViews(model, hybrid)
    views = LayerViews(model, find_adapter(model))
    text = TeacherForcedText(views, tiny.prompt(10), _FIRST)
    text.logits = text.logits + 1.0
    with pytest.raises(UnsupportedModelError, match="off by"):
        text.check()

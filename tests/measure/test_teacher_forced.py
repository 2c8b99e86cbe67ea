"""Estimates of many draft paths at once, against the loop's own draft steps, one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import selfspec
from helpers import tiny
from helpers.stories import PROMPTS, checkpoint_folder
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.draft import LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.measure.own_text import Continuation
from selfspec.measure.teacher_forced import (
    DraftPath,
    LayerViews,
    TeacherForcedFigures,
    TeacherForcedText,
    expected_rounds,
    readings,
    teacher_forced_figures,
)
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


_NEW = 40
_DRAFTERS: tuple[LayerPathDrafter, ...] = (
    LayerSkip(attention=[2]),
    LayerSkip(mlp=[1], attention=[3]),
    selfspec.drafts.EarlyExit(3),
)


@pytest.fixture(scope="module")
def stories() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    return model.double()


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())
    ids: Tensor = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    return ids


def _figures(
    model: PreTrainedModel, drafter: LayerPathDrafter, ids: Tensor, prompt: int, reach: int, temperature: float
) -> list[TeacherForcedFigures]:
    path, views = DraftPath(drafter.path(5)), LayerViews(model, find_adapter(model))
    texts = [Continuation(row, prompt) for row in ids.split(1)]
    return teacher_forced_figures(views, texts, [path], reach, temperature)[0]


@pytest.mark.parametrize("drafter", _DRAFTERS, ids=repr)
@pytest.mark.parametrize("length", [1, 3])
def test_greedy_rounds_are_those_of_the_generation(
    stories: PreTrainedModel, prompt: Tensor, drafter: LayerPathDrafter, length: int
) -> None:
    spec = selfspec.wrap(stories, draft=drafter, draft_length=length)
    output = spec.generate(prompt, max_new_tokens=_NEW, do_sample=False, eos_token_id=None)
    figures = _figures(stories, drafter, output.sequences, prompt.shape[1], length, 0.0)
    expected = expected_rounds(figures, length)
    assert list(expected.judged) == output.stats.judged_per_depth
    assert list(expected.accepted) == output.stats.accepted_per_depth
    assert sum(expected.rounds) == output.stats.rounds
    assert sum(expected.tokens) == output.stats.new_tokens == _NEW


@pytest.mark.tools
def test_sampled_rounds_are_those_of_generations_in_the_mean(stories: PreTrainedModel, prompt: Tensor) -> None:
    drafter, length, rows = _DRAFTERS[0], 3, 64
    spec = selfspec.wrap(stories, draft=drafter, draft_length=length, accept="token")
    many = prompt.repeat(rows, 1)
    output = spec.generate(many, max_new_tokens=_NEW, do_sample=True, top_k=0, eos_token_id=None, seed=1)
    others = selfspec.wrap(stories).generate(
        many, max_new_tokens=_NEW, do_sample=True, top_k=0, eos_token_id=None, seed=2
    )
    figures = _figures(stories, drafter, others.sequences, prompt.shape[1], length, 1.0)
    expected = expected_rounds(figures, length)
    # About 1,500 and 900 draft tokens each: a standard error is 0.013 and 0.017.
    for position in range(length):
        found = output.stats.accepted_per_depth[position] / output.stats.judged_per_depth[position]
        assert expected.accepted[position] / expected.judged[position] == pytest.approx(found, abs=0.06)
    committed = sum(expected.tokens) / sum(expected.rounds)
    assert committed == pytest.approx(output.stats.mean_accepted_length, rel=0.04)


def test_texts_of_several_lengths_are_what_each_is_alone(stories: PreTrainedModel, prompt: Tensor) -> None:
    output = selfspec.wrap(stories).generate(prompt, max_new_tokens=_NEW, do_sample=False, eos_token_id=None)
    path, views = DraftPath(_DRAFTERS[0].path(5)), LayerViews(stories, find_adapter(stories))
    ids, first = output.sequences, prompt.shape[1]
    # Of two prompts, ended early or not.
    texts = [Continuation(ids[:, : first + 9], first), Continuation(ids, first + 4), Continuation(ids, first)]
    together = teacher_forced_figures(views, texts, [path], 2)[0]
    for text, found in zip(texts, together, strict=True):
        (alone,) = teacher_forced_figures(views, [text], [path], 2)[0]
        assert found.agreed.shape == (2, text.ids.shape[1] - text.prompt)
        # The first tokens of the second copy mean nothing.
        assert found.agreed[0].tolist() == alone.agreed[0].tolist()
        assert found.agreed[1, 1:].tolist() == alone.agreed[1, 1:].tolist()

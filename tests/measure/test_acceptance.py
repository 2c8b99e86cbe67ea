"""Acceptance read off one pass, against paths run prefix by prefix and the loop's own draft steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import selfspec
from helpers import tiny
from helpers.reference import with_layers
from helpers.saved_folders import PROMPTS
from selfspec.adapters import ADAPTERS
from selfspec.cache.shared_cache import SharedCache
from selfspec.draft import EarlyExit, LayerSkip, ReducedVocabulary
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError, UnsupportedModelError
from selfspec.measure import teacher_forced as module
from selfspec.measure.stock import Continuation, continued, repeated_share
from selfspec.measure.teacher_forced import (
    DraftPath,
    LayerViews,
    Readout,
    TeacherForcedFigures,
    TeacherForcedText,
    acceptance_rate,
    expected_rounds,
    first_steps,
    readings,
    teacher_forced_figures,
)
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.registry import find_adapter
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner
from selfspec.tools.train.lesson import layer_dropout

_REACH = 3


@torch.no_grad()
def _brute_force(full: PreTrainedModel, draft: PreTrainedModel, ids: Tensor, start: int, temperature: float) -> float:
    """Mean of sum(min(p, q)), each prefix read by itself."""
    overlaps = []
    for end in range(start, ids.shape[1]):
        p, q = ((model(input_ids=ids[:, :end]).logits[0, -1] / temperature).softmax(-1) for model in (full, draft))
        overlaps.append(float(torch.minimum(p, q).sum()))
    return sum(overlaps) / len(overlaps)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_it_is_what_prefixes_one_by_one_give(architecture: str, temperature: float) -> None:
    model = tiny.BUILDERS[architecture]()
    texts = [Continuation(tiny.prompt(9, seed=1), 2), Continuation(tiny.prompt(7, seed=2), 3)]
    drafters: dict[str, LayerPathDrafter] = {"exit": EarlyExit(2), "skip": LayerSkip(layers=[1])}
    together = first_steps(model, find_adapter(model), drafters, texts, temperature)
    apart = _apart(model, drafters, texts, temperature)
    path = drafters["skip"].path(tiny.DEPTH)
    for number, text in enumerate(texts):
        leaving, skipping = (
            _brute_force(model, with_layers(model, layers), text.ids, text.prompt, temperature)
            for layers in ([0, 1], [0, 2, 3])
        )
        found = {name: float(each[number].overlap.mean()) for name, each in together.items()}
        # Read in a pass of its own, a path sees what it left of the text itself; together, what the target left.
        assert float(apart["skip"][number].overlap.mean()) == pytest.approx(skipping, abs=1e-6)
        assert float(apart["exit"][number].overlap.mean()) == pytest.approx(leaving, abs=1e-6)
        assert found["exit"] == pytest.approx(leaving, abs=1e-6)
        with torch.no_grad():
            full = model(input_ids=text.ids).logits[0]
            row, places = text.ids[0], range(text.prompt - 1, text.ids.shape[1] - 1)
            steps = torch.stack([_steps(model, path, row, place, 1)[0] for place in places])
        p, q = ((each / temperature).softmax(-1) for each in (full[text.prompt - 1 : -1], steps))
        assert found["skip"] == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-6)
    assert acceptance_rate(together["exit"]).n == 2


def _apart(
    model: PreTrainedModel, drafters: dict[str, LayerPathDrafter], texts: list[Continuation], temperature: float
) -> dict[str, list[TeacherForcedFigures]]:
    """Judge drafts as those of a model whose layers cannot be read apart from each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "is_judged_by_teacher_forcing", lambda *_: False)
        return first_steps(model, find_adapter(model), drafters, texts, temperature)


def test_a_reduced_vocabulary_drafts_nothing_else(llama: PreTrainedModel) -> None:
    ids = tiny.prompt(10)
    tokens = tuple(range(0, tiny.VOCABULARY, 2))
    drafters: dict[str, LayerPathDrafter] = {
        "exit": ReducedVocabulary(EarlyExit(2), tokens),
        "skip": ReducedVocabulary(LayerSkip(layers=[2, 3]), tokens),
    }
    with torch.no_grad():
        p = llama(input_ids=ids).logits[0, :-1].softmax(-1)
        logits = with_layers(llama, [0, 1])(input_ids=ids).logits[0, :-1]
    q = torch.zeros_like(p)
    q[:, list(tokens)] = logits[:, list(tokens)].softmax(-1)
    expected = float(torch.minimum(p, q).sum(-1).mean())
    # Leaving out the last layers is leaving early; and either way of reading says the same.
    texts = [Continuation(ids)]
    for found in (first_steps(llama, find_adapter(llama), drafters, texts, 1.0), _apart(llama, drafters, texts, 1.0)):
        assert {name: acceptance_rate(each).value for name, each in found.items()} == pytest.approx(
            dict.fromkeys(drafters, expected)
        )


def test_the_model_accepts_its_own_text_as_its_own(llama: PreTrainedModel) -> None:
    texts = continued(llama, [tiny.prompt(4), tiny.prompt(6, seed=1)], 5, temperature=0.0)
    assert [text.prompt for text in texts] == [4, 6]
    assert [text.ids.shape for text in texts] == [(1, 9), (1, 11)]
    expected = llama.generate(tiny.prompt(4), max_new_tokens=5, do_sample=False)
    assert torch.equal(texts[0].ids, expected)
    sampled = continued(llama, [tiny.prompt(4)], 5, temperature=0.8, seed=3)
    assert torch.equal(sampled[0].ids, continued(llama, [tiny.prompt(4)], 5, temperature=0.8, seed=3)[0].ids)


def test_a_draft_that_does_not_fit_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(DraftConfigError, match="out of range"):
        first_steps(llama, find_adapter(llama), {"x": EarlyExit(9)}, [Continuation(tiny.prompt(4))])


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 0.0),
        (list(range(30)), 0.0),
        ([7] * 20, 12 / 13),
        ([1, 2, 3, 4] * 5, 9 / 13),
        ([*range(10, 30), *[1, 2, 3, 4, 5] * 4], 8 / 33),
        ([*range(10)] * 2, 3 / 13),
        # A short run, such as indentation, is ordinary text.
        ([0, 0, 0, 0, 0, 1, 2, 3, 4, 5], 0.0),
    ],
)
def test_runs_of_eight_tokens_that_came_before_are_repeats(tokens: list[int], share: float) -> None:
    assert repeated_share(tokens) == pytest.approx(share)


def test_the_exits_loss_teaches_the_layers_before_it_and_the_head_but_none_behind() -> None:
    model = tiny.llama()
    readout = Readout(model, find_adapter(model))
    with readout.recorded([2]) as states:
        model(input_ids=tiny.prompt(5))
    readout.logits(states[2]).sum().backward()
    taught = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert {"model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"} <= taught
    assert not any(name.startswith(("model.layers.2", "model.layers.3")) for name in taught)
    # Recording ends with its block, even after an error.
    with pytest.raises(ZeroDivisionError), readout.recorded([1]) as states:
        raise ZeroDivisionError
    model(input_ids=tiny.prompt(3))
    assert states == {}


def test_dropout_skips_layers_by_sample(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    ids = tiny.prompt(6, batch=8)
    layers = find_adapter(model).decoder_layers(model)
    with torch.no_grad():
        kept, skipped = model(input_ids=ids).logits, with_layers(model, [0, 1, 3])(input_ids=ids).logits
        torch.manual_seed(3)
        with layer_dropout(layers, [0.0, 0.0, 0.5, 0.0]):
            dropped = model(input_ids=ids).logits
        # It ends with its block.
        assert torch.equal(model(input_ids=ids).logits, kept)
    as_kept, as_skipped = (list(map(torch.allclose, dropped, each)) for each in (kept, skipped))
    assert [one != other for one, other in zip(as_kept, as_skipped, strict=True)] == [True] * 8
    assert 0 < sum(as_kept) < 8


_FIRST = 4
_PATHS = [
    LayerPath.up_to(tiny.DEPTH, Sublayer(2, Part.ATTENTION)),
    LayerPath.without(tiny.DEPTH, [Sublayer(1, Part.ATTENTION)]),
    LayerPath.without(tiny.DEPTH, [Sublayer(1, Part.ATTENTION), Sublayer(3, Part.MLP)]),
    LayerPath.without(tiny.DEPTH, [Sublayer(1, Part.ATTENTION), Sublayer(1, Part.MLP)]),
    LayerPath.without(tiny.DEPTH, [Sublayer(0, Part.MLP), Sublayer(2, Part.ATTENTION), Sublayer(3, Part.ATTENTION)]),
    LayerPath.without(tiny.DEPTH, [Sublayer(3, Part.MLP)]),
]


def _steps(model: PreTrainedModel, path: LayerPath, row: torch.Tensor, start: int, reach: int = _REACH) -> torch.Tensor:
    """What the loop's draft steps say from `start` on, teacher-forced, `[reach, vocab]`."""
    cache = SharedCache(tiny.DEPTH, 1, row.shape[0], reach, torch.device("cpu"))
    passes = ModelRunner(model, find_adapter(model), cache)
    cache.cursors.reserve(row.shape[0])
    passes.prefill(row[None, :start], [start])
    cache.commit([start])
    tokens = enumerate(row[None, start : start + reach].split(1, 1))
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
_DRAFTER = LayerSkip(attention=[2])


@pytest.fixture(scope="module")
def prompt(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    ids: Tensor = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    return ids


@pytest.mark.tools
def test_sampled_rounds_are_those_of_generations_in_the_mean(exact_stories: PreTrainedModel, prompt: Tensor) -> None:
    drafter, length, rows = _DRAFTER, 3, 64
    spec = selfspec.wrap(exact_stories, draft=drafter, draft_length=length, accept="token")
    many = prompt.repeat(rows, 1)
    output = spec.generate(many, max_new_tokens=_NEW, do_sample=True, top_k=0, eos_token_id=None, seed=1)
    others = selfspec.wrap(exact_stories).generate(
        many, max_new_tokens=_NEW, do_sample=True, top_k=0, eos_token_id=None, seed=2
    )
    path, views = DraftPath(drafter.path(5)), LayerViews(exact_stories, find_adapter(exact_stories))
    texts = [Continuation(row, prompt.shape[1]) for row in others.sequences.split(1)]
    figures = teacher_forced_figures(views, texts, [path], length, 1.0)[0]
    expected = [expected_rounds(each, length) for each in figures]
    # About 1,500 and 900 draft tokens each: a standard error is 0.013 and 0.017.
    for position in range(length):
        found = output.stats.accepted_per_depth[position] / output.stats.judged_per_depth[position]
        accepted, judged = (sum(getattr(each, name)[position] for each in expected) for name in ("accepted", "judged"))
        assert accepted / judged == pytest.approx(found, abs=0.06)
    committed = sum(each.tokens for each in expected) / sum(each.rounds for each in expected)
    assert committed == pytest.approx(output.stats.mean_accepted_length, rel=0.04)


def test_texts_of_several_lengths_are_what_each_is_alone(exact_stories: PreTrainedModel, prompt: Tensor) -> None:
    output = selfspec.wrap(exact_stories).generate(prompt, max_new_tokens=_NEW, do_sample=False, eos_token_id=None)
    path, views = DraftPath(_DRAFTER.path(5)), LayerViews(exact_stories, find_adapter(exact_stories))
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

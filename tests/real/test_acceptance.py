"""A table of acceptance on a real checkpoint, beside steps of the stock modules under hooks, and beside generations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import selfspec
from helpers.engines import Real
from real.checkpoints import read_prompts
from selfspec.model.stock_passes import over_cache
from selfspec.tools.lab.table import records

pytestmark = pytest.mark.real
pytest.importorskip("pandas")

NEW, LENGTH, TEXTS = 16, 4, 3
# Layers of SmolLM2-135M whose attention, and whose MLP, each draft leaves out.
LEFT_OUT: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    **{f"exit:{layer}": (range(layer, 30), range(layer, 30)) for layer in (9, 18, 24, 27, 29)},
    **{f"skip:attn={layer}": ([layer], []) for layer in (2, 14, 25)},
    **{f"skip:mlp={layer}": ([], [layer]) for layer in (8, 20)},
    "skip:layers=12": ([12], [12]),
    "skip:attn=5,21;mlp=16": ([5, 21], [16]),
}


@contextmanager
def without(model: PreTrainedModel, attention: Sequence[int], mlp: Sequence[int]) -> Iterator[None]:
    """Let sublayers of the stock model add nothing, by hooks alone."""

    def nothing(_: nn.Module, __: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    layers: Any = model.model.layers
    modules = [*(layers[each].self_attn for each in attention), *(layers[each].mlp for each in mlp)]
    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(nothing).remove)
        yield


def drafted(model: PreTrainedModel, exact: DynamicCache, token: int, at: int, most: int) -> Iterator[int]:
    """Draft greedily behind the token at a place, before which keys and values are the whole model's."""
    cache = DynamicCache(config=model.config)
    for number, layer in enumerate(exact.layers):
        assert layer.keys is not None
        assert layer.values is not None
        cache.update(layer.keys[:, :, :at], layer.values[:, :, :at], number)
    for _ in range(most):
        token = int(model(torch.tensor([[token]]), **over_cache(model, cache)).logits[0, -1].argmax())
        yield token


@torch.no_grad()
def counted(model: PreTrainedModel, texts: Sequence[Tensor], first: Sequence[int], draft: str) -> dict[str, float]:
    """Count what rounds of greedy texts accept, step by step, and how often the first token of a draft is right."""
    judged = accepted = rounds = right = tokens = 0
    for ids, prompt in zip(texts, first, strict=True):
        exact, text = DynamicCache(config=model.config), ids[0].tolist()
        model(ids, **over_cache(model, exact))
        with without(model, *LEFT_OUT[draft]):
            right += sum(
                next(drafted(model, exact, text[at - 1], at - 1, 1)) == text[at] for at in range(prompt, len(text))
            )
            at = prompt
            while at < len(text):
                rounds += 1
                for token in drafted(model, exact, text[at - 1], at - 1, min(LENGTH, len(text) - at - 1)):
                    judged += 1
                    if token != text[at]:
                        break
                    accepted, at = accepted + 1, at + 1
                at += 1
        tokens += len(text) - prompt
    return {"acceptance_rate": accepted / judged, "mean_accepted_length": tokens / rounds, "alpha": right / tokens}


def test_a_table_is_what_hooks_on_the_stock_model_count(real: Callable[[str], Real]) -> None:
    checkpoint = real("smollm2")
    model = checkpoint.model
    prompts = [checkpoint.ids(line["prompt"]) for line in read_prompts()[:TEXTS]]
    asked: dict[str, Any] = {"max_new_tokens": NEW, "temperatures": 0.0, "confirm": 0, "pricing": "weights"}
    table = selfspec.ablate(model, prompts, drafts=[*LEFT_OUT], draft_lengths=LENGTH, **asked)
    own = [checkpoint.stock(ids, NEW) for ids in prompts]
    texts = [torch.cat([ids, torch.tensor([new])], 1) for ids, new in zip(prompts, own, strict=True)]
    rows = {row["draft"]: row for row in records(table)}
    assert rows.keys() == LEFT_OUT.keys()
    for draft, row in rows.items():
        expected = counted(model, texts, [ids.shape[1] for ids in prompts], draft)
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=5e-5), draft


def test_generations_accept_what_a_table_says(real: Callable[[str], Real]) -> None:
    checkpoint, drafts = real("smollm2"), [*LEFT_OUT]
    prompts = [checkpoint.ids(line["prompt"]) for line in read_prompts()[: 2 * TEXTS]]
    asked: dict[str, Any] = {"max_new_tokens": 2 * NEW, "temperatures": [0.8]}
    how: dict[str, Any] = {"draft_lengths": LENGTH, "confirm": 0, "pricing": "weights"}
    told = selfspec.ablate(checkpoint.model, prompts, drafts=drafts, **how, **asked)
    seen = selfspec.bench(
        checkpoint.model, prompts, drafts, accept=["token"], draft_length=LENGTH, timed=False, **asked
    )
    said, found = ({row["draft"]: row for row in records(each)} for each in (told, seen))
    apart = [
        draft
        for draft, row in said.items()
        if row["acceptance_rate_low"] > found[draft]["acceptance_rate_high"]
        or row["acceptance_rate_high"] < found[draft]["acceptance_rate_low"]
    ]
    assert len(apart) <= len(drafts) / 20, apart

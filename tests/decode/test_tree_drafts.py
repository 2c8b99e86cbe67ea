"""Trees through the loop: greedy text is the stock model's, samples follow the exact joint, paths are committed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

import selfspec
from helpers import tiny
from helpers.drafting import Oracle, Remembering
from helpers.joints import PROMPTS, TOKENS, VOCAB, Warp, holm_rejects, p_values, small
from selfspec.cache.tree import Tree
from selfspec.draft import Budget, Draft, Stateless

FORK = Tree((-1, -1, 0, 0, 1, 2, 4))
SHAPES = [Tree((-1, -1, -1)), FORK, Tree((-1, 0, -1, 2, 3, 3))]


@dataclass(frozen=True)
class Random(Stateless):
    """Draws siblings without replacement from a q of its own, with no model."""

    tree: Tree
    q: Tensor
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7), compare=False)

    def propose(self, batch: Any, budget: Budget) -> Draft:
        tree = Tree(self.tree.parents[: budget.nodes])
        rows = len(batch.running)
        tokens, probs = torch.zeros(rows, len(tree), dtype=torch.long), torch.zeros(rows, len(tree), VOCAB)
        for children in tree.children:
            left = self.q.expand(rows, -1)
            for node in children:
                probs[:, node] = left / left.sum(-1, keepdim=True)
                tokens[:, node] = torch.multinomial(probs[:, node], 1, generator=self.generator)[:, 0]
                left = left.scatter(-1, tokens[:, node, None], 0.0)
        return Draft(tokens, tree, probs)


def stock(model: Any, ids: Tensor, **options: Any) -> Any:
    kept: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    return model.generate(ids, do_sample=False, eos_token_id=None, pad_token_id=0, **kept, **options)


class Never:
    """A criterion with memory, as far as one can know: it needs all rows at one length."""

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.zeros(ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("tree", SHAPES, ids=str)
def test_greedy_text_is_stock_text(architecture: str, tree: Tree, lockstep: bool) -> None:
    model, ids = tiny.BUILDERS[architecture](), tiny.prompt(9, 3)
    expected = stock(model, ids, max_new_tokens=24)
    drafter = Oracle(tree, expected.sequences[:, ids.shape[1] :])
    spec = selfspec.wrap(model, drafter, draft_length=len(tree))
    criteria = [Never()] if lockstep else None
    output = spec.generate(
        ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0, stopping_criteria=criteria
    )
    assert torch.equal(output.sequences, expected.sequences)
    assert output.stats.mean_accepted_length > 1.5
    assert len(output.stats.judged_per_depth) == tree.depth


def test_scores_and_processors_follow_the_path(llama: Any) -> None:
    ids = tiny.prompt(9, 2)
    options: dict[str, Any] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "max_new_tokens": 20}
    expected = stock(llama, ids, **options)
    drafter = Oracle(FORK, expected.sequences[:, ids.shape[1] :])
    kept: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output = selfspec.wrap(llama, drafter, draft_length=len(FORK)).generate(
        ids, do_sample=False, eos_token_id=None, pad_token_id=0, **kept, **options
    )
    assert torch.equal(output.sequences, expected.sequences)
    assert output.stats.mean_accepted_length > 1.5
    for ours, theirs in ((output.scores, expected.scores), (output.logits, expected.logits)):
        assert ours is not None
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-5, rtol=0, check_dtype=False)


@pytest.mark.statistical
@pytest.mark.parametrize("rule", ["token", "block"])
def test_samples_follow_the_exact_joint(rule: str) -> None:
    found: dict[str, float] = {}
    q = torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05])
    for number, tree in enumerate(SHAPES):
        spec = selfspec.wrap(small(seed=number), Random(tree, q), draft_length=len(tree), accept=rule)
        warp, prompt = (Warp(), Warp(temperature=1.4, top_k=3), Warp(top_p=0.8))[number], PROMPTS[number % 2]
        found |= p_values(spec, warp, prompts=[prompt], rows=256)
    assert holm_rejects(found, 0.01) == []


def test_processors_with_memory_refuse_a_tree_by_name() -> None:
    spec = selfspec.wrap(small(), Random(FORK, torch.full((VOCAB,), 1 / VOCAB)), draft_length=len(FORK))
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": True, "seed": 0}
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="stateless = True"):
        spec.generate(torch.tensor([PROMPTS[0]]), logits_processor=LogitsProcessorList([Remembering()]), **options)
    plain = spec.generate(torch.tensor([PROMPTS[0]]), **options)
    assert plain.sequences.shape[1] > len(PROMPTS[0])

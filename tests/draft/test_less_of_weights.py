"""Drafts with less of the weights: fewer experts, and fewer rows of the head, outside of which nothing is drafted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import selfspec
from helpers import stories, tiny
from helpers.drafting import GREEDY, stock
from helpers.shrunken import shrunken
from selfspec.draft import EarlyExit, ExitHead, FewerExperts, LayerSkip, LowPrecision, ReducedVocabulary
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError
from selfspec.tools.train.corpus import count_vocabulary, most_frequent


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_greedy_text_of_families_is_stock_text(family: str) -> None:
    model, ids = shrunken(family).double(), tiny.prompt(12, 3).clamp(min=3)
    draft = FewerExperts(EarlyExit(3) if family == "deepseek_v3" else LowPrecision())
    spec = selfspec.wrap(model, draft, draft_length=selfspec.FixedLength(3, nodes=7))
    assert torch.equal(spec.generate(ids, max_new_tokens=16, **GREEDY).sequences, stock(model, ids, 16))


def test_it_costs_what_it_reads() -> None:
    model = shrunken("mixtral")
    adapter = selfspec.wrap(model).adapter
    assert FewerExperts().cost(model, adapter) < 1
    assert FewerExperts(LowPrecision()).cost(model, adapter) < LowPrecision().cost(model, adapter)


_KEPT = tuple(range(1, 50, 3))


@pytest.mark.parametrize("inner", [EarlyExit(2), LayerSkip(attention=[1], mlp=[2])])
def test_greedy_text_is_the_models_own_and_drafts_stay_inside(architecture: str, inner: LayerPathDrafter) -> None:
    model = tiny.BUILDERS[architecture]()
    ids = tiny.prompt(7)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    spec = selfspec.wrap(model, draft=ReducedVocabulary(inner, _KEPT), draft_length=4)
    rounds = [chunk.rows[0] for chunk in spec.stream(ids, max_new_tokens=20, do_sample=False)]
    assert [token for row in rounds for token in row.tokens] == expected[0, 7:].tolist()
    assert {token for row in rounds for token in row.draft} <= set(_KEPT)


def test_the_whole_vocabulary_in_another_order_changes_nothing() -> None:
    model = tiny.gpt2()
    ids = tiny.prompt(5)
    rounds = [
        [
            row.rows[0]
            for row in selfspec.wrap(model, draft=drafter, draft_length=4).stream(
                ids, max_new_tokens=15, do_sample=False
            )
        ]
        for drafter in (EarlyExit(2), ReducedVocabulary(EarlyExit(2), tuple(reversed(range(tiny.VOCABULARY)))))
    ]
    assert rounds[0] == rounds[1]


def test_an_exit_head_may_have_fewer_rows_too(tmp_path: Path) -> None:
    from selfspec.model.identity import fingerprint
    from selfspec.tools.train.exit_heads import ExitHeads

    model = tiny.llama()
    ExitHeads(32, 8, (2,)).save(tmp_path, torch.float32, fingerprint(model), 2, {})
    drafter = ReducedVocabulary(ExitHead.from_pretrained(tmp_path), _KEPT)
    rounds = [
        row.rows[0]
        for row in selfspec.wrap(model, draft=drafter, draft_length=4).stream(tiny.prompt(5), max_new_tokens=9)
    ]
    assert {token for row in rounds for token in row.draft} <= set(_KEPT)
    with pytest.raises(selfspec.errors.ExitHeadError):
        selfspec.wrap(tiny.llama(seed=1), draft=drafter, draft_length=4)


def test_the_most_frequent_tokens_are_counted() -> None:
    assert most_frequent(torch.tensor([[3, 3, 3, 7], [7, 1, 0, 3]]), 2, 10).tolist() == [3, 7]
    with pytest.raises(selfspec.errors.TrainingError, match="out of range"):
        most_frequent(torch.zeros(1, 1, dtype=torch.long), 11, 10)


def test_a_vocabulary_comes_back_from_its_file(tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "v.json"
    text.write_text("Once upon a time there was a little girl. She was happy and she was little.\n" * 9)
    coverage = count_vocabulary(str(stories.checkpoint_folder()), [text], 8, file)
    tokens = ReducedVocabulary.from_file(EarlyExit(1), file).tokens
    ids = AutoTokenizer.from_pretrained(stories.checkpoint_folder())(text.read_text()).input_ids
    assert len(tokens) == 8
    assert coverage == pytest.approx(sum(map(ids.count, tokens)) / len(ids))
    assert coverage == json.loads(file.read_text())["coverage"]
    with pytest.raises(selfspec.errors.TrainingError, match="exists"):
        count_vocabulary(str(stories.checkpoint_folder()), [text], 8, file)


@pytest.mark.parametrize("content", ["{", "[1]", json.dumps({"tokens": 3}), json.dumps({"tokens": ["a"]})])
def test_a_file_that_is_no_vocabulary_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "v.json").write_text(content)
    with pytest.raises(DraftConfigError):
        ReducedVocabulary.from_file(EarlyExit(1), tmp_path / "v.json")


def test_rows_in_fewer_bits_are_kept_and_follow_the_head() -> None:
    model, ids = tiny.llama(dtype=torch.float32), tiny.prompt(7)
    spec = selfspec.wrap(model, draft=ReducedVocabulary(LowPrecision(), _KEPT))
    whole = selfspec.wrap(model, draft=LowPrecision())

    def drafted() -> set[int]:
        rounds = [chunk.rows[0] for chunk in spec.stream(ids, max_new_tokens=20, do_sample=False)]
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert [token for row in rounds for token in row.tokens] == expected[0, 7:].tolist()
        return {token for row in rounds for token in row.draft}

    assert drafted() <= set(_KEPT)
    kept = spec.generate(ids, max_new_tokens=4, do_sample=False).stats.substitute_bytes
    assert kept == spec.generate(ids, max_new_tokens=4, do_sample=False).stats.substitute_bytes
    assert kept < whole.generate(ids, max_new_tokens=4, do_sample=False).stats.substitute_bytes
    with torch.no_grad():
        model.lm_head.weight[:] = 0
        model.lm_head.weight[4] = model.model.norm.weight
    # All else has the same logit, and no draft is of another token.
    assert drafted() <= {1, 4}

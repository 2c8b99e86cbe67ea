"""Suffix trees: what followed in the text, in earlier ones and in a corpus, several ways at once, by counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import GREEDY
from helpers.joints import small
from helpers.saved_folders import Change, rewrite
from selfspec.draft import Suffixes
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.draft.suffixes import CorpusFile, TextMemory, write_corpus
from selfspec.model.identity import Vocabulary


@pytest.fixture
def corpus(llama: PreTrainedModel, tmp_path: Path) -> str:
    """Texts that go on in two ways after 5 6, one of them three times as often."""
    file = tmp_path / "corpus.safetensors"
    texts = [[9, 5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9], [3, 5, 6, 7, 8], [5, 6, 11, 12]]
    assert write_corpus(file, texts, Vocabulary.of(llama)) == 21
    return str(file)


def test_several_continuations_of_a_corpus_are_drafted_the_more_frequent_first(
    llama: PreTrainedModel, corpus: str
) -> None:
    spec = selfspec.wrap(llama, Suffixes(corpus), draft_length=selfspec.FixedLength(2, nodes=5))
    first = next(spec.stream(torch.tensor([[1, 5, 6]]), max_new_tokens=8, **GREEDY))
    draft = list(first.rows[0].draft)
    assert {7, 8, 11} <= set(draft)
    assert draft.index(7) < draft.index(11)


def test_what_was_written_is_drafted_by_this_wrapper_until_it_forgets(llama: PreTrainedModel) -> None:
    spec, ids = selfspec.wrap(llama, "suffix", draft_length=7), tiny.prompt(9, seed=4)
    first, again = (spec.generate(ids, max_new_tokens=32, **GREEDY) for _ in range(2))
    assert torch.equal(first.sequences, again.sequences)
    assert again.stats.rounds < first.stats.rounds
    assert again.stats.mean_accepted_length > 4
    assert 4 * 32 <= first.stats.draft_bytes <= again.stats.draft_bytes <= 1 << 20
    spec.forget()
    assert spec.generate(ids, max_new_tokens=32, **GREEDY).stats.rounds == first.stats.rounds
    alone = selfspec.wrap(llama, Suffixes(most_bytes=0), draft_length=7)
    assert len({alone.generate(ids, max_new_tokens=32, **GREEDY).stats.rounds for _ in range(2)}) == 1


def test_kept_texts_take_no_more_than_their_bytes(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, Suffixes(most_bytes=120), draft_length=7)
    for seed in range(3):
        spec.generate(tiny.prompt(9, 2, seed).clamp(min=1), max_new_tokens=24, **GREEDY)
    (memory,) = spec._memories.values()
    assert isinstance(memory, TextMemory)
    assert 100 < memory.tokens.nbytes <= 120


def test_names(corpus: str) -> None:
    for name in ("suffix", f"suffix:{corpus}", "suffix+exit:2", f"suffix:{corpus}+recycle+int8"):
        assert draft_name(parse_draft(name)) == name
    assert parse_draft("suffix") == Suffixes()
    assert parse_draft(f"suffix:{corpus}") == Suffixes(corpus)


def test_a_corpus_of_another_tokenizer_is_refused_before_any_pass(corpus: str) -> None:
    with pytest.raises(selfspec.errors.DraftConfigError, match="another tokenizer"):
        selfspec.wrap(small(), f"suffix:{corpus}")
    assert not Vocabulary(9, "a").is_same(Vocabulary(9, "b"))
    assert Vocabulary(9, "a").is_same(Vocabulary(32, "a"))
    assert not Vocabulary(9, "").is_same(Vocabulary(32, "a"))


def test_files_that_hold_no_corpus_are_refused(corpus: str, tmp_path: Path, llama: PreTrainedModel) -> None:
    content = Path(corpus).read_bytes()
    broken = tmp_path / "broken"
    for damaged in (content[:40], content[:-8], b"", b"\0" * 64):
        broken.write_bytes(damaged)
        with pytest.raises(selfspec.errors.DraftConfigError, match="cannot be read as a corpus"):
            Suffixes(str(broken))
    with pytest.raises(selfspec.errors.DraftConfigError, match="cannot be read"):
        Suffixes(str(tmp_path / "missing"))
    changes: list[Change] = [
        lambda tensors, _: tensors["ends"].__setitem__(3, 99),
        lambda tensors, _: tensors["ends"].__setitem__(3, 0),
        lambda tensors, _: tensors["tokens"].__setitem__(3, -2),
        lambda tensors, _: tensors.update(ends=tensors["ends"][:-1].clone()),
        lambda tensors, _: tensors.update(tokens=torch.cat([tensors["tokens"], tensors["tokens"]])),
    ]
    for change in changes:
        broken.write_bytes(content)
        rewrite(broken, change)
        with pytest.raises(selfspec.errors.DraftConfigError, match="holds no corpus"):
            CorpusFile(broken)
    with pytest.raises(selfspec.errors.DraftConfigError, match="needs texts with tokens"):
        write_corpus(tmp_path / "none", [[], []], Vocabulary.of(llama))

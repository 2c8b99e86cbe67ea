"""An assistant: a second model drafts over a cache of its own, which reads what each row commits and drafts."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

import selfspec
from helpers import tiny
from helpers.any_rounds import (
    FIRST_WORD,
    NODES,
    a_number_for_each_row,
    alone,
    any_rounds,
    shrunken_model,
    tiny_model,
    trees,
)
from helpers.drafting import GREEDY, near
from helpers.joints import assert_rows_are_stock, padded
from helpers.shrunken import shrunken
from helpers.snapshot import Snapshot
from selfspec.adapters import ADAPTERS
from selfspec.cache.tree import Tree
from selfspec.decode.sequences import Sequences
from selfspec.draft import Assistant, Drafter
from selfspec.draft.assistant import AssistantProposer
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.draft.rows_view import RowsView
from selfspec.draft.tree_growth import by_level, growth_of
from selfspec.runtime.runner import ModelRunner

PROMPTS = [tiny.prompt(length, seed=length).clamp(min=1) for length in (3, 9, 6)]


def test_an_equal_model_is_accepted_whole(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, Assistant(deepcopy(llama)), draft_length=3)
    output = spec.generate(tiny.prompt(9, 2), max_new_tokens=32, **GREEDY)
    assert output.stats.acceptance_rate == 1
    assert output.stats.mean_accepted_length == 4


def test_a_chat_goes_on_from_its_cache(llama: PreTrainedModel) -> None:
    spec = selfspec.wrap(llama, Assistant(near(llama, 0.01)), draft_length=3)
    options: dict[str, Any] = {"max_new_tokens": 12, **GREEDY}
    past, text = DynamicCache(), tiny.prompt(9)
    for seed in range(3):
        expected = llama.generate(text, **options)
        output = spec.generate(text, cache=past, **options)
        assert torch.equal(output.sequences, expected)
        assert output.stats.acceptance_rate > 0.6
        text = torch.cat([expected, tiny.prompt(4, seed=seed)], 1)


def test_processors_filter_the_draft_too(llama: PreTrainedModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "no_repeat_ngram_size": 2, "repetition_penalty": 1.4, **GREEDY}
    output = selfspec.wrap(llama, Assistant(deepcopy(llama)), draft_length=3).generate(tiny.prompt(9, 2), **options)
    assert torch.equal(output.sequences, llama.generate(tiny.prompt(9, 2), **options))
    assert output.stats.acceptance_rate == 1


def test_a_shorter_context_ends_its_drafts_and_not_the_text() -> None:
    model = tiny.gpt2()
    assistant = tiny.gpt2(n_positions=24)
    spec = selfspec.wrap(model, Assistant(assistant), draft_length=5)
    rounds = list(spec.stream(tiny.prompt(9), max_new_tokens=40, **GREEDY))
    assert torch.equal(
        spec.generate(tiny.prompt(9), max_new_tokens=40, **GREEDY).sequences,
        model.generate(tiny.prompt(9), max_new_tokens=40, **GREEDY),
    )
    assert rounds[0].steps == 5
    assert rounds[-1].steps == 0


def test_both_models_are_as_they_were(llama: PreTrainedModel) -> None:
    assistant = near(llama)
    before = [Snapshot(llama), Snapshot(assistant)]
    spec = selfspec.wrap(llama, Assistant(assistant), draft_length=3)
    next(spec.stream(tiny.prompt(9), max_new_tokens=24, **GREEDY))
    assert_rows_are_stock(llama, spec, PROMPTS, max_new_tokens=40, eos_token_id=7)
    before[0].assert_same(llama)
    before[1].assert_same(assistant)


def test_bytes_are_counted(llama: PreTrainedModel) -> None:
    assistant = tiny.llama(num_hidden_layers=2)
    output = selfspec.wrap(llama, Assistant(assistant)).generate(tiny.prompt(9), max_new_tokens=8, **GREEDY)
    weights = sum(weight.nbytes for weight in assistant.parameters())
    assert weights < output.stats.draft_bytes <= weights + output.stats.cache_bytes
    assert 0.5 < Assistant(assistant).cost(llama, ADAPTERS["llama"]) < 0.6


def saved(folder: Path, tokens: int = tiny.VOCABULARY, **options: Any) -> PreTrainedModel:
    """A checkpoint with a tokenizer of so many tokens, loaded from its folder."""
    words = {f"w{number}": number for number in range(tokens)}
    words |= {f"{word}-": words.pop(word) for word in ("w7",) if "odd" in folder.name}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0"))).save_pretrained(folder)
    tiny.llama(**options).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def test_a_folder_is_loaded_as_the_model_is(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    saved(tmp_path / "small", num_hidden_layers=2, dtype=torch.float32)
    for name in (f"assistant:{tmp_path / 'small'}", f"lookup+assistant:{tmp_path / 'small'}"):
        spec = selfspec.wrap(model, name, draft_length=3)
        assert_rows_are_stock(model, spec, PROMPTS, max_new_tokens=24)
        assert isinstance(spec.draft, Drafter)
        assert draft_name(spec.draft) == name
    draft = parse_draft(f"assistant:{tmp_path / 'small'}")
    assert isinstance(draft, Assistant)
    selfspec.wrap(model, draft)
    assert draft.model.dtype is torch.float64
    assert repr(draft) == f"Assistant('{tmp_path / 'small'}')"


@pytest.mark.parametrize("padded_to", [48, 56])
def test_vocabularies_of_one_family_may_be_padded_to_other_sizes(tmp_path: Path, padded_to: int) -> None:
    model = saved(tmp_path / "model", tokens=48)
    assistant = saved(tmp_path / "small", tokens=48, vocab_size=padded_to)
    spec = selfspec.wrap(model, Assistant(assistant), draft_length=3)
    # Greedily and sampled, the model says tokens that the assistant does not know, too.
    assert_rows_are_stock(model, spec, PROMPTS, max_new_tokens=16)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "seed": 0}
    assert spec.generate(tiny.prompt(9, 4), **options).stats.accepted > 0


def test_a_folder_needs_no_tokenizer_where_the_sizes_are_equal(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    for name, tokens in (("small", tiny.VOCABULARY), ("other", tiny.VOCABULARY + 1)):
        tiny.llama(num_hidden_layers=2, vocab_size=tokens).save_pretrained(tmp_path / name)
    spec = selfspec.wrap(model, f"assistant:{tmp_path / 'small'}", draft_length=3)
    assert_rows_are_stock(model, spec, PROMPTS, max_new_tokens=24)
    with pytest.raises(selfspec.errors.DraftConfigError, match="a vocabulary of 51, the model one of 50"):
        selfspec.wrap(model, f"assistant:{tmp_path / 'other'}")


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    with pytest.raises(
        selfspec.errors.DraftConfigError, match="token 7 is 'w7-' for the assistant and 'w7' for the model"
    ):
        selfspec.wrap(model, Assistant(saved(tmp_path / "odd")))


def test_what_is_no_assistant_is_refused(tmp_path: Path, llama: PreTrainedModel) -> None:
    with pytest.raises(selfspec.errors.CheckpointError, match="does not exist"):
        parse_draft(f"assistant:{tmp_path / 'absent'}")
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="Linear is not a transformers model"):
        Assistant(torch.nn.Linear(1, 1))
    for wrong in (5, None, selfspec.wrap(llama)):
        with pytest.raises(selfspec.errors.DraftConfigError, match="a model, or the folder of a checkpoint"):
            Assistant(wrong)  # type: ignore[arg-type]
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="meta device"):
        Assistant(tiny.llama().to("meta"))
    training = Assistant(tiny.llama(attention_dropout=0.1).train())
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="training mode"):
        selfspec.wrap(llama, training)


def test_prompts_that_it_cannot_read_are_refused_before_any_pass(llama: PreTrainedModel) -> None:
    calls: list[Any] = []
    llama.model.register_forward_hook(lambda *_: calls.append(1))
    spec = selfspec.wrap(llama, Assistant(tiny.llama()))
    embeddings = llama.get_input_embeddings()(tiny.prompt(9)).detach()
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="the assistant LlamaForCausalLM reads token ids"):
        spec.stream(inputs_embeds=embeddings, max_new_tokens=8)
    one_row = selfspec.wrap(llama, Assistant(shrunken("roformer")))
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="one prompt at a time"):
        one_row.stream(tiny.prompt(9, 2), max_new_tokens=8)
    chains = selfspec.wrap(llama, Assistant(shrunken("gpt_neo")), draft_length=selfspec.CostAware(3, nodes=6))
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="cannot read a tree"):
        chains.stream(tiny.prompt(9), max_new_tokens=8)
    moved = Assistant(tiny.llama())
    spec = selfspec.wrap(llama, moved)
    moved.model.to("meta")
    with pytest.raises(selfspec.errors.DraftConfigError, match="is on meta and the model on cpu"):
        spec.stream(tiny.prompt(9), max_new_tokens=8)
    assert not calls


def test_it_is_not_saved_with_the_model(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    for draft in (Assistant(deepcopy(model)), f"assistant:{tmp_path / 'model'}"):
        with pytest.raises(selfspec.errors.DraftConfigError, match="cannot be saved"):
            selfspec.wrap(model, draft).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


_LIMIT, _ROWS = 90, 3


class _View:
    """What the assistant reads of a batch's rows."""

    vocabulary = tiny.VOCABULARY

    def __init__(self, sequences: Sequences) -> None:
        self.running, self.text, self.text_length = sequences.running, sequences.text_from, sequences.text_length

    @property
    def runner(self) -> _View:
        return self


class AnyCommits(RuleBasedStateMachine):
    """Rounds that draft or do not, and commit any number of tokens in each row; rows that end, and are dropped."""

    architecture = "llama"
    bucket = 1
    branches = True
    tolerance: ClassVar[float] = 1e-9

    def built(self) -> PreTrainedModel:
        return tiny_model(self.architecture, "sdpa")

    @initialize(
        lengths=st.lists(st.integers(1, 9) | st.integers(55, 66), min_size=1, max_size=_ROWS), seed=st.integers(0, 99)
    )
    def begin(self, lengths: list[int], seed: int) -> None:
        self.noise = torch.Generator().manual_seed(seed)
        self.model, adapter = self.built(), ADAPTERS[self.architecture]
        self.prompts = [self._random(1, length) for length in lengths]
        ids, mask = padded(self.prompts)
        self.sequences = Sequences(ids, 0, mask.bool())
        cache = adapter.shared_cache(self.model, len(lengths), _LIMIT, NODES, bucket=self.bucket)
        runner = ModelRunner(self.model, adapter, cache)
        self.state = AssistantProposer(cast(RowsView, _View(self.sequences)), runner, weights=0)

    @rule(tree=trees(least=1), ends=a_number_for_each_row(-2, NODES - 1), own=st.integers(1, 3))
    def drafted(self, tree: Tree, ends: list[int], own: int) -> None:
        """The assistant drafts; each row commits a path of that, and tokens besides, or nothing."""
        tree = by_level(tree) if self.branches else Tree.chain(len(tree))
        rows, texts = list(self.sequences.running), self._texts()
        drafts = self._random(len(rows), len(tree))
        levels = growth_of(tree, drafts.device).levels
        with torch.no_grad():
            view = cast(RowsView, _View(self.sequences))
            self._check(self.state.after_text(view, tree)[:, 0], texts)
            for level in levels[1:]:
                nodes = range(level.first, level.first + len(level.paths))
                logits = self.state.after(view, drafts[:, nodes.start : nodes.stop], level.first)
                for node, found in zip(nodes, logits.unbind(1), strict=True):
                    paths = [run[list(tree.paths[node])].tolist() for run in drafts]
                    self._check(found, [text + path for text, path in zip(texts, paths, strict=True)])
        for row, run, end in zip(rows, drafts, ends, strict=False):
            if row in self.sequences.unfinished and end > -2:
                path = tree.paths[min(end, len(tree) - 1)] if end >= 0 else ()
                kept = run[list(path)].tolist()[: self._room_of(row)]
                # Lockstep may cut a row behind a draft token.
                extra = self._random(1, own - 1)[0].tolist()[: self._room_of(row) - len(kept)]
                self.sequences.committed[row] += kept + extra

    @rule(counts=a_number_for_each_row(0, 12))
    def committed(self, counts: list[int]) -> None:
        """Another source drafted."""
        for row, count in zip(sorted(self.sequences.unfinished), counts, strict=False):
            self.sequences.committed[row] += self._random(1, min(count, self._room_of(row)))[0].tolist()

    @precondition(lambda self: len(self.sequences.unfinished) > 1)
    @rule(ended=st.integers(0, _ROWS - 1), drop=st.booleans())
    def ended(self, ended: int, drop: bool) -> None:
        self.sequences.unfinished.discard(ended)
        if drop:
            self.sequences.running = [row for row in self.sequences.running if row in self.sequences.unfinished]

    def _room_of(self, row: int) -> int:
        return _LIMIT - self.sequences.text_length(row)

    def _random(self, rows: int, width: int) -> Tensor:
        return torch.randint(FIRST_WORD, tiny.VOCABULARY, (rows, width), generator=self.noise)

    def _texts(self) -> list[list[int]]:
        return [self.prompts[row][0].tolist() + self.sequences.committed[row] for row in self.sequences.running]

    def _check(self, logits: Tensor, texts: list[list[int]]) -> None:
        for text, found in zip(texts, logits, strict=True):
            # What lies past the limit is scrap.
            if len(text) <= _LIMIT:
                torch.testing.assert_close(found, alone(self.model, text, 1)[0], rtol=0, atol=self.tolerance)


class Shrunken(AnyCommits):
    architecture = "bloom"
    branches = False
    tolerance = 1e-4

    def built(self) -> PreTrainedModel:
        return shrunken_model(self.architecture, "eager")


TestAnyCommits = any_rounds(AnyCommits, 8)
TestMistral = any_rounds(AnyCommits, 8, architecture="mistral")
TestGPT2 = any_rounds(AnyCommits, 8, architecture="gpt2")
TestInBuckets = any_rounds(AnyCommits, 8, bucket=16)
TestPadding = any_rounds(Shrunken, 2)
TestRecurrent = any_rounds(Shrunken, 2, architecture="mamba", branches=True)
TestHybrid = pytest.mark.contract(any_rounds(Shrunken, 2, architecture="qwen3_next"))

"""What trainings learn: text that is read and packed, the LayerSkip recipe by its paper, averages with the base.

Draft heads as they learn: what is trained is what an independent computation drafts.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import selfspec
from helpers import reference_heads, tiny
from helpers.saved_folders import checkpoint_folder
from helpers.tokenizers import PLAIN
from selfspec.draft.heads.pairs import PairProposer
from selfspec.errors import CorpusError, TrainingError
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.stock import until_end
from selfspec.model.identity import fingerprint
from selfspec.tools.train import corpus
from selfspec.tools.train.corpus import Blocks, Split
from selfspec.tools.train.eagle3 import Eagle3Lesson
from selfspec.tools.train.recipe import Course, HeadRecipe, LayerSkipRecipe, Texts


def _jsonl(*texts: str) -> bytes:
    return "\n".join(json.dumps({"text": text}) for text in texts).encode() + b"\n"


def test_jsonl_gzip_and_plain_text_are_read(tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", _jsonl("one", "two")),
        ("b.jsonl.gz", gzip.compress(_jsonl("one", "two"))),
        ("c.txt", b"one\ntwo"),
        ("d.txt.gz", gzip.compress(b"one\ntwo")),
    ):
        (tmp_path / name).write_bytes(content)
    assert (
        corpus.read_documents(tmp_path / "a.jsonl") == corpus.read_documents(tmp_path / "b.jsonl.gz") == ["one", "two"]
    )
    assert corpus.read_documents(tmp_path / "c.txt") == corpus.read_documents(tmp_path / "d.txt.gz") == ["one\ntwo"]
    # Other separators of lines stay inside a document.
    text = "one\u2028two\x85three"
    (tmp_path / "e.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert corpus.read_documents(tmp_path / "e.jsonl") == [text]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("truncated.gz", gzip.compress(b"some text that is long enough to cut" * 20, mtime=0)[:-20]),
        ("no_gzip.gz", b"plain"),
        ("damaged.gz", gzip.compress(b"text" * 500, mtime=0)[:14] + b"\xff" * 20),
        ("latin.txt", b"caf\xe9"),
        ("empty.txt", b" \n"),
        ("broken.jsonl", b'{"text": "one"}\n{"text": "tw'),
        ("foreign.jsonl", b'{"content": "one"}\n'),
        ("list.jsonl", b"[1]\n"),
    ],
)
def test_unreadable_text_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=name.split(".")[0]):
        corpus.read_documents(tmp_path / name)


def test_a_text_to_measure_on_that_is_missing_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nowhere\.txt cannot be read"):
        corpus.identified(tmp_path / "nowhere.txt")


def test_what_cannot_be_learnt_from_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(CorpusError, match=r"nowhere\.txt"):
        corpus.read_documents(tmp_path / "nowhere.txt")
    with pytest.raises(CorpusError, match="too few"):
        corpus.packed(["Once"], tokenizer, 100)
    with pytest.raises(CorpusError, match="no chat template"):
        list(corpus.encoded([corpus.Conversation(MESSAGES)], tokenizer))


def test_documents_are_packed_without_gaps_each_behind_its_mark(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["Once upon a time", "there was a dog"]
    parts = [[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids] for text in texts]
    stream = parts[0] + parts[1]
    blocks = corpus.packed(texts, tokenizer, 4)
    assert blocks.ids.flatten().tolist() == stream[: len(stream) // 4 * 4]
    assert blocks.learnt.all()
    assert corpus.packed(texts, tokenizer, 4, most=1).ids.tolist() == [stream[:4]]
    # A text that begins with the mark itself, as chats do that were written down, gets no second one.
    assert corpus.packed([f"{tokenizer.bos_token}Once upon a time"], tokenizer, 1).ids.flatten().tolist() == parts[0]


def test_held_out_blocks_are_not_learnt_from() -> None:
    both = corpus.split(corpus.Blocks.of(torch.arange(60).view(30, 2)), 3)
    assert both.held_out.ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert both.train.ids.flatten().tolist() == list(range(6, 60))
    # Of a short text, a tenth.
    assert len(corpus.split(corpus.Blocks.of(torch.zeros(20, 2)), 3).held_out) == 2
    with pytest.raises(CorpusError, match="single block"):
        corpus.split(corpus.Blocks.of(torch.zeros(1, 2)), 3)
    nothing = corpus.Blocks(torch.zeros(20, 2), torch.zeros(20, 2, dtype=torch.bool))
    with pytest.raises(CorpusError, match="no answer"):
        corpus.split(nothing, 3)
    # Some blocks are taken from all over.
    assert corpus.spread(corpus.Blocks.of(torch.arange(10).view(10, 1)), 3).ids.flatten().tolist() == [0, 3, 6]
    assert len(corpus.spread(corpus.Blocks.of(torch.arange(2).view(2, 1)), 3)) == 2


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    documents = [str(number) for number in range(50)]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, half in zip(files, (documents[:25], documents[25:]), strict=True):
        file.write_bytes(_jsonl(*half))
    assert corpus.all_documents(files, 1) == corpus.all_documents(files, 1) != corpus.all_documents(files, 2)
    assert sorted(map(corpus.plain_text, corpus.all_documents(files, 1))) == sorted(documents)


MESSAGES = (
    {"role": "user", "content": "One day a dog"},
    {"role": "assistant", "content": "ran home."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "It sat."},
)


@pytest.fixture
def chatty() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint_folder())
    found.chat_template = PLAIN.replace("{{ message.content }}", "{{ message.content }}</s>")
    return found


def test_of_conversations_the_answers_are_learnt(tmp_path: Path, chatty: PreTrainedTokenizerBase) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n" + json.dumps({"text": "a tale"}))
    said, text = corpus.read_documents(tmp_path / "chats.jsonl")
    assert corpus.plain_text(said) == "One day a dog\n\nran home.\n\nAnd then?\n\nIt sat."
    (ids, learnt), (_, whole) = corpus.encoded([said, text], chatty)
    assert all(whole)
    parts, places = [], [at for at in range(len(ids)) if learnt[at]]
    for at in places:
        if at - 1 not in places:
            parts.append([ids[at]])
        else:
            parts[-1].append(ids[at])
    # The token that ends an answer is learnt, what the template writes behind it is not.
    assert [chatty.decode(part).strip() for part in parts] == ["ran home.</s>", "It sat.</s>"]
    assert ids.count(chatty.bos_token_id) == 0


def test_beginnings_are_those_of_documents(chatty: PreTrainedTokenizerBase) -> None:
    texts = ["Once upon a time there was a dog", "Tom had a big red ball and", "a"]
    own = [[chatty.bos_token_id, *chatty(text, add_special_tokens=False).input_ids][:4] for text in texts[:2]]
    # Those that are too short are left out, and where there are too few they come again.
    assert corpus.beginnings(texts, chatty, 3, 4, 32) == [*own, own[0]]
    found = corpus.beginnings([corpus.Conversation(MESSAGES)], chatty, 2, 4, 128)
    assert chatty.decode(found[0]).endswith("user: One day a dog</s> \nassistant:")
    assert chatty.decode(found[1]).endswith("user: And then?</s> \nassistant:")
    # A question that nobody has answered is one as well.
    asked = corpus.beginnings([corpus.Conversation(MESSAGES[:-1])], chatty, 2, 4, 128)
    assert asked == found
    assert chatty.decode(corpus.beginnings([corpus.Conversation(MESSAGES[:1])], chatty, 1, 4, 128)[0]).endswith(
        "assistant:"
    )
    with pytest.raises(CorpusError, match="no text has 400 tokens"):
        corpus.beginnings(texts, chatty, 3, 400, 512)


def test_beginnings_of_any_length_are_written_on_and_what_is_written_is_learnt(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = load_checkpoint(str(checkpoint_folder()), "float32", "cpu").model
    begun = [[1, 40, 50, 60, 70, 80], [1, 40], [1, 90, 30, 20]]
    found = corpus.written_text(model, begun, Course(length=16), Texts(text=[], held_out_blocks=1), tmp_path / "kept")
    rows = torch.cat([found.held_out.ids, found.train.ids]).tolist()
    learnt = torch.cat([found.held_out.learnt, found.train.learnt]).tolist()
    for first, row, which in zip(begun, rows, learnt, strict=True):
        assert row[: len(first)] == first
        # The longest of a batch says how much is written; nothing is learnt behind the end of a text.
        own = until_end(row[len(first) : len(first) + 16 - 6], {2})
        assert which == [False] * len(first) + [True] * len(own) + [False] * (16 - len(first) - len(own))


def test_dropout_rises_exponentially_from_none_to_all_of_it() -> None:
    rates = LayerSkipRecipe(dropout=0.2).dropout_rates(12)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.2)
    # D(l) + 1 is a geometric series.
    ratios = [(after / 0.2 + 1) / (before / 0.2 + 1) for before, after in pairwise(rates)]
    assert ratios == pytest.approx([2 ** (1 / 11)] * 11)


def test_rotation_teaches_every_exit_equally_often() -> None:
    recipe = LayerSkipRecipe(rotation=3)
    steps = [recipe.active(10, step, 100) for step in range(3)]
    assert steps == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
    assert recipe.active(10, 3, 100) == steps[0]
    # A gradual curriculum adds exits from the last one, and has all at half time.
    recipe = LayerSkipRecipe(curriculum="gradual")
    found = [recipe.active(5, step, 80) for step in (0, 10, 20, 30, 79)]
    assert found == [[4], [3, 4], [2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]


def test_weights_are_the_papers() -> None:
    recipe = LayerSkipRecipe(exit_scale=0.2)
    # The paper's e(l) with l = E - 1: 0.2 * (0 + ... + l), and for the last layer l + 0.2 * (0 + ... + (l - 1)).
    expected = [0.2 * 1, 0.2 * 6, 5 + 0.2 * 10]
    assert recipe.weights(6, [2, 4]) == pytest.approx([weight / sum(expected) for weight in expected])
    assert LayerSkipRecipe(exit_scale=0.5, weighting="even").weights(12, [2, 4]) == pytest.approx([0.25, 0.25, 0.5])
    # No exit leaves the full model alone.
    assert LayerSkipRecipe(exits=(3,), rotation=2).active(6, 1, 10) == []
    assert LayerSkipRecipe().weights(6, []) == [1.0]


@pytest.mark.parametrize(
    "recipe",
    [
        LayerSkipRecipe(exits=(0,)),
        LayerSkipRecipe(exits=(4,)),
        LayerSkipRecipe(dropout=1.0),
        LayerSkipRecipe(dropout=-0.1),
        LayerSkipRecipe(rotation=0),
    ],
)
def test_recipes_out_of_range_are_refused(recipe: LayerSkipRecipe) -> None:
    with pytest.raises(TrainingError):
        recipe.exits_of(4)


OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=8, rms_norm_eps=1e-5)


@pytest.fixture(scope="module")
def text(model: PreTrainedModel) -> Blocks:
    ids = torch.cat([tiny.prompt(3, seed=seed) for seed in range(6)])
    return Blocks.of(model.generate(ids, max_new_tokens=13, **OPTIONS))


def learn(lesson: Eagle3Lesson, text: Blocks, steps: int) -> None:
    optimizer = torch.optim.Adam(lesson.model.parameters(), 1e-2)
    for step in range(steps):
        loss = lesson.loss(lesson.model, text, step, steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def assert_steps_are(lesson: Eagle3Lesson, text: Blocks, logits: Callable[[list[int], list[int]], Tensor]) -> None:
    """Hold each unrolled step of a head to the logits, `[ids it can draft]`, after a text and tokens drafted behind."""
    ids = text.ids[0].tolist()
    with torch.no_grad():
        seen, _ = lesson._read(text.chosen(slice(0, 1)))
        found = lesson.model(seen, RECIPE.depth)
    for step, said in enumerate(found):
        # The pair of tokens p and p + 1, of which the last `step` were drafted.
        for pair, given in enumerate(said, step):
            expected = logits(ids[: pair + 2 - step], ids[pair + 2 - step : pair + 2])
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


RECIPE = HeadRecipe(depth=3, vocabulary=20)


def lesson_on(model: PreTrainedModel, text: Blocks, recipe: HeadRecipe = RECIPE) -> Eagle3Lesson:
    """A head whose weights are all other than those that it begins with."""
    lesson = Eagle3Lesson(model, recipe, Split(text, text), 0)
    lesson.model.double()
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in lesson.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=drawn, dtype=weight.dtype) * 0.1)
    return lesson


def saved(lesson: Eagle3Lesson, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    lesson.save(folder, torch.float64, {})
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("vocabulary", [20, None])
def test_each_unrolled_step_says_what_the_saved_head_drafts(
    model: PreTrainedModel, text: Blocks, tmp_path: Path, vocabulary: int | None
) -> None:
    before = fingerprint(model)
    lesson = lesson_on(model, text, replace(RECIPE, vocabulary=vocabulary))
    assert fingerprint(model) == before
    weights, config = saved(lesson, tmp_path)
    if vocabulary is None:
        weights["d2t"] = torch.zeros(model.config.vocab_size, dtype=torch.long)
    logits = reference_heads.eagle3(model, weights, config, (2, 4, 5))
    kept = torch.arange(len(weights["d2t"])) + weights["d2t"]
    assert_steps_are(lesson, text, lambda read, drafted: logits(read, drafted)[kept])


def test_a_head_learns_and_drafts_with_what_it_learnt(
    model: PreTrainedModel, text: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson = lesson_on(model, text)
    base, before = fingerprint(model), lesson.measure()
    learn(lesson, text, 80)
    after = lesson.measure()
    for name in ("agreement_1", "agreement_3", "alpha_1", "alpha_3", "accepted_greedily"):
        assert after[name] > before[name] + 0.1, name
    assert fingerprint(model) == base
    lesson.save(tmp_path, torch.float64, after)
    found = reference_heads.recorded_drafts(monkeypatch, PairProposer)
    spec = selfspec.wrap(model, f"eagle:{tmp_path}", draft_length=3)
    out = spec.generate(text.ids[:1, :3], max_new_tokens=13, **OPTIONS)
    assert torch.equal(out.sequences, text.ids[:1])
    assert out.stats.accepted > 0
    weights, config = saved(lesson, tmp_path)
    reference_heads.assert_drafts_are(found, reference_heads.eagle3(model, weights, config, (2, 4, 5)))


def test_the_folder_is_of_the_layout_that_others_read(model: PreTrainedModel, text: Blocks, tmp_path: Path) -> None:
    weights, config = saved(lesson_on(model, text), tmp_path)
    layer = [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        *(f"{name}norm" for name in ("hidden_", "input_layer", "post_attention_layer")),
    ]
    named = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *(f"layers.0.{name}.weight" for name in layer)}
    assert weights.keys() == named
    assert (weights["d2t"].dtype, weights["t2d"].dtype) == (torch.int64, torch.bool)
    tokens = torch.arange(20) + weights["d2t"]
    assert torch.equal(weights["t2d"].nonzero()[:, 0], tokens)
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["draft_vocab_size"] == 20
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    # Engines differ in what they take where it is not said.
    assert config["norm_before_residual"] is False
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    (method,) = config["speculators_config"]["proposal_methods"]
    assert (method["proposal_type"], method["speculative_tokens"]) == ("greedy", 3)
    inside = config["transformer_layer_config"]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": model.config.vocab_size}
    assert inside.items() >= {"model_type": "llama", **sizes}.items()


def test_states_of_known_text_are_not_computed_again(model: PreTrainedModel, text: Blocks) -> None:
    lesson = lesson_on(model, text)
    first = lesson.loss(lesson.model, text, 0, 1)
    calls = []
    hook = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    again = lesson.loss(lesson.model, text.chosen(torch.arange(6).flip(0)), 0, 1)
    hook.remove()
    assert not calls
    torch.testing.assert_close(again, first)


@pytest.mark.parametrize("architecture", sorted(tiny.BUILDERS))
def test_every_architecture_gets_a_head(text: Blocks, tmp_path: Path, architecture: str) -> None:
    base = tiny.BUILDERS[architecture]()
    ids = text.ids % base.config.vocab_size
    lesson = Eagle3Lesson(base, RECIPE, Split(Blocks.of(ids), Blocks.of(ids)), 0)
    loss = lesson.loss(lesson.model, Blocks.of(ids), 0, 1)
    loss.backward()
    learns = [weight for weight in lesson.model.parameters() if weight.requires_grad]
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in learns)
    rows = base.get_output_embeddings().weight[lesson.model.weights()["d2t"] + torch.arange(20)]
    torch.testing.assert_close(lesson.model.weights()["lm_head.weight"], rows.float())
    lesson.save(tmp_path, torch.float64, {})
    out = selfspec.wrap(base, f"eagle:{tmp_path}", draft_length=2).generate(ids[:1, :3], max_new_tokens=5)
    assert out.stats.drafted > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocabulary": 10**6}, "out of range"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_cannot_be_learnt_is_refused(
    model: PreTrainedModel, text: Blocks, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(TrainingError, match=said):
        Eagle3Lesson(model, replace(RECIPE, **changes), Split(text, text), 0)

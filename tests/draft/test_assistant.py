"""An assistant: a second model drafts over a cache of its own, which reads what each row commits and drafts."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

import selfspec
from helpers import tiny
from helpers.any_rounds import alone
from helpers.captures import StandIn
from helpers.drafting import GREEDY, InTurns, assert_alike, near
from helpers.joints import assert_rows_are_stock
from helpers.reference_heads import assert_drafts_are, recorded_drafts
from helpers.shrunken import shrunken
from helpers.snapshot import Snapshot
from selfspec.adapters import ADAPTERS
from selfspec.control import Control
from selfspec.draft import Assistant, Cascade, Drafter, PromptLookup
from selfspec.draft.assistant import AssistantProposer
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.runtime import Eager, Runtime

PROMPTS = [tiny.prompt(length, seed=length).clamp(min=3) for length in (3, 9, 6)]


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


def test_a_shorter_context_ends_its_drafts_and_not_the_text() -> None:
    spec = selfspec.wrap(tiny.gpt2(), Assistant(tiny.gpt2(n_positions=24)), draft_length=5)
    rounds = list(spec.stream(tiny.prompt(9), max_new_tokens=40, **GREEDY))
    assert_alike(spec, inputs=tiny.prompt(9), max_new_tokens=40, **GREEDY)
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


@pytest.mark.parametrize("runtime", [Eager(), StandIn(0, bucket=16)], ids=["eager", "in buckets"])
@pytest.mark.parametrize(
    ("architecture", "control"),
    [
        ("llama", InTurns(3)),
        ("mistral", InTurns(3, nodes=6)),
        ("gpt2", InTurns(2, nodes=5)),
        ("bloom", InTurns(3)),
        ("mamba", InTurns(2, nodes=5)),
        pytest.param("qwen3_next", InTurns(2, nodes=5), marks=pytest.mark.contract),
    ],
)
def test_it_drafts_what_it_says_behind_whatever_was_committed(
    monkeypatch: pytest.MonkeyPatch, architecture: str, control: Control, runtime: Runtime
) -> None:
    """Look-ups draft in turns with it, texts end apart, and one prompt is longer than a pass over a draft."""
    model = tiny.BUILDERS[architecture]() if architecture in tiny.BUILDERS else shrunken(architecture)
    assistant, found = near(model, 0.3), recorded_drafts(monkeypatch, AssistantProposer)
    draft = Cascade(PromptLookup(shortest=1), Assistant(assistant))
    spec = selfspec.wrap(model, draft, draft_length=control, runtime=runtime)
    ends = model.generate(PROMPTS[1], max_new_tokens=8, **GREEDY)[0, -1].item()
    assert_rows_are_stock(model, spec, [*PROMPTS, tiny.prompt(60).clamp(min=3)], max_new_tokens=24, eos_token_id=ends)
    assert_drafts_are(found, lambda text, drafted: alone(assistant, [*text, *drafted], 1)[0])

"""A saved folder makes plain `generate` of transformers self-speculative; a pipeline over a wrapper gives the same."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, pipeline

import selfspec
from helpers import encoder_decoders, tiny
from helpers.saved_folders import installed, rounds  # noqa: F401 - a fixture
from selfspec.accept import TokenLevel
from selfspec.control import FixedLength
from selfspec.draft import Drafter
from selfspec.draft.layer_skip import write_skip_file
from selfspec.draft.registry import parse_draft
from selfspec.model.identity import fingerprint
from selfspec.recipe import Recipe

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    spec = selfspec.wrap(tiny.llama(), selfspec.drafts.EarlyExit(2), draft_length=3, accept="coupled")
    spec.save_pretrained(tmp_path / "model", tokenizer=tiny.tokenizer())
    return str(tmp_path / "model")


def _written(folder: Path) -> Recipe:
    """The recipe in the code of a saved folder, as Python reads it."""
    return Recipe(**runpy.run_path(str(folder / "custom_generate" / "generate.py"))["RECIPE"])


@pytest.fixture
def plain(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture
def trusted(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, trust_remote_code=True)


def test_the_folder_holds_the_model_and_its_recipe(folder: str, plain: PreTrainedModel) -> None:
    assert {path.name for path in Path(folder).iterdir()} >= {"config.json", "model.safetensors", "custom_generate"}
    assert (Path(folder) / "custom_generate" / "requirements.txt").read_text().startswith("selfspec>=")
    assert "exit:2" in (Path(folder) / "custom_generate" / "generate.py").read_text()
    wanted = tiny.llama().generate(tiny.prompt(5), **OPTIONS)
    assert torch.equal(plain.generate(tiny.prompt(5), **OPTIONS), wanted)
    assert AutoTokenizer.from_pretrained(folder)("ab ba").input_ids == tiny.tokenizer()("ab ba").input_ids


def test_a_model_loaded_with_trust_drafts_for_itself(trusted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = rounds(monkeypatch)
    wanted = tiny.llama().generate(tiny.prompt(5), **OPTIONS)
    assert torch.equal(trusted.generate(tiny.prompt(5), **OPTIONS), wanted)
    assert drafted
    assert max(drafted) == 3
    ids = tiny.prompt(5)
    assert torch.equal(trusted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **OPTIONS), wanted)
    out = trusted.generate(ids, return_dict_in_generate=True, output_scores=True, **OPTIONS)
    assert isinstance(out, selfspec.GenerateOutput)
    assert out.stats.drafted > 0
    assert len(out.scores or ()) == 12


def test_a_call_may_name_the_folder(
    folder: str, plain: PreTrainedModel, trusted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted = rounds(monkeypatch)
    wanted = plain.generate(tiny.prompt(5), **OPTIONS)
    assert not drafted
    named: dict[str, Any] = {"custom_generate": folder, "trust_remote_code": True, **OPTIONS}
    assert torch.equal(plain.generate(tiny.prompt(5), **named), wanted)
    assert drafted
    assert torch.equal(trusted.generate(tiny.prompt(5), **named), wanted)


def test_seeds_and_streamers_reach_selfspec(trusted: Any) -> None:
    sampled: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": 4}
    plain = selfspec.wrap(tiny.llama(), accept="coupled")
    assert torch.equal(trusted.generate(tiny.prompt(5), **sampled), plain.generate(tiny.prompt(5), **sampled).sequences)
    # What cannot be honoured is refused here too.
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="num_beams"):
        trusted.generate(tiny.prompt(5), num_beams=2, **OPTIONS)


@pytest.mark.parametrize(
    ("draft", "accept", "wanted"),
    [
        (selfspec.drafts.EarlyExit(3), None, Recipe("exit:3", 5, None)),
        (None, "block", Recipe("none", 5, "block")),
        (
            selfspec.drafts.LayerSkip(attention=[1, 2], mlp=[0]),
            "relaxed-typical",
            Recipe("skip:attn=1,2;mlp=0", 5, "relaxed-typical"),
        ),
    ],
    ids=str,
)
def test_recipes_come_back_as_they_were(
    tmp_path: Path, draft: Drafter | None, accept: str | None, wanted: Recipe
) -> None:
    spec = selfspec.wrap(tiny.llama(), draft, draft_length=5, accept=accept)
    assert Recipe.of(spec.draft, spec.control, spec.rule) == wanted
    wanted.save(tmp_path)
    assert _written(tmp_path) == wanted
    assert parse_draft(wanted.draft) == draft


@pytest.mark.parametrize("name", ['"""', "it's", "back\\slash", "line\nbreak", '\\"', "{brace}", "\\N{x}", "'''"])
def test_a_draft_of_any_name_is_saved_as_code_that_runs(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.llama()
    file = tmp_path / f"set {name}.json"
    write_skip_file(selfspec.drafts.LayerSkip(layers=[1]), fingerprint(model), file, {})
    selfspec.wrap(model, f"skip-file:{file}", draft_length=3).save_pretrained(tmp_path / "model")
    assert _written(tmp_path / "model") == Recipe(f"skip-file:{file}", 3, None)

    drafted = rounds(monkeypatch)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64, trust_remote_code=True)
    assert torch.equal(loaded.generate(tiny.prompt(5), **OPTIONS), model.generate(tiny.prompt(5), **OPTIONS))
    assert drafted


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_saved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = selfspec.wrap(tiny.llama(), selfspec.drafts.EarlyExit(2), draft_length=3)
    for place in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(selfspec.errors.StorageError, match="cannot be written"):
            spec.save_pretrained(place)


def test_what_has_no_name_is_not_saved(tmp_path: Path) -> None:
    class Other(selfspec.drafts.EarlyExit):
        """A drafter of one's own."""

    class Rule(TokenLevel):
        """A rule of one's own."""

    refused = selfspec.errors.DraftConfigError, selfspec.errors.UnsupportedOptionError
    for error, draft, length, rule in (
        (refused[0], Other(2), 4, None),
        (refused[0], "exit:2", selfspec.CostAware(3), None),
        (refused[1], "exit:2", 4, Rule()),
    ):
        spec = selfspec.wrap(tiny.llama(), draft, draft_length=length, accept=rule)
        with pytest.raises(error, match="cannot be saved"):
            spec.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert Recipe.of(None, FixedLength(4), TokenLevel()).accept == "token"


TEXTS = ["some text", "and a longer one"]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny.llama(vocab_size=256)


@pytest.fixture
def spec(model: PreTrainedModel) -> selfspec.SelfSpeculative:
    return selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)


def made(model: Any) -> Any:
    return pipeline("text-generation", model=model, tokenizer=tiny.tokenizer())


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        {**OPTIONS, "batch_size": 2},
        {**OPTIONS, "return_full_text": False},
        {**OPTIONS, "return_dict_in_generate": True, "output_scores": True},
        {**OPTIONS, "stop_sequence": "a"},
        {"generation_config": GenerationConfig(max_new_tokens=4, do_sample=False)},
        {"max_new_tokens": 9, "do_sample": True, "top_k": 1, "num_return_sequences": 2},
    ],
    ids=lambda options: " ".join(options),
)
def test_a_pipeline_gives_the_models_text(
    model: PreTrainedModel, spec: selfspec.SelfSpeculative, options: dict[str, Any]
) -> None:
    wanted = made(model)(TEXTS, **options)
    assert made(spec)(TEXTS, **options) == wanted
    if "stop_sequence" not in options:  # On this way transformers drops the tokenizer that it needs.
        assert made(model)(TEXTS, custom_generate=spec, **options) == wanted


def test_a_pipeline_is_shown_and_saved_and_moves_the_model(spec: selfspec.SelfSpeculative, tmp_path: Any) -> None:
    whole = made(spec)
    assert "'model': 'SelfSpeculative', 'dtype': 'float64', 'device': 'cpu'" in repr(whole)
    whole.save_pretrained(tmp_path)
    assert {"model.safetensors", "tokenizer.json", "custom_generate"} <= {path.name for path in tmp_path.iterdir()}
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="device 'meta' computes nothing"):
        pipeline("text-generation", model=spec, tokenizer=tiny.tokenizer(), device=torch.device("meta"))
    assert spec.device == spec.model.device == torch.device("cpu")


SOUND = np.random.default_rng(0).normal(size=40_000).astype(np.float32)
ONE_BEAM: dict[str, Any] = {"num_beams": 1, "max_new_tokens": 9}


def listening(model: Any) -> Any:
    return pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=encoder_decoders.tokenizer(),
        feature_extractor=encoder_decoders.feature_extractor(),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_timestamps": "word"},
        {"chunk_length_s": 1, "return_timestamps": "word"},
        {"chunk_length_s": 1, "stride_length_s": 0.2, "batch_size": 2, "return_timestamps": True},
    ],
    ids=str,
)
def test_a_pipeline_of_speech_gives_the_models_text(options: dict[str, Any]) -> None:
    # Of several pieces only with timestamps.
    sound = SOUND if "return_timestamps" in options or "chunk_length_s" in options else SOUND[:12_000]
    model = encoder_decoders.whisper()
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    found = listening(spec)(sound.copy(), generate_kwargs=ONE_BEAM, **options)
    told = listening(model)(sound.copy(), generate_kwargs={**ONE_BEAM, "custom_generate": spec}, **options)
    assert told == found
    assert listening(model)(sound.copy(), generate_kwargs=ONE_BEAM, **options) == found


def test_a_pipeline_of_speech_that_asks_for_beams_is_refused() -> None:
    spec = selfspec.wrap(encoder_decoders.whisper(), selfspec.drafts.EarlyExit(2))
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="num_beams=5"):
        listening(spec)(SOUND[:12_000])

"""What is exported is the draft: `transformers` accepts as much of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from other_engines import assisted
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfspec
from helpers import shrunken, tiny
from helpers.snapshot import Snapshot
from helpers.survey import MODEL_TYPES
from selfspec import drafts
from selfspec.adapters import ADAPTERS
from selfspec.draft import Drafter
from selfspec.draft.early_exit import ExitAdapter, ExitHead
from selfspec.errors import SelfSpecError
from selfspec.model.early_head import DraftHead
from selfspec.model.identity import fingerprint
from selfspec.tools.export import export_checkpoint

# Without a padding token: the assistant of transformers takes such tokens in a text for padding.
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": None}
LENGTH = 4

# Whose configs do not say what each layer is, or whose layers look at the depth of the whole.
_NOT_CUT = {"gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "minicpm3", "youtu"}


def _loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def assert_rounds_are(
    text: Any, model: PreTrainedModel, drafter: Drafter, ids: torch.Tensor, length: int, **options: Any
) -> None:
    """That the assistant of transformers accepted as much in each round as selfspec does."""
    rounds = [
        chunk.rows[0].tokens for chunk in selfspec.wrap(model, drafter, draft_length=length).stream(ids, **options)
    ]
    # Drafts of the last round are cut to what is missing, each in its own way.
    assert text.accepted[:-1] == [len(tokens) - 1 for tokens in rounds][:-1]
    assert text.ids[0, ids.shape[1] :].tolist() == [token for tokens in rounds for token in tokens]


def test_transformers_accepts_of_an_exit_what_selfspec_accepts(architecture: str, tmp_path: Path) -> None:
    # The assistant of transformers loses what left its window when it goes back.
    wide = {"sliding_window": tiny.CONTEXT} if architecture == "mistral" else {}
    model, ids = tiny.BUILDERS[architecture](**wide), tiny.prompt(7)
    before = Snapshot(model)
    report = export_checkpoint(model, None, drafts.EarlyExit(2), tmp_path / "draft")
    before.assert_same(model)
    assert report.layers == (0, 1)
    text = assisted(model, _loaded(tmp_path / "draft"), ids, LENGTH, max_new_tokens=24, **OPTIONS)
    assert_rounds_are(text, model, drafts.EarlyExit(2), ids, LENGTH, max_new_tokens=24, **OPTIONS)
    assert sum(text.accepted) > 0


def test_a_skip_set_is_a_model_of_the_other_layers(architecture: str, tmp_path: Path) -> None:
    model = tiny.BUILDERS[architecture]()
    report = export_checkpoint(model, None, drafts.LayerSkip(layers=[0, 2]), tmp_path / "draft")
    assert report.layers == (1, 3)
    assert report.off < 1e-6


@pytest.mark.contract
@pytest.mark.parametrize("kind", sorted(set(ADAPTERS) & set(MODEL_TYPES) - {"emu3_text_model", "xglm"}))
def test_every_architecture_is_cut_or_refused(kind: str, tmp_path: Path) -> None:
    """Language models inside of others are not loaded by themselves.

    Nor is one of the two named here; the other does not compute in float64.
    """
    model = shrunken.shrunken(kind)
    if kind in _NOT_CUT:
        with pytest.raises(selfspec.errors.UnsupportedModelError, match="choose another exit"):
            export_checkpoint(model, None, drafts.EarlyExit(2), tmp_path / "draft")
        assert not any(tmp_path.iterdir())
    else:
        export_checkpoint(model, None, drafts.EarlyExit(2), tmp_path / "draft")


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (lambda: None, "none is not layers of the model"),
        (lambda: drafts.PromptLookup(), "look up or quantize by itself"),
        (lambda: drafts.Recycling(), "recycle is not layers"),
        (lambda: drafts.Cascade(drafts.PromptLookup(), drafts.EarlyExit(2)), r"lookup\+exit:2 is not layers"),
        (lambda: drafts.LowPrecision(8), "int8 is not layers"),
        (lambda: drafts.ReducedVocabulary(drafts.EarlyExit(2), tuple(range(10))), "is not layers"),
        (lambda: drafts.LayerSkip(attention=[1], layers=[2]), "a part of layers 1"),
        (lambda: drafts.EarlyExit(9), "out of range"),
    ],
)
def test_what_is_no_whole_layers_is_refused(
    llama: PreTrainedModel, tmp_path: Path, draft: Callable[[], Drafter | None], said: str
) -> None:
    with pytest.raises(SelfSpecError, match=said):
        export_checkpoint(llama, None, draft(), tmp_path / "draft")
    assert not any(tmp_path.iterdir())


def test_a_head_that_is_no_layer_is_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    head = ExitHead(2, DraftHead(ExitAdapter(32, 8).double()), fingerprint(llama))
    with pytest.raises(SelfSpecError, match="is not layers of the model"):
        export_checkpoint(llama, None, head, tmp_path / "draft")


def test_what_is_there_stays(llama: PreTrainedModel, tmp_path: Path) -> None:
    to = tmp_path / "draft"
    to.mkdir()
    (to / "mine.txt").write_text("mine")
    with pytest.raises(selfspec.errors.StorageError, match="there already"):
        export_checkpoint(llama, None, drafts.EarlyExit(2), to)
    assert (to / "mine.txt").read_text() == "mine"
    (to / "mine.txt").unlink()
    export_checkpoint(llama, None, drafts.EarlyExit(2), to)
    assert json.loads((to / "selfspec_export.json").read_text())["draft"] == "exit:2"
    assert [file.name for file in tmp_path.iterdir()] == ["draft"]


def test_a_draft_that_the_cut_does_not_compute_is_not_written(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = type(llama).save_pretrained

    def wrong(self: Any, *args: Any, **options: Any) -> None:
        self.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(self.model.layers[1].mlp.up_proj.weight * 1.1)
        save(self, *args, **options)

    monkeypatch.setattr(type(llama), "save_pretrained", wrong)
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="do not compute by themselves"):
        export_checkpoint(llama, None, drafts.EarlyExit(2), tmp_path / "draft")
    assert not any(tmp_path.iterdir())

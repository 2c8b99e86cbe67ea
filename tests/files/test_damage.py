"""Damaged files of every kind that selfspec writes and reads: what is read is what was written, or a typed error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from helpers import tiny
from helpers.saved_folders import rewrite
from helpers.studies import profile_of
from selfspec.control.profile import Profile
from selfspec.draft import EarlyExit, LayerSkip, LowPrecision, ReducedVocabulary
from selfspec.draft.early_exit import FILE, ExitHead
from selfspec.draft.layer_skip import write_skip_file
from selfspec.draft.suffixes import CorpusFile
from selfspec.errors import (
    BenchError,
    CorpusError,
    DraftConfigError,
    ExitHeadError,
    ProfileError,
    SelfSpecError,
    TrainingError,
)
from selfspec.files.writing import write_sealed
from selfspec.formats.format import formats
from selfspec.model.identity import Vocabulary, fingerprint
from selfspec.model.layer_path import WeightCopy
from selfspec.model.substitute_file import SubstituteFile
from selfspec.model.substitutes import Substitutes
from selfspec.recipe import Recipe
from selfspec.tools.index import write_corpus
from selfspec.tools.lab.runs import FILE as RUNS
from selfspec.tools.lab.runs import Asked, Run, Runs
from selfspec.tools.train.corpus import written_text
from selfspec.tools.train.course import RunFolder
from selfspec.tools.train.exit_heads import ExitHeads
from selfspec.tools.train.recipe import Course, Texts


@cache
def _model() -> PreTrainedModel:
    """Large enough for the kernels of fewer bits."""
    return tiny.llama(hidden_size=64, intermediate_size=64, num_hidden_layers=2, dtype=torch.float32)


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: of the file within its folder.
        write: writes it.
        read: all of it that has a meaning, as something that can be compared.
        error: of a file that is damaged.
    """

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    error: type[SelfSpecError]

    def make(self, folder: Path) -> Path:
        self.write(folder / self.name)
        return folder / self.name


def _substitutes(bits: int) -> Kind:
    def read(file: Path) -> object:
        substitutes = Substitutes()
        substitutes.load(SubstituteFile(file), WeightCopy(formats()[f"int{bits}"]()), _model())
        draft = LowPrecision.from_file(file)
        made = [each.substitute for each in substitutes._made.values() if each.substitute is not None]
        return [draft.format, draft.layers, draft.head_too], _values(
            {f"{number}.{name}": part for number, each in enumerate(made) for name, part in each.named_parameters()}
        )

    return Kind("made.safetensors", lambda file: LowPrecision(bits).save(file, _model()), read, DraftConfigError)


def _values(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    return {name: (values.dtype, values.tolist()) for name, values in tensors.items()}


def _read_corpus(file: Path) -> object:
    found = CorpusFile(file)
    return found.about.vocabulary, found.corpus.tokens.tolist(), found.corpus._ends.tolist()


def _write_exit_head(file: Path) -> None:
    head = ExitHeads(64, 2, (1, 2), torch.arange(0, 50, 2))
    head.save(file.parent, torch.float32, fingerprint(_model()), 2, {"alpha_2": 0.5})


def _read_exit_head(file: Path) -> object:
    head = ExitHead.from_pretrained(file.parent)
    assert isinstance(head.draft_head.adapter, torch.nn.Module)
    assert head.draft_head.tokens is not None
    return head.layer, head.base, head.draft_head.tokens.tolist(), _values(head.draft_head.adapter.state_dict())


def _write_skip_set(file: Path) -> None:
    write_skip_file(LayerSkip(attention=[1], mlp=[0, 1]), fingerprint(_model()), file, {"alpha": 0.5})


def _read_profile(file: Path) -> object:
    found = Profile.load(file)
    return found, found.report


def _write_recipe(file: Path) -> None:
    Recipe("exit:2", 4, "token").save(file.parent)
    names: dict[str, Any] = {}
    exec((file.parent / "custom_generate" / "generate.py").read_text(), names)
    file.write_text(names["RECIPE"])


def _read_run(file: Path) -> object:
    found = Runs(file.parent).of_kind("costs")
    if not found:
        raise BenchError("a line that was cut off is no run, and what it held is measured again")
    return found


def _read_training(file: Path) -> object:
    return RunFolder(file.parent).begin({"rate": 0.25, "steps": 12})


KINDS: dict[str, Kind] = {
    "int8": _substitutes(8),
    "int4": _substitutes(4),
    "corpus": Kind(
        "corpus",
        lambda file: write_corpus(file, [range(9), [3, 1, 4, 1, 5]], Vocabulary.of(_model())),
        _read_corpus,
        DraftConfigError,
    ),
    "exit head": Kind(FILE, _write_exit_head, _read_exit_head, ExitHeadError),
    "skip set": Kind("skip.json", _write_skip_set, LayerSkip.from_file, DraftConfigError),
    "vocabulary": Kind(
        "vocabulary.json",
        lambda file: write_sealed(file, {"coverage": 0.5, "tokens": [1, 2, 3, 5, 8, 13]}),
        lambda file: ReducedVocabulary.from_file(EarlyExit(1), file).tokens,
        DraftConfigError,
    ),
    "profile": Kind("profile.json", lambda file: profile_of(_model()).save(file), _read_profile, ProfileError),
    "recipe": Kind(
        "recipe", _write_recipe, lambda file: Recipe.read(file.read_text(errors="replace")), DraftConfigError
    ),
    "run": Kind(
        RUNS,
        lambda file: Runs(file.parent).keep([Run(Asked("costs", {"threads": 2}), {"seconds": 0.25})]),
        _read_run,
        BenchError,
    ),
    "training": Kind(
        "run.json",
        lambda file: RunFolder(file.parent).begin({"rate": 0.25, "steps": 12}, {"loss": 2.5}),
        _read_training,
        TrainingError,
    ),
}
OF_TENSORS = ("int8", "int4", "corpus", "exit head")
FLIPS = (0x01, 0x10, 0x80)


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_which_bytes_are_flipped_or_missing_is_refused(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    file = kind.make(tmp_path)
    content, wanted = file.read_bytes(), kind.read(file)
    places = sorted({*range(0, len(content), len(content) // 50 + 1), *range(0, min(len(content), 400), 7)})
    damaged = [
        content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :]
        for number, place in enumerate(places)
        for flip in FLIPS[number % 3 : number % 3 + 1]
    ]
    # A quarter of which every seventh byte is another.
    for quarter in range(4):
        some = bytearray(content)
        for place in range(quarter * len(content) // 4, (quarter + 1) * len(content) // 4, 7):
            some[place] ^= 1
        damaged.append(bytes(some))
    damaged += [content[: len(content) * tenth // 10] for tenth in range(10)]
    damaged.append(content[:-1] if name in OF_TENSORS else b"{")
    refused = 0
    for each in damaged:
        file.write_bytes(each)
        try:
            found = kind.read(file)
        except kind.error:
            refused += 1
            continue
        # What has no meaning may change: a space, the name under which the checksum is.
        assert found == wanted
    assert refused >= 0.8 * len(damaged)


def _replace(wanted: dict[str, Any], known: dict[str, Any], _: object) -> None:
    known.clear()
    known.update(wanted)


@pytest.mark.parametrize("name", OF_TENSORS)
def test_a_file_with_tensors_that_are_missing_or_too_many_is_refused(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    file = kind.make(tmp_path)
    content = file.read_bytes()
    with safe_open(file, framework="pt") as opened:
        said = opened.metadata()
        tensors: dict[str, Any] = {each: opened.get_tensor(each) for each in opened.keys()}  # noqa: SIM118
    first, last = min(tensors), max(tensors)
    changed: list[dict[str, Any]] = [
        {each: values for each, values in tensors.items() if each != first},
        {each: values for each, values in tensors.items() if each != last},
        {**tensors, "more": tensors[first] * 1},
        {**tensors, f"{first}.more": tensors[first] * 1},
        {**tensors, last: tensors[last][:-1]},
        {**tensors, last: tensors[last].reshape(1, *tensors[last].shape)},
    ]
    for each in changed:
        save_file(each, file, said)
        with pytest.raises(kind.error):
            kind.read(file)
    if name == "exit head":
        return
    # With checksums that fit, by another writer.
    for each in (changed[2], changed[3], changed[4], changed[5]):
        file.write_bytes(content)
        rewrite(file, partial(_replace, each))
        with pytest.raises(kind.error):
            kind.read(file)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in (*OF_TENSORS, "run")])
def test_people_may_write_and_change_what_is_text(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    file = kind.make(tmp_path)
    wanted = kind.read(file)
    content = json.loads(file.read_text())
    del content["checksum"]
    file.write_text(json.dumps(content, indent=4))
    assert kind.read(file) == wanted


def test_text_of_its_own_that_a_training_kept(tmp_path: Path) -> None:
    model, beginnings = _model(), tiny.prompt(2, 4).tolist()
    course, texts = Course(length=8), Texts(text=[], held_out_blocks=1)
    kept = tmp_path / "own.safetensors"
    wanted = written_text(model, beginnings, course, texts, kept)
    assert torch.equal(written_text(model, beginnings, course, texts, kept).train.ids, wanted.train.ids)
    content = kept.read_bytes()
    for place in range(0, len(content), 5):
        kept.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises((TrainingError, CorpusError)):
            written_text(model, beginnings, course, texts, kept)

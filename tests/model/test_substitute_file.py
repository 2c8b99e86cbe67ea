"""Substitutes in files: the same as those made in memory, bound to their base, refused where damaged or foreign."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.saved_folders import Change, rewrite
from selfspec.draft import LowPrecision
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.errors import DraftConfigError, StorageError
from selfspec.formats.format import formats
from selfspec.formats.int4 import Int4
from selfspec.formats.rounding import Rounded
from selfspec.model import substitute_file
from selfspec.model.registry import find_adapter
from selfspec.model.substitute_file import packed_weights
from selfspec.model.substitutes import weights_of


def _model(**options: Any) -> PreTrainedModel:
    """Large enough for the kernels."""
    return tiny.llama(**{"hidden_size": 64, "intermediate_size": 128, "dtype": torch.float32, **options})


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return _model()


@pytest.fixture
def file(tmp_path: Path, model: PreTrainedModel) -> Path:
    LowPrecision(4).save(tmp_path / "m4.safetensors", model)
    return tmp_path / "m4.safetensors"


def _values(spec: selfspec.SelfSpeculative) -> dict[str, Tensor]:
    return {
        f"{copied.format}.{name}.{part}": values
        for (copied, name), made in spec.substitutes._made.items()
        if made.substitute is not None
        for part, values in made.substitute.named_parameters()
    }


def _generated(spec: selfspec.SelfSpeculative, rows: int = 1) -> selfspec.GenerateOutput:
    return spec.generate(tiny.prompt(9, rows), max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize(
    "draft",
    [
        LowPrecision(8),
        LowPrecision(4),
        LowPrecision(4, group_size=64),
        LowPrecision(8, layers=[2, 3], head=False),
    ],
    ids=draft_name,
)
def test_they_are_those_that_are_made_in_memory(
    model: PreTrainedModel, draft: LowPrecision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "made.safetensors"
    draft.save(file, model)
    made = selfspec.wrap(model, draft, draft_length=3)
    wanted = _generated(made, rows=2)
    # None is made any more.
    monkeypatch.setattr(Rounded, "pack", None)
    saved = LowPrecision.from_file(file)
    assert (saved.format, saved.layers, saved.head_too) == (draft.format, draft.layers, draft.head_too)
    read = selfspec.wrap(model, saved, draft_length=3)
    found = _generated(read, rows=2)
    assert torch.equal(found.sequences, wanted.sequences)
    assert found.stats.accepted_per_depth == wanted.stats.accepted_per_depth
    assert found.stats.substitute_bytes == wanted.stats.substitute_bytes == made.substitutes.nbytes > 0
    values = _values(made)
    assert values.keys() == _values(read).keys()
    assert all(torch.equal(values[name], value) for name, value in _values(read).items())


@pytest.mark.contract
def test_a_file_and_what_is_made_in_memory_are_kept_apart(tmp_path: Path) -> None:
    model = _model()
    rounded, other = (str(tmp_path / name) for name in ("rounded.safetensors", "compensated.safetensors"))
    draft = LowPrecision(4)
    draft.save(rounded, model)
    draft.save(other, model, texts=[torch.arange(40).remainder(tiny.VOCABULARY)[None]])
    first = selfspec.wrap(model, draft, draft_length=3)
    _generated(first)
    acceptances = []
    for drafter in (
        draft,
        LowPrecision.from_file(rounded),
        LowPrecision.from_file(other),
    ):
        fresh = _generated(selfspec.wrap(model, drafter, draft_length=3)).stats.accepted_per_depth
        assert _generated(first.drafting(drafter, 3)).stats.accepted_per_depth == fresh
        acceptances.append(fresh)
    assert acceptances[0] == acceptances[1] != acceptances[2]


@pytest.mark.parametrize("architecture", [name for name in tiny.BUILDERS if name != "llama"])
def test_other_architectures_have_them(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.BUILDERS[architecture]()
    wanted = model.generate(tiny.prompt(9), max_new_tokens=20, do_sample=False)
    LowPrecision(8).save(tmp_path / "m8.safetensors", model)
    monkeypatch.setattr(Rounded, "pack", None)
    spec = selfspec.wrap(model, LowPrecision.from_file(tmp_path / "m8.safetensors"), draft_length=3)
    assert torch.equal(_generated(spec).sequences, wanted)


def test_names(file: Path, model: PreTrainedModel) -> None:
    for name in (f"int4:{file}", f"int4:{file}+exit:2", f"lookup+int4:{file}+exit:2"):
        draft = parse_draft(name)
        assert draft_name(draft) == name
        spec = selfspec.wrap(model, draft, draft_length=3)
        assert torch.equal(_generated(spec).sequences, _generated(selfspec.wrap(model)).sequences)
    with pytest.raises(DraftConfigError, match="holds 4 bits and not 8; write int4:"):
        parse_draft(f"int8:{file}")


def test_wrappers_of_one_model_share_them(file: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = selfspec.wrap(model).drafting(f"int4:{file}", draft_length=3)
    size = spec.substitutes.nbytes
    other = spec.drafting(f"int4:{file}", 3)
    assert other.substitutes is spec.substitutes
    monkeypatch.setattr(Rounded, "pack", None)
    file.unlink()
    assert _generated(spec).stats.drafted
    assert _generated(other).stats.substitute_bytes == size


def test_what_changes_later_is_made_anew(tmp_path: Path) -> None:
    model = _model()
    LowPrecision(8).save(tmp_path / "m8.safetensors", model)
    spec = selfspec.wrap(model, LowPrecision.from_file(tmp_path / "m8.safetensors"), draft_length=3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    _generated(spec)
    made = selfspec.wrap(model, LowPrecision(8), draft_length=3)
    _generated(made)
    assert all(torch.equal(value, _values(made)[name]) for name, value in _values(spec).items())


def test_the_base_is_known_in_another_dtype(file: Path) -> None:
    spec = selfspec.wrap(_model().bfloat16(), LowPrecision.from_file(file), draft_length=3)
    assert _generated(spec).stats.drafted


def test_another_base_is_refused(file: Path) -> None:
    with pytest.raises(DraftConfigError, match=r"another base.*selfspec quantize"):
        selfspec.wrap(_model(seed=1), LowPrecision.from_file(file))


def test_a_file_that_was_replaced_is_refused(file: Path, model: PreTrainedModel) -> None:
    draft = LowPrecision.from_file(file)
    LowPrecision(4, group_size=64).save(file, model)
    with pytest.raises(DraftConfigError, match=r"holds int4 \(group_size=64\) by now, and not int4 \(group_size=32\)"):
        selfspec.wrap(model, draft)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda file: file.write_text("{}"), _folder], ids=["gone", "text", "a folder"]
)
def test_what_is_no_file_of_substitutes_is_refused(file: Path, damage: Callable[[Path], object]) -> None:
    damage(file)
    with pytest.raises(DraftConfigError, match=r"m4\.safetensors cannot be read .*write it again: selfspec quantize"):
        LowPrecision.from_file(file)


@pytest.mark.parametrize(
    "about", [{"format": 1}, {"weights": "int3"}, {"weights": None}, {"base": None}, {"head": 1}, {"layers": "all"}]
)
def test_what_says_something_else_of_itself_is_refused(file: Path, about: dict[str, Any]) -> None:
    rewrite(file, lambda _, own: own.update(about))
    with pytest.raises(DraftConfigError, match=f"cannot be read as substitutes.*{next(iter(about))}"):
        LowPrecision.from_file(file)


_UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tensors, _: tensors.pop(f"{_UP}.scales"), "lacks"),
        (lambda tensors, _: tensors.update({f"{_UP}.scales": tensors[f"{_UP}.scales"].float()}), "float32"),
        (lambda tensors, _: tensors.update({f"{_UP}.levels": tensors[f"{_UP}.levels"][:-1].clone()}), r"\[127, 32\]"),
        (lambda tensors, _: tensors[f"{_UP}.zeros"].fill_(torch.nan), "NaN"),
        (lambda tensors, _: tensors.update({"model.odd.weight.levels": torch.zeros(2)}), "lacks model.odd"),
        (
            lambda tensors, _: tensors.update(
                {f"model.odd.weight.{part}": torch.zeros(2) for part in ("levels", "scales", "factors", "zeros")}
            ),
            "does not have.*odd",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(file: Path, model: PreTrainedModel, change: Change, match: str) -> None:
    rewrite(file, change)
    with pytest.raises(DraftConfigError, match=rf"(?s){match}.*selfspec quantize"):
        selfspec.wrap(model, LowPrecision.from_file(file))


def test_what_a_file_lacks_is_made(file: Path, model: PreTrainedModel) -> None:
    def drop(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(_UP)]:
            del tensors[name]

    rewrite(file, drop)
    spec = selfspec.wrap(model, LowPrecision.from_file(file), draft_length=3)
    before = spec.substitutes.nbytes
    assert _generated(spec).stats.substitute_bytes > before


def test_nothing_is_left_where_nothing_can_be_written(tmp_path: Path, model: PreTrainedModel) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError, match="taken"):
        LowPrecision(8).save(tmp_path / "taken", model)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(("bits", "most"), [(8, 0.27), (4, 0.16)])
def test_files_take_their_share_of_the_weights(bits: int, most: float, tmp_path: Path) -> None:
    model = _model(vocab_size=256, hidden_size=256, intermediate_size=512)
    LowPrecision(bits).save(tmp_path / "made", model)
    # Names and shapes of so small a model are a tenth of its file.
    assert (tmp_path / "made").stat().st_size <= (most + 0.05) * sum(weight.nbytes for weight in model.parameters())
    assert formats()[f"int{bits}"]().nbytes((512, 512)) <= most * 4 * 512 * 512


FOUR = Int4()
TEXTS = [tiny.prompt(12, 2), tiny.prompt(9, 1)]


def test_each_layer_is_rounded_by_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    weights = weights_of(model, find_adapter(model), LowPrecision(4).path(len(model.model.layers)))
    found = dict(packed_weights(model, weights, FOUR, TEXTS))
    assert list(found) == [name for name, _ in weights]
    # The head is given the last states.
    states = torch.cat([model.model(text).last_hidden_state.flatten(0, 1) for text in TEXTS]).detach()
    wanted = FOUR.pack_for(model.lm_head.weight, states.t() @ states)
    assert (found["lm_head.weight"]["levels"] != wanted["levels"]).float().mean() < 0.01
    assert (found["lm_head.weight"]["levels"] != FOUR.pack(model.lm_head.weight)["levels"]).float().mean() > 0.05
    assert not any(module._forward_pre_hooks for module in model.modules())
    # With moments of one layer at a time.
    monkeypatch.setattr(substitute_file, "_BYTES_AT_ONCE", 1)
    for name, rounded in packed_weights(model, weights, FOUR, TEXTS):
        assert all(torch.equal(values, found[name].parts[part]) for part, values in rounded.parts.items())


def test_experts_and_layers_that_are_not_run_have_fitted_scales() -> None:
    model = _model()
    model.spare, experts = torch.nn.Linear(64, 32), torch.randn(2, 32, 64)
    found = dict(packed_weights(model, [("spare.weight", model.spare.weight), ("e", experts)], FOUR, TEXTS))
    for name, weight in (("spare.weight", model.spare.weight), ("e", experts)):
        assert torch.equal(found[name]["levels"], FOUR.pack(weight)["levels"])


def test_texts_for_8_bits_are_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    with pytest.raises(DraftConfigError, match="texts serve 4 bits"):
        LowPrecision(8).save(tmp_path / "x", model, texts=TEXTS)

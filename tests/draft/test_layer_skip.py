"""Skip sets: what they leave out, and what refusing the impossible ones says."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from selfspec.errors import DraftConfigError
from selfspec.model.layer_path import Part, Sublayer, sublayers


def _skipped(draft: selfspec.drafts.LayerSkip, depth: int = 4) -> list[tuple[int, Part]]:
    path = draft.path(depth)
    return [(s.layer, s.part) for s in sublayers(depth) if not path.runs(s)]


def test_it_leaves_out_what_it_names() -> None:
    attention, mlp = Part.ATTENTION, Part.MLP
    assert _skipped(selfspec.drafts.LayerSkip(attention=[1])) == [(1, attention)]
    assert _skipped(selfspec.drafts.LayerSkip(mlp=[0, 3])) == [(0, mlp), (3, mlp)]
    assert _skipped(selfspec.drafts.LayerSkip(layers=[2])) == [(2, attention), (2, mlp)]
    assert _skipped(selfspec.drafts.LayerSkip(attention=[3, 0], mlp=[1], layers=[2])) == [
        (0, attention),
        (1, mlp),
        (2, attention),
        (2, mlp),
        (3, attention),
    ]


def test_any_iterable_of_layer_numbers_will_do() -> None:
    wanted = selfspec.drafts.LayerSkip(attention=[1, 2])
    assert selfspec.drafts.LayerSkip(attention=(1, 2)) == wanted
    assert selfspec.drafts.LayerSkip(attention=range(1, 3)) == wanted
    assert selfspec.drafts.LayerSkip(attention=(n for n in (1, 2))) == wanted


def test_both_sublayers_of_a_layer_are_the_layer() -> None:
    assert selfspec.drafts.LayerSkip(attention=[1], mlp=[1]).path(4) == selfspec.drafts.LayerSkip(layers=[1]).path(4)


def test_all_but_one_sublayer_may_be_left_out(llama: PreTrainedModel) -> None:
    draft = selfspec.drafts.LayerSkip(attention=[0], layers=[1, 2, 3])
    out = selfspec.wrap(llama, draft, draft_length=4).generate(tiny.prompt(5), max_new_tokens=9, do_sample=False)
    assert out.sequences.tolist() == llama.generate(tiny.prompt(5), max_new_tokens=9, do_sample=False).tolist()


@pytest.mark.parametrize("name", ["attention", "mlp", "layers"])
class TestRefused:
    @pytest.mark.parametrize("layer", [4, 100, -1, -4])
    def test_a_layer_the_network_does_not_have(self, llama: PreTrainedModel, name: str, layer: int) -> None:
        with pytest.raises(DraftConfigError, match=rf"{name}=.*layer {layer} is out of range.*layers 0\.\.3"):
            selfspec.wrap(llama, selfspec.drafts.LayerSkip(**{name: [1, layer]}), draft_length=4)

    @pytest.mark.parametrize("number", [True, False, 1.0, "1", None, float("nan"), [1]])
    def test_what_is_no_integer(self, name: str, number: Any) -> None:
        with pytest.raises(DraftConfigError, match=rf"{name}=.*not an integer layer number"):
            selfspec.drafts.LayerSkip(**{name: [2, number]})

    @pytest.mark.parametrize("numbers", [1, 1.0, True, None, "12"])
    def test_what_is_no_list_of_numbers(self, name: str, numbers: Any) -> None:
        with pytest.raises(DraftConfigError, match=f"{name} must be a list of layer numbers"):
            selfspec.drafts.LayerSkip(**{name: numbers})

    def test_a_layer_named_twice(self, name: str) -> None:
        with pytest.raises(DraftConfigError, match=f"{name}=\\[1, 2, 1\\] lists a layer more than once"):
            selfspec.drafts.LayerSkip(**{name: [1, 2, 1]})


@pytest.mark.parametrize("name", ["attention", "mlp"])
def test_a_sublayer_named_alone_and_with_its_layer_is_refused(llama: PreTrainedModel, name: str) -> None:
    with pytest.raises(DraftConfigError, match="layer 1 is skipped more than once; name each sublayer once"):
        selfspec.wrap(llama, selfspec.drafts.LayerSkip(layers=[1], **{name: [1]}), draft_length=4)


def test_an_empty_skip_set_is_refused(llama: PreTrainedModel) -> None:
    for empty in (selfspec.drafts.LayerSkip(), selfspec.drafts.LayerSkip(attention=[], mlp=[], layers=[])):
        with pytest.raises(DraftConfigError, match=r"empty.*draft=None for plain decoding"):
            selfspec.wrap(llama, empty, draft_length=4)


def test_skipping_everything_is_refused(llama: PreTrainedModel) -> None:
    for everything in (
        selfspec.drafts.LayerSkip(layers=range(4)),
        selfspec.drafts.LayerSkip(attention=range(4), mlp=range(4)),
        selfspec.drafts.LayerSkip(layers=[0, 1], attention=[2, 3], mlp=[3, 2]),
    ):
        with pytest.raises(DraftConfigError, match=r"leaves nothing.*skip fewer"):
            selfspec.wrap(llama, everything, draft_length=4)


def test_it_is_a_value() -> None:
    one, other = selfspec.drafts.LayerSkip(attention=[1], mlp=[2]), selfspec.drafts.LayerSkip(mlp=(2,), attention=(1,))
    assert one == other
    assert hash(one) == hash(other)
    assert one != selfspec.drafts.LayerSkip(attention=[1])
    with pytest.raises(AttributeError):
        one.layers = (1,)  # type: ignore[misc]


def test_the_first_sublayer_has_nothing_before_it() -> None:
    assert selfspec.drafts.LayerSkip(attention=[0]).path(4).resume_point is None
    assert selfspec.drafts.LayerSkip(mlp=[0]).path(4).resume_point == Sublayer(0, Part.MLP)

"""What a generation gives is an output as `transformers` gives it: attributes, items and tuples; it may be changed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.generation import GenerateDecoderOnlyOutput

import selfspec
from helpers import tiny
from selfspec.compat import OUTPUT_CACHE

WHOLE: dict[str, Any] = {
    "max_new_tokens": 6,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
}


@pytest.fixture(scope="module")
def stock() -> Any:
    return tiny.llama().generate(tiny.prompt(5), **WHOLE)


@pytest.fixture
def output() -> selfspec.GenerateOutput:
    spec = selfspec.wrap(tiny.llama(), selfspec.drafts.EarlyExit(2), draft_length=2)
    return spec.generate(tiny.prompt(5), **WHOLE)


def test_its_items_are_those_of_transformers(output: Any, stock: Any) -> None:
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert list(output) == list(output.keys()) == list(stock.keys())
    assert len(output) == len(output.to_tuple()) == 4
    assert "lengths" not in output
    for index, name in enumerate(stock):
        assert output[name] is output[index] is output.to_tuple()[index] is getattr(output, name)
    assert output[:2] == (output.sequences, output.scores)
    assert torch.equal(output[0], stock[0])
    assert output.attentions is None
    with pytest.raises(KeyError):
        output["attentions"]


def test_what_was_not_asked_for_is_no_item() -> None:
    output = selfspec.wrap(tiny.llama()).generate(tiny.prompt(5), max_new_tokens=3)
    assert list(output) == ["sequences"]
    assert output.scores is None
    assert output.lengths == (3,)


def test_it_may_be_assigned_to(output: Any) -> None:
    output.sequences = output.sequences[:, 5:]
    assert output["sequences"] is output[0] is output.sequences
    assert output.sequences.shape == (1, 6)
    output["scores"] = ()
    assert output.scores == ()
    output.hidden_states = ((),)
    assert output["hidden_states"] == ((),)
    output.lengths = (2,)
    assert output.lengths == (2,)
    assert "lengths" not in output
    output.note = "of the caller's own"
    assert "note" not in output


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        dataclasses.replace,
        lambda output: pickle.loads(pickle.dumps(output)),
    ],
    ids=["copy", "deepcopy", "replace", "pickle"],
)
def test_copies_are_whole(output: Any, copied: Any) -> None:
    other = copied(output)
    assert type(other) is selfspec.GenerateOutput
    assert torch.equal(other["sequences"], output.sequences)
    assert list(other) == list(output)
    assert (other.lengths, other.stats, other.lossless) == (output.lengths, output.stats, True)


def test_it_is_a_tree_of_tensors(output: Any) -> None:
    output = dataclasses.replace(output, **{OUTPUT_CACHE: None})
    leaves, structure = pytree.tree_flatten(output)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, structure)
    assert type(again) is selfspec.GenerateOutput
    assert torch.equal(again.sequences, output.sequences)
    assert pytree.tree_map(torch.clone, output).scores[0].shape == output.scores[0].shape


def test_its_text_tells_what_was_counted(output: Any) -> None:
    text = repr(output)
    assert text.startswith("GenerateOutput(sequences=")
    assert "lengths=(6,), stats=Stats(" in text
    assert text.endswith("lossless=True)")

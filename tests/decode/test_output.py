"""What a generation gives: an output as that of `transformers`, scores, and statistics read off verdicts."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

import selfspec
from helpers import tiny
from selfspec.compat import OUTPUT_CACHE
from selfspec.decode.output import ScoreRecord, Stats
from selfspec.draft import Draft, Drafter
from selfspec.draft.draft import RowVerdict, Verdict

ASKED: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
WHOLE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, **ASKED}


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
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, structure)
    assert type(again) is selfspec.GenerateOutput
    assert torch.equal(again.sequences, output.sequences)
    assert pytree.tree_map(torch.clone, output).scores[0].shape == output.scores[0].shape


def test_its_text_tells_what_was_counted(output: Any) -> None:
    text = repr(output)
    assert text.startswith("GenerateOutput(sequences=")
    assert "lengths=(6,), stats=Stats(" in text
    assert text.endswith("lossless=True)")


# Scores and logits: of committed tokens, and of no others.

DRAFTS: list[Drafter | None] = [
    None,
    selfspec.drafts.EarlyExit(2),
    selfspec.drafts.LayerSkip(mlp=[3]),
    selfspec.drafts.LowPrecision(4, layers=[2, 3]),
]


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}], ids=str)
def test_scores_and_logits_are_those_of_stock_generate(
    llama: PreTrainedModel, draft: Drafter | None, options: dict[str, Any]
) -> None:
    options = {"max_new_tokens": 14, "do_sample": False, **ASKED, **options}
    ids = tiny.prompt(5, 2)
    wanted = llama.generate(ids, **options)
    spec = selfspec.wrap(llama, draft, draft_length=4)
    for found in (spec.generate(ids, **options), llama.generate(ids, custom_generate=spec, **options)):
        assert torch.equal(found.sequences, wanted.sequences)
        torch.testing.assert_close(found[1:3], wanted[1:3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_scores_of_a_sample_are_those_of_its_text(llama: PreTrainedModel, rule: str) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 5}
    spec = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=4, accept=rule)
    out: Any = spec.generate(tiny.prompt(5), max_new_tokens=20, **ASKED, **options)
    with torch.no_grad():
        logits = llama(out.sequences).logits[0, 4:-1].float()
    torch.testing.assert_close(torch.cat(out.logits), logits, atol=1e-5, rtol=1e-5)
    kept = logits.topk(20).values[:, -1:]
    warped = torch.where(logits < kept, -torch.inf, logits / 0.8)
    torch.testing.assert_close(torch.cat(out.scores), warped, atol=1e-5, rtol=1e-5)


def test_padding_after_a_row_scores_nothing(llama: PreTrainedModel) -> None:
    ids = tiny.prompt(5, 3)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "pad_token_id": 1, "do_sample": False, **ASKED}
    options["max_new_tokens"] = 14
    text = llama.generate(ids, **options).sequences
    options["eos_token_id"] = int(text[1, 8])
    out: Any = selfspec.wrap(llama, selfspec.drafts.LayerSkip(mlp=[3]), draft_length=4).generate(ids, **options)
    assert len(set(out.lengths)) > 1
    assert len(out.scores) == len(out.logits) == max(out.lengths)
    stock = llama.generate(ids, **options)
    for row, length in enumerate(out.lengths):
        for index in range(max(out.lengths)):
            for found, wanted in ((out.scores, stock.scores), (out.logits, stock.logits)):
                if index < length:
                    torch.testing.assert_close(found[index][row], wanted[index][row], atol=1e-5, rtol=1e-5)
                else:
                    assert found[index][row].softmax(-1)[1] == 1
    for normalize in (False, True):
        scores = llama.compute_transition_scores(out.sequences, out.scores, normalize_logits=normalize)
        for row, length in enumerate(out.lengths):
            assert (scores[row, length:] == 0).all()


def test_what_a_stream_has_so_far_is_not_changed_by_what_comes(llama: PreTrainedModel) -> None:
    stream = selfspec.wrap(llama, selfspec.drafts.EarlyExit(2), draft_length=4).stream(
        tiny.prompt(5, 2), max_new_tokens=12, do_sample=False, **ASKED
    )
    next(stream)
    half: Any = stream.output()
    before = [step.clone() for step in half.scores]
    whole: Any = stream.finish()
    assert len(whole.scores) == 12
    assert all(torch.equal(a, b) for a, b in zip(half.scores, before, strict=True))


def test_a_pad_id_outside_the_vocabulary_leaves_no_token_likely() -> None:
    record = ScoreRecord(pad=99)
    record.keep(torch.zeros(2, 2, 3), [0, 1], [0, 0], [2, 1])
    assert record.padded((2, 1))[1][1].tolist() == [-torch.inf] * 3


DRAFT = Draft.chain(torch.tensor([[1, 2, 3, 4]] * 3))


def _verdict(accepted: int, committed: int) -> Verdict:
    """Row 5 of three running rows accepts some tokens and commits some of its run; the other rows are finished."""
    run = [*range(1, accepted + 1), 9]
    row = RowVerdict(
        drafted=[1, 2, 3, 4],
        path=range(accepted),
        judged=min(accepted + 1, 4),
        tokens=run[:committed],
        dropped=len(run) - committed,
        ended=False,
        finite=True,
    )
    return Verdict((2, 5, 6), {5: row}, torch.zeros(3, 1, dtype=torch.long))


@pytest.mark.parametrize(
    ("accepted", "committed", "judged", "counted"),
    [
        (4, 5, 4, 4),
        (3, 4, 4, 3),
        (0, 1, 1, 0),
        # Lockstep cuts the row before the place where it rejects, right there, and in a draft that is accepted whole.
        (3, 2, 2, 2),
        (2, 2, 2, 2),
        (4, 1, 1, 1),
    ],
)
def test_statistics_count_the_places_that_were_committed(
    accepted: int, committed: int, judged: int, counted: int
) -> None:
    stats = Stats()
    stats.count(len(DRAFT.tree), DRAFT.length, _verdict(accepted, committed))
    assert (stats.rounds, stats.row_rounds, stats.drafted, stats.new_tokens) == (1, 1, 4, committed)
    assert (stats.judged, stats.accepted) == (judged, counted)
    assert stats.judged_per_depth == [1] * judged + [0] * (4 - judged)


@pytest.mark.parametrize(("accepted", "committed", "run"), [(3, 4, 4), (3, 2, 4), (4, 1, 5)])
def test_the_controller_learns_from_dropped_tokens_too(accepted: int, committed: int, run: int) -> None:
    row = _verdict(accepted, committed).rows[5]
    assert (row.run_length, row.judged_of(run), row.accepted_of(run)) == (run, 4, accepted)

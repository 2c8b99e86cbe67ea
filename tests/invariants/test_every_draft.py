"""What holds for every draft, under every control and rule, in every batch: one table.

Greedy text is the stock model's, token for token. Samples follow the exact joint of the model. A coupled text is that
of plain decoding with the same noise, and a row's own beside others, and in an engine whose rows join and leave.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import InLockstep, InTurns, ModelDrafts
from helpers.joints import EOS, EQUALLY_LONG, PROMPTS, VOCAB, Warp, drawn, holm_rejects, joint, padded
from helpers.serving import Stepped
from helpers.tiny import in_turns
from invariants.examples import EXAMPLES, Draft
from selfspec.accept import rules
from selfspec.control import Control, CostAware, FixedLength
from selfspec.control.costs import Costs
from selfspec.draft.registry import declarations
from selfspec.serve.row_request import RowRequest

LOSSLESS = [name for name, rule in rules().items() if rule.lossless]
COUPLED = [name for name in LOSSLESS if rules()[name].couples]
EVERYWHERE = [name for name, example in EXAMPLES.items() if example.build is None]
OF_A_KIND = [name for name in EXAMPLES if name not in EVERYWHERE]

# How long a draft is, and which source drafts.
CONTROLS: dict[str, Control] = {
    "chain": FixedLength(3),
    "tree": FixedLength(3, nodes=7),
    "model": ModelDrafts(2, nodes=7),
    "turns": InTurns(2, nodes=5),
    "costs": CostAware(3, nodes=7),
}

# Rows of different lengths over few tokens, so that some have a match for a look-up and others none; and many tokens
# that end a row, so that rows end at different times.
ROWS = [tiny.prompt(length, seed=length, vocabulary=12).clamp(min=1) for length in (3, 9, 1, 6)]
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": [7, 17, 29], "pad_token_id": 0}
GREEDY: dict[str, Any] = {**OPTIONS, "do_sample": False}
SAMPLED: dict[str, Any] = {**OPTIONS, "do_sample": True, "temperature": 0.9}

WARPS = (
    Warp(temperature=1.2),
    Warp(temperature=0.7),
    Warp(temperature=1.4, top_k=4, top_p=0.9),
    Warp(temperature=1.4, top_p=0.8),
    Warp(temperature=1.5, top_k=3, min_p=0.05),
)


def texts(spec: selfspec.SelfSpeculative, rows: list[Tensor], **options: Any) -> list[list[int]]:
    """The new tokens of each row of a batch; what follows them is padding."""
    ids, mask = padded(rows)
    found = spec.generate(ids, attention_mask=mask, **options)
    new = found.sequences[:, ids.shape[1] :].tolist()
    assert all(not any(row[length:]) for row, length in zip(new, found.lengths, strict=True))
    return [row[:length] for row, length in zip(new, found.lengths, strict=True)]


def test_every_registered_draft_has_an_example() -> None:
    tested = {word for name in EXAMPLES for word in re.split(r"[^\w-]+", name)}
    assert {each.name for each in declarations()} <= tested


@pytest.mark.parametrize(
    ("name", "architecture"),
    [*in_turns(EVERYWHERE, sorted(tiny.BUILDERS)), *(pytest.param(name, "its own", id=name) for name in OF_A_KIND)],
)
def test_greedy_text_is_stock_text(tmp_path: Path, name: str, architecture: str) -> None:
    model, draft = EXAMPLES[name].made(tmp_path, architecture)
    alone = [model.generate(row, attention_mask=torch.ones_like(row), **GREEDY)[0, row.shape[1] :] for row in ROWS]
    stock = [row.tolist() for row in alone]
    for place, control in enumerate(CONTROLS.values()):
        spec = selfspec.wrap(model, draft, draft_length=control, accept=LOSSLESS[place % len(LOSSLESS)])
        assert texts(spec, ROWS, **GREEDY) == stock
        # With what was learnt of the batch.
        assert texts(spec, [ROWS[place % 4]], **GREEDY) == [stock[place % 4]]


@pytest.mark.parametrize(("name", "rule", "control"), in_turns(list(EXAMPLES), COUPLED, CONTROLS))
def test_coupled_text_is_that_of_plain_decoding(tmp_path: Path, name: str, rule: str, control: Control) -> None:
    model, draft = EXAMPLES[name].made(tmp_path)
    plain = texts(selfspec.wrap(model, None, accept=rule), ROWS, **SAMPLED, seed=3)
    assert len(set(map(len, plain))) > 1
    spec = selfspec.wrap(model, draft, accept=rule, draft_length=control)
    # Whatever was learnt before.
    assert texts(spec, ROWS, **SAMPLED, seed=3) == plain
    assert texts(spec, ROWS, **SAMPLED, seed=3) == plain
    assert texts(spec, ROWS[:2], **SAMPLED, seed=3) == plain[:2]


@pytest.mark.parametrize(("name", "architecture"), in_turns(EVERYWHERE, sorted(tiny.BUILDERS)))
def test_coupled_text_of_every_architecture_in_float32(tmp_path: Path, name: str, architecture: str) -> None:
    model, draft = EXAMPLES[name].made(tmp_path, architecture, dtype=torch.float32)
    plain, spec = (selfspec.wrap(model, each, accept=COUPLED[0], draft_length=3) for each in (None, draft))
    for seed in range(3):
        assert texts(spec, ROWS, **SAMPLED, seed=seed) == texts(plain, ROWS, **SAMPLED, seed=seed)


@pytest.mark.parametrize(
    ("name", "control"), in_turns([*EXAMPLES], {each: CONTROLS[each] for each in ("chain", "tree")})
)
def test_rows_that_join_and_leave_are_what_they_are_alone(tmp_path: Path, name: str, control: Control) -> None:
    model, draft = EXAMPLES[name].made(tmp_path)
    engine = Stepped(selfspec.wrap(model, draft, draft_length=control), 4, 8)
    plain = selfspec.wrap(model, None, accept="coupled")
    seen, expected = [], []
    for number, row in enumerate((*ROWS, *ROWS)):
        new = 3 + 2 * number
        chosen: dict[str, Any] = {"do_sample": False} if number % 3 else {"do_sample": True, "temperature": 0.9}
        seen.append(engine.submit(RowRequest(tuple(row[0].tolist()), new, {**chosen, "eos_token_id": None}, number)))
        options = {**OPTIONS, **chosen, "eos_token_id": None, "max_new_tokens": new}
        expected += texts(plain, [row], **options, seed=number)
    engine.run()
    assert [list(each.tokens) for each in seen] == expected


def rejected(
    example: tuple[PreTrainedModel, Draft], rule: str, control: Control, warp: Warp, calls: int, seed: int = 0
) -> list[str]:
    """Draw texts of batches whose rows end apart, and return the prompts whose texts do not follow their joint."""
    model, draft = example
    spec = selfspec.wrap(model, draft, draft_length=control, accept=rule)
    # Of few rows in lockstep the slowest often commits several tokens, and the others lose some of theirs.
    in_step = isinstance(control, InLockstep)
    prompts, rows = (EQUALLY_LONG, 16) if in_step else (RAGGED, 512)
    batches = calls * 512 // rows
    found = drawn(spec, prompts, rows=rows, batches=batches, seed=seed, eos_token_id=EOS, **warp.options)
    assert found.accepted > rows * batches / 50
    return holm_rejects(found.fits(partial(joint, model, warp=warp, eos=EOS)), 1e-3)


def of_five_tokens(name: str, folder: Path) -> tuple[PreTrainedModel, Draft]:
    return EXAMPLES[name].made(folder, vocabulary=VOCAB, num_hidden_layers=3, initializer_range=0.25)


def warp_of(name: str, rule: str) -> Warp:
    return WARPS[(list(EXAMPLES).index(name) + LOSSLESS.index(rule)) % len(WARPS)]


# Prompts after which there are many texts of some chance.
RAGGED = (EQUALLY_LONG[0], PROMPTS[1])
DRAWING: dict[str, Control] = {
    "chain": FixedLength(2),
    "turns": InTurns(2, nodes=5),
    "costs": CostAware(3, nodes=5, costs=Costs(0.1)),
    "lockstep": InLockstep(2, nodes=5),
}


@pytest.mark.parametrize(("name", "rule"), in_turns(list(EXAMPLES), LOSSLESS))
def test_samples_follow_the_exact_joint(tmp_path: Path, name: str, rule: str) -> None:
    control = InTurns(2, nodes=5)
    assert rejected(of_five_tokens(name, tmp_path), rule, control, warp_of(name, rule), calls=2) == []


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("name", "rule", "control"),
    [case for case in in_turns(list(EXAMPLES), LOSSLESS, list(DRAWING)) if not case.marks],
)
def test_many_samples_follow_the_exact_joint(tmp_path: Path, name: str, rule: str, control: str) -> None:
    warp, example = warp_of(name, rule), of_five_tokens(name, tmp_path)
    if rejected(example, rule, DRAWING[control], warp, calls=20):
        # Of this many cases one is a misfit by chance in every eighth run: five times as many new draws decide.
        assert rejected(example, rule, DRAWING[control], warp, calls=100, seed=1_000) == []

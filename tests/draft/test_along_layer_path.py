"""Drafts along a path: how often each token passes each sublayer; skip sets and exit heads, by value and from files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.drafting import rounds_of
from helpers.reference import watched, with_layers
from selfspec.draft import Drafter, EarlyExit, ExitHead, LayerSkip
from selfspec.draft.early_exit import ABOUT, FILE
from selfspec.draft.layer_skip import write_skip_file
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.errors import DraftConfigError, ExitHeadError
from selfspec.files.json_text import write_described
from selfspec.model.identity import fingerprint
from selfspec.model.layer_path import Part, sublayers
from selfspec.tools.train.lesson import ExitHeads

ALL = sublayers(tiny.DEPTH)
PROMPT = 7

DRAFTS = {
    "exit 1": EarlyExit(1),
    "exit 3": EarlyExit(3),
    "attention 0": LayerSkip(attention=[0]),
    "mlp 0": LayerSkip(mlp=[0]),
    "attention 2 first": LayerSkip(attention=[2], mlp=[2, 3]),
    "mlp 1 first": LayerSkip(attention=[3], mlp=[1]),
    "last layer": LayerSkip(layers=[3]),
}


def _expected(draft: EarlyExit | LayerSkip, drafted: int) -> dict[object, int]:
    """Tokens through each module in one round, counted by hand from what a round should do."""
    path = draft.path(tiny.DEPTH)
    left_out = [s for s in ALL if not path.runs(s)]
    # Verification goes on at the first sublayer left out; where that is the very first, it starts from the tokens.
    resume = ALL.index(left_out[0])
    tokens: dict[object, int] = {}
    for place, sublayer in enumerate(ALL):
        drafting = drafted if path.runs(sublayer) else 0
        bringing_the_last_up = 1 if place < resume else 0
        verifying = drafted + 1 if place >= resume else 0
        tokens[sublayer] = tokens["linear", sublayer] = drafting + bringing_the_last_up + verifying
    for layer in range(tiny.DEPTH):
        runs = [place for place, s in enumerate(ALL) if s.layer == layer]
        tokens[layer] = (
            (drafted if any(path.runs(ALL[place]) for place in runs) else 0)
            + (1 if min(runs) < resume else 0)
            + (drafted + 1 if max(runs) >= resume else 0)
        )
    tokens["head"] = drafted + (drafted + 1)
    return tokens


@pytest.mark.parametrize("draft_length", [1, 3])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_no_token_passes_an_exact_sublayer_twice(
    architecture: str, draft: EarlyExit | LayerSkip, draft_length: int
) -> None:
    model = tiny.BUILDERS[architecture]()
    calls = watched(model)
    expected = _expected(draft, draft_length)
    before = {name: 0 if name == "head" else PROMPT - 1 for name in calls.tokens}
    # Rows of different lengths share the passes.
    prompts = tiny.prompt(PROMPT, 3)
    mask = prompts.new_ones(prompts.shape)
    mask[0, :4] = mask[2, :6] = 0
    stream = selfspec.wrap(model, draft, draft_length=draft_length).stream(prompts, mask, max_new_tokens=50)
    for _ in range(3):
        chunk = next(stream)
        assert len(chunk.rows[0].draft) == draft_length
        assert {name: count - before[name] for name, count in calls.tokens.items()} == expected
        before = dict(calls.tokens)


def test_without_a_draft_each_token_is_read_once_and_the_head_gives_one_row_a_pass(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    calls = watched(model)
    # The prompt's pass gives the first token.
    stream = selfspec.wrap(model).stream(tiny.prompt(PROMPT), max_new_tokens=5)
    for number in range(1, 6):
        next(stream)
        assert calls.tokens.pop("head") == number
        assert set(calls.tokens.values()) == {PROMPT - 1 + number}
        assert {count for name, count in calls.calls.items() if name != "head"} == {number}
        calls.tokens["head"] = number


@pytest.mark.parametrize("draft", [EarlyExit(2), LayerSkip(mlp=[1])], ids=str)
def test_the_last_round_drafts_no_more_than_can_be_committed(llama: PreTrainedModel, draft: Drafter) -> None:
    calls = watched(llama)
    wanted = 7
    committed = 0
    before = calls.tokens["head"]
    for chunk in selfspec.wrap(llama, draft, draft_length=4).stream(tiny.prompt(PROMPT), max_new_tokens=wanted):
        drafted = len(chunk.rows[0].draft)
        assert drafted == min(4, wanted - committed - 1)
        assert calls.tokens["head"] - before == 2 * drafted + 1
        before = calls.tokens["head"]
        committed += len(chunk.tokens)
    assert committed == wanted


def test_a_sampled_draft_is_scored_by_what_it_was_drawn_from(llama: PreTrainedModel) -> None:
    """Scored as one-hot it would still be exact, only wasteful: acceptance would fall to sum(p * q)."""
    spec = selfspec.wrap(llama, LayerSkip(mlp=[3]), draft_length=4)
    # At this temperature p and q are nearly uniform: sum(min(p, q)) is nearly 1, sum(p * q) nearly 1 / 50.
    out = spec.generate(tiny.prompt(PROMPT, 8), max_new_tokens=60, do_sample=True, temperature=4.0, top_k=0, seed=1)
    assert out.stats.judged > 300
    assert out.stats.acceptance_rate > 0.7


def test_drafts_are_the_greedy_text_of_the_model_cut_there(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    for layer in (1, 3):
        cut = with_layers(model, range(layer))
        text = tiny.prompt(11)[0].tolist()
        spec = selfspec.wrap(model, EarlyExit(layer), draft_length=3)
        for chunk in spec.stream(tiny.prompt(11), max_new_tokens=12):
            (row,) = chunk.rows
            assert list(row.draft) == greedy_text(cut, text, len(row.draft))
            text += row.tokens
        assert len(text) == 23


def greedy_text(model: PreTrainedModel, prefix: list[int], length: int) -> list[int]:
    """The next tokens, each from a forward over all before it: no cache, no `generate`."""
    text = list(prefix)
    with torch.no_grad():
        for _ in range(length):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].float().argmax()))
    return text[len(prefix) :]


def _skipped(draft: LayerSkip, depth: int = 4) -> list[tuple[int, Part]]:
    path = draft.path(depth)
    return [(s.layer, s.part) for s in sublayers(depth) if not path.runs(s)]


def test_it_leaves_out_what_it_names() -> None:
    attention, mlp = Part.ATTENTION, Part.MLP
    assert _skipped(LayerSkip(attention=[1])) == [(1, attention)]
    assert _skipped(LayerSkip(mlp=[0, 3])) == [(0, mlp), (3, mlp)]
    assert _skipped(LayerSkip(layers=[2])) == [(2, attention), (2, mlp)]
    assert _skipped(LayerSkip(attention=[3, 0], mlp=[1], layers=[2])) == [
        (0, attention),
        (1, mlp),
        (2, attention),
        (2, mlp),
        (3, attention),
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    skip = LayerSkip(attention=[1, 2], mlp=[3])
    write_skip_file(skip, fingerprint(tiny.llama()), tmp_path / "found.json", {"alpha": 0.5})
    return tmp_path / "found.json"


def test_it_drafts_as_the_set_itself_does(file: Path) -> None:
    drafter = parse_draft(f"skip-file:{file}")
    assert isinstance(drafter, LayerSkip)
    assert draft_name(drafter) == f"skip-file:{file}"
    model, prompt = tiny.llama(), tiny.prompt(5)
    found, itself = (
        selfspec.wrap(model, draft, draft_length=3).generate(prompt, max_new_tokens=12, do_sample=False)
        for draft in (drafter, LayerSkip([1, 2], [3]))
    )
    assert found.sequences.tolist() == itself.sequences.tolist()
    assert found.stats.accepted_per_depth == itself.stats.accepted_per_depth


def test_another_model_is_refused(file: Path) -> None:
    with pytest.raises(DraftConfigError, match="is of another base"):
        selfspec.wrap(tiny.llama(seed=1), LayerSkip.from_file(file))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "base": "x"}', '{"format": 2}'])
def test_what_is_no_skip_set_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DraftConfigError, match="selfspec search wrote"):
        LayerSkip.from_file(tmp_path / "x.json")
    with pytest.raises(DraftConfigError, match="cannot be read"):
        LayerSkip.from_file(tmp_path / "none.json")


def _side_car(folder: Path, model: torch.nn.Module, trained: bool = True) -> Path:
    """Heads for a tiny model, exits 1 and 2: of random weights, or new ones, which change nothing."""
    torch.manual_seed(1)
    heads = ExitHeads(32, 16, (1, 2))
    for weight in heads.parameters() if trained else ():
        torch.nn.init.normal_(weight, std=0.3)
    folder.mkdir()
    heads.save(folder, torch.float32, fingerprint(model), 2, {"alpha_2": 0.5})
    return folder


def test_the_adapter_is_what_drafts(tmp_path: Path) -> None:
    """A head that changes nothing drafts as the plain exit does; a random one does not."""
    model = tiny.llama()
    drafters = (
        EarlyExit(2),
        ExitHead.from_pretrained(_side_car(tmp_path / "new", model, trained=False)),
        ExitHead.from_pretrained(_side_car(tmp_path / "random", model)),
    )
    plain, new, random = (
        [row.draft for row in rounds_of(selfspec.wrap(model, draft=drafter, draft_length=4), tiny.prompt(7), 20)]
        for drafter in drafters
    )
    assert plain == new != random


def test_the_default_exit_is_the_one_its_training_chose(tmp_path: Path) -> None:
    drafter = ExitHead.from_pretrained(_side_car(tmp_path / "heads", tiny.llama()))
    assert drafter.layer == 2
    assert repr(drafter) == f"head:{tmp_path / 'heads'}@2"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_is_known_in_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny.llama(dtype=torch.float32)
    drafter = ExitHead.from_pretrained(_side_car(tmp_path / "heads", model))
    spec = selfspec.wrap(model.to(dtype), draft=drafter, draft_length=4)
    assert spec.generate(tiny.prompt(4), max_new_tokens=6, do_sample=False).lengths == (6,)
    # The drafter may serve other models at the same time.
    adapter: Any = drafter.draft_head.adapter
    assert {weight.dtype for weight in adapter.parameters()} == {torch.float32}


def test_what_is_no_such_head_is_refused(tmp_path: Path) -> None:
    folder = _side_car(tmp_path / "heads", tiny.llama())
    with safe_open(folder / FILE, framework="pt") as opened:
        about = json.loads(opened.metadata()[ABOUT])
    tensors = load_file(folder / FILE)
    with pytest.raises(ExitHeadError, match="it has 1, 2"):
        ExitHead.from_pretrained(folder, layer=3)
    changes: list[dict[str, Any]] = [{"format": 1}, {"exits": None}, {"rank": 0}, {"rank": 17}, {"hidden": 8}]
    for change in [*changes, {"base": 3}, {"default": 3}]:
        write_described(folder / FILE, ABOUT, {**about, **change}, tensors)
        with pytest.raises(ExitHeadError):
            ExitHead.from_pretrained(folder)
    write_described(folder / FILE, ABOUT, about, {**tensors, "exits.1.scale": torch.full((32,), torch.nan)})
    with pytest.raises(ExitHeadError, match="NaN or infinite"):
        ExitHead.from_pretrained(folder)
    (folder / FILE).unlink()
    with pytest.raises(ExitHeadError, match=re.escape(FILE)):
        ExitHead.from_pretrained(folder)


@pytest.mark.parametrize("other", [lambda: tiny.llama(seed=1), tiny.mistral], ids=["weights", "architecture"])
def test_another_base_is_refused(tmp_path: Path, other: Callable[[], PreTrainedModel]) -> None:
    drafter = ExitHead.from_pretrained(_side_car(tmp_path / "heads", tiny.llama()))
    with pytest.raises(ExitHeadError, match="another base"):
        selfspec.wrap(other(), draft=drafter, draft_length=4)

"""What is to run on a device runs on a CPU, in miniature, whole; and can be stopped and resumed.

A widened model computes what the small one does.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device import command
from device.command import main
from device.figure import Figure, Rows, lacking
from device.first import first_cases
from device.models import SHAPES, Models
from device.stage import Bench, Case, Stage
from device.stages import STAGES
from device.waits import waits_of_rounds
from transformers import LlamaConfig, LlamaForCausalLM
from widen import Size, padding_chance, stretch, widened, widened_config

from helpers.captures import StandIn
from selfspec.errors import UnsupportedOptionError
from selfspec.kernels import trial
from selfspec.measure.embedded import checkpoint_folder
from selfspec.model.checkpoint import read_config
from selfspec.tools.lab import arms

STORIES = str(Path(__file__).resolve().parents[1] / "models" / "stories260K")
MINIATURE = ["--device", "cpu", "--miniature", "--model", STORIES]


pytestmark = pytest.mark.usefixtures("verbosity_as_before")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for graphs, so that what comes before and after them runs."""
    monkeypatch.setitem(arms.RUNTIMES, arms.RuntimeName.GRAPHS, StandIn)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def found_in(folder: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{stage}.json").read_text())
    return found


@pytest.mark.tools
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("stage", [stage.name for stage in STAGES])
def test_a_stage_runs_whole(stage: str, tmp_path: Path) -> None:
    assert main([stage, *MINIATURE, "--to", str(tmp_path)]) == 0
    record = found_in(tmp_path, stage)
    assert record["cases"]
    cannot = [found["reason"]["cannot"] for found in record["cases"].values() if found["reason"] is not None]
    # A CPU lacks nothing that has a stand-in.
    assert cannot == []
    rows = [row for case in record["cases"].values() for row in case["rows"].values()]
    lacked = {figure["cannot"] for row in rows for figure in row.values()} - {None}
    assert all("on a CPU" in reason or "a CPU has" in reason or "compiler" in reason for reason in lacked), lacked
    summary = (tmp_path / "summary.md").read_text()
    assert f"## {stage}" in summary
    assert "**failed**" not in summary
    assert not (tmp_path / f"{stage}.partial.json").exists()


def test_another_text_and_a_kernel_that_is_not_trusted_are_seen_first(monkeypatch: pytest.MonkeyPatch) -> None:
    device, own = torch.device("cpu"), LlamaForCausalLM.generate
    case = next(iter(first_cases(Bench(device, miniature=True, models=Models(device, miniature=True, small=STORIES)))))
    assert {name for figures in case.measure().values() for name, each in figures.items() if each.failed} == set()

    def other(*args: Any, **options: Any) -> Any:
        text = own(*args, **options)
        # Not where a wrapper asks what is meant.
        if "custom_generate" not in options:
            logging.getLogger(trial.__name__).warning("it differs")
            text[1, -2] += 1
        return text

    monkeypatch.setattr(LlamaForCausalLM, "generate", other)
    monkeypatch.setattr("selfspec.model.decodable.check_loop", lambda model: None)
    (figures,) = case.measure().values()
    assert {name: each.failed for name, each in figures.items() if each.failed} == {
        "greedy text": "row 1 is another text from its token 18 on",
        "kernels in Triton": "it differs",
    }


def stage_of(monkeypatch: pytest.MonkeyPatch, **cases: Callable[[], Rows]) -> None:
    made = Stage("made", "Made up", 1, lambda bench: (Case(name, measure) for name, measure in cases.items()))
    monkeypatch.setattr(command, "STAGES", (made,))
    monkeypatch.setattr(command, "_NAMES", ["made"])


def counting(calls: list[str], name: str) -> Rows:
    calls.append(name)
    return {"": {"number": Figure.number(len(calls))}}


def test_a_killed_stage_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def killed() -> Rows:
        calls.append("second")
        if calls.count("second") == 1:
            raise KeyboardInterrupt
        return {"": {"number": Figure.of([1.0, 2.0, 3.0], "ms")}}

    stage_of(monkeypatch, first=partial(counting, calls, "first"), second=killed)
    words = [*MINIATURE, "--to", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        main(words)
    assert (tmp_path / "made.partial.json").exists()
    assert main(words) == 0
    assert calls == ["first", "second", "second"]
    assert list(found_in(tmp_path, "made")["cases"]) == ["first", "second"]
    # Complete: nothing is measured again, unless that is asked for.
    assert main(words) == 0
    assert len(calls) == 3
    assert main([*words, "--again"]) == 0
    assert calls[3:] == ["first", "second"]


def test_what_ends_the_process_again_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deadly() -> Rows:
        raise SystemExit(9)

    calls: list[str] = []
    stage_of(monkeypatch, deadly=deadly, last=partial(counting, calls, "last"))
    words = [*MINIATURE, "--to", str(tmp_path)]
    for _ in range(2):
        with pytest.raises(SystemExit, match="9"):
            main(words)
    assert main(words) == 1
    assert calls == ["last"]
    assert "ended 2 times" in found_in(tmp_path, "made")["cases"]["deadly"]["reason"]["failed"]


def test_a_case_that_fails_is_recorded_and_the_next_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> Rows:
        raise ZeroDivisionError("no\nluck")

    def refused() -> Rows:
        raise UnsupportedOptionError("move it to a device")

    calls: list[str] = []
    stage_of(monkeypatch, failing=failing, refused=refused, last=partial(counting, calls, "last"))
    assert main([*MINIATURE, "--to", str(tmp_path)]) == 1
    cases = found_in(tmp_path, "made")["cases"]
    assert cases["failing"]["reason"]["failed"] == "ZeroDivisionError: no luck"
    assert cases["refused"]["reason"]["cannot"] == "move it to a device"
    assert cases["last"]["rows"][""]["number"]["value"] == 1
    summary = (tmp_path / "summary.md").read_text()
    assert "- **failed**: made: ZeroDivisionError: no luck (failing)" in summary
    assert "- cannot: made: move it to a device (refused)" in summary
    assert "failing: failed in 0 s: ZeroDivisionError" in capsys.readouterr().out
    # What is refused is no failure.
    stage_of(monkeypatch, refused=refused)
    assert main([*MINIATURE, "--to", str(tmp_path), "--again"]) == 0


def test_no_case_begins_when_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    stage_of(monkeypatch, first=partial(counting, calls, "first"))
    words = [*MINIATURE, "--to", str(tmp_path)]
    assert main([*words, "--minutes", "-1"]) == 1
    assert calls == []
    assert main(words) == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["no-such-stage", "--to", "x"], "no stage 'no-such-stage'; choose from first, pieces, costs-8B, waits"),
        ([], "--to"),
        (["--device", "cpu", "--to", "x"], "add --miniature"),
        ([*MINIATURE, "--model", "no-such-folder", "--to", "x"], "no-such-folder"),
        pytest.param(
            ["--to", "x"],
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_results_of_other_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage_of(monkeypatch, first=partial(counting, [], "first"))
    words = ["--device", "cpu", "--miniature", "--to", str(tmp_path)]
    assert main([*words, "--model", STORIES]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "was made with" in capsys.readouterr().err
    (tmp_path / "made.json").write_text("{")
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "made.json cannot be read" in capsys.readouterr().err


def test_stages_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == [stage.name for stage in STAGES]
    assert all(stage.minutes < 9 for stage in STAGES)
    # Names of cases differ.
    for miniature in (True, False):
        device = torch.device("cpu")
        bench = Bench(device, miniature, Models(device, miniature))
        for stage in STAGES:
            names = [case.name for case in stage.cases(bench)]
            assert len(set(names)) == len(names) > 0


def test_shapes_are_those_of_the_models_they_are_named_after() -> None:
    parameters = {}
    for name in SHAPES:
        config = Models(torch.device("meta"), miniature=False).config(name)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        parameters[name] = round(model.num_parameters() / 1e6)
    assert parameters == {"1B": 1236, "8B": 8030}
    # The embedded model can be widened to both sizes.
    small, models = read_config(str(checkpoint_folder())), Models(torch.device("meta"), miniature=False)
    for name, billions in (("1B", 1.0), ("8B", 7.8)):
        with torch.device("meta"):
            wide = LlamaForCausalLM(widened_config(small, models.size(name)))
        assert wide.num_parameters() / 1e9 == pytest.approx(billions, rel=0.1)
        assert 0 < models.exit_layer(name, 1 / 3) < models.exit_layer(name, 3 / 4) < models.size(name).layers


def test_random_models_are_the_same_every_time_and_trained_ones_say_what_the_small_one_does() -> None:
    models = Models(torch.device("cpu"), miniature=True, small=STORIES)
    first = models.random("1B")
    assert models.random("1B") is first
    assert first.dtype == torch.bfloat16
    small = models.small()
    prompt = small.encode("Once upon a time")
    said = small.model.generate(prompt, max_new_tokens=12, do_sample=False)
    wide = models.trained("1B")
    assert wide.model.num_parameters() > 2 * small.model.num_parameters()
    assert torch.equal(wide.model.generate(prompt, max_new_tokens=4, do_sample=False), said[:, : prompt.shape[1] + 4])
    again = models.random("1B")
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))


def test_figures() -> None:
    assert Figure.of([1.0, 2.0, 3.0, 4.0, 5.0], "ms").shown == "3 (1-5) ms"
    assert Figure.number(float("nan"), lacking="nobody knows") == Figure(cannot="nobody knows")
    assert Figure("EXACT").shown == "EXACT"
    assert Figure.number(12345.6, "MiB").shown == "12346 MiB"
    assert lacking(ValueError("bad")).shown == "FAILED"
    with pytest.raises(ValueError, match="came out as inf"):
        replace(Figure.number(1.0), value=float("inf"))


def test_waits_of_rounds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ["default"]

    def set_mode(mode: str) -> None:
        # As torch does, when it is first used.
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        modes.append(mode)

    class Waiting:
        def __init__(self) -> None:
            self.rounds = 0

        def __next__(self) -> None:
            self.rounds += 1
            for _ in range(self.rounds if modes[-1] == "warn" else 0):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

        def close(self) -> None:
            assert self.rounds == 4

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    begun: Any = Waiting
    assert waits_of_rounds(begun, 3).samples == (2.0, 3.0, 4.0)
    assert modes == ["default", *["warn", "default"] * 3]


# Norms of a llama are computed in float32.
_CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 0}
SIZE = Size(hidden=48, heads=6, intermediate=40, layers=7)


def small(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).double().eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_the_small_models(tied: bool) -> None:
    model, prompt = small(tied), torch.arange(12)[None]
    wide = widened(model, SIZE)
    assert wide.get_output_embeddings().weight.shape == (60, SIZE.hidden)
    with torch.no_grad():
        torch.testing.assert_close(wide(prompt).logits, model(prompt).logits, **_CLOSE)


def test_a_padded_vocabulary_adds_no_likely_token() -> None:
    model, prompt = small(tied=False), torch.arange(12)[None]
    # States that have something in common, and a token that is far from it.
    model.model.embed_tokens.weight.data[:, 0] += 20.0
    model.lm_head.weight.data[59] = -torch.eye(32, dtype=torch.float64)[0]
    wide = widened(model, replace(SIZE, vocabulary=90))
    with torch.no_grad():
        torch.testing.assert_close(wide(prompt).logits[..., :60], model(prompt).logits, **_CLOSE)
    assert 0 < padding_chance(wide, model, prompt) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 16}, "hidden"),
        ({"heads": 5}, "groups"),
        ({"layers": 2}, "no room"),
        ({"vocabulary": 40}, "vocabulary"),
        ({"vocabulary": 90}, "may be likely"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        widened(small(), replace(SIZE, **change))


def test_more_positions_are_told_apart() -> None:
    model = small()
    stretch(model.config, 4 * model.config.max_position_embeddings)
    longer = LlamaForCausalLM(LlamaConfig.from_dict(model.config.to_dict())).double().eval()
    longer.load_state_dict(model.state_dict())
    assert longer.config.max_position_embeddings == 8192
    with torch.no_grad():
        logits = [
            longer(torch.tensor([[5, 5, 7]]), position_ids=torch.tensor([[0, at, at + 1]])).logits[0, -1]
            for at in (1, 8000)
        ]
    assert not torch.allclose(*logits)

"""What is to run on a device runs on a CPU, in miniature, whole; and can be stopped and resumed.

A widened model computes what the small one does.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from device.kit import CANNOT, FAILED, Bench, Rows, Stage, main
from device.models import Models
from device.stages import STAGES, first_cases, host_milliseconds, waits_of_rounds
from transformers import LlamaConfig, LlamaForCausalLM
from widen import Size, padding_chance, stretch, widened, widened_config

from helpers.captures import StandIn
from selfspec.device import HostCopy
from selfspec.errors import UnsupportedOptionError
from selfspec.kernels import trial
from selfspec.measure.embedded import checkpoint_folder
from selfspec.measure.estimate import Estimate
from selfspec.model.checkpoint import read_config
from selfspec.tools.lab import arms
from selfspec.tools.lab.runs import Row, Runs

STORIES = str(Path(__file__).resolve().parents[1] / "models" / "stories260K")
MINIATURE = ["--device", "cpu", "--miniature", "--model", STORIES]


pytestmark = pytest.mark.usefixtures("verbosity_as_before")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for graphs, so that what comes before and after them runs."""
    monkeypatch.setitem(arms.RUNTIMES, "graphs", StandIn)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def found_in(folder: Path) -> list[Row]:
    return Runs(folder).measured("device")


@pytest.mark.tools
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_runs_whole(stage: str, tmp_path: Path) -> None:
    assert main(STAGES, [stage, *MINIATURE, "--to", str(tmp_path)]) == 0
    rows = found_in(tmp_path)
    assert rows
    assert all(row["stage"] == stage and len(row["figures"]) > 0 for row in rows)
    # A CPU lacks nothing that has a stand-in.
    said = [value for row in rows for value in row.values() if isinstance(value, str)]
    lacked = {each for each in said if each.startswith(CANNOT)}
    assert all("on a CPU" in reason or "a CPU has" in reason or "compiler" in reason for reason in lacked), lacked
    summary = (tmp_path / "summary.md").read_text()
    assert f"## {stage}\n" in summary
    assert "FAILED" not in summary


def test_another_text_and_a_kernel_that_is_not_trusted_are_seen_first(monkeypatch: pytest.MonkeyPatch) -> None:
    device, own = torch.device("cpu"), LlamaForCausalLM.generate
    measure = first_cases(Bench(device, miniature=True, models=Models(device, miniature=True, small=STORIES)))

    def failing() -> dict[str, Any]:
        (figures,) = measure["eager, plain"]().values()
        return {name: each for name, each in figures.items() if str(each).startswith(FAILED)}

    assert failing() == {}

    def other(*args: Any, **options: Any) -> Any:
        text = own(*args, **options)
        # Not where a wrapper asks what is meant.
        if "custom_generate" not in options:
            logging.getLogger(trial.__name__).warning("it differs")
            text[1, -2] += 1
        return text

    monkeypatch.setattr(LlamaForCausalLM, "generate", other)
    monkeypatch.setattr("selfspec.model.decodable.check_loop", lambda model: None)
    assert failing() == {
        "greedy text": "FAILED: row 1 is another text from its token 18 on",
        "kernels in Triton": "FAILED: it differs",
    }


def stages_of(**cases: Callable[[], Rows]) -> dict[str, Stage]:
    return {"made": Stage("Made up", 1, lambda bench: cases)}


def counting(calls: list[str], name: str) -> Rows:
    calls.append(name)
    return {"": {"amount": float(len(calls))}}


def test_a_killed_stage_goes_on_where_it_was(tmp_path: Path) -> None:
    calls: list[str] = []

    def killed() -> Rows:
        calls.append("second")
        if calls.count("second") == 1:
            raise KeyboardInterrupt
        return {"": {"amount": Estimate.of_median([1.0, 2.0, 3.0, 4.0, 5.0])}}

    stages = stages_of(first=partial(counting, calls, "first"), second=killed)
    words = [*MINIATURE, "--to", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        main(stages, words)
    assert main(stages, words) == 0
    assert calls == ["first", "second", "second"]
    assert [row["case"] for row in found_in(tmp_path)] == ["first", "second"]
    assert "| second | 3.00 (1.00-5.00) |" in (tmp_path / "summary.md").read_text()
    # Complete: nothing is measured again, but what was asked for otherwise.
    assert main(stages, words) == 0
    assert len(calls) == 3
    assert main(stages, ["--device", "cpu", "--miniature", "--to", str(tmp_path)]) == 0
    assert calls[3:] == ["first", "second"]


def test_what_ends_the_process_again_is_left_out(tmp_path: Path) -> None:
    def deadly() -> Rows:
        raise SystemExit(9)

    calls: list[str] = []
    stages = stages_of(deadly=deadly, last=partial(counting, calls, "last"))
    words = [*MINIATURE, "--to", str(tmp_path)]
    for _ in range(2):
        with pytest.raises(SystemExit, match="9"):
            main(stages, words)
    assert main(stages, words) == 1
    assert calls == ["last"]
    assert "ended 2 times" in found_in(tmp_path)[0]["error"]


def test_a_case_that_fails_is_recorded_and_the_next_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> Rows:
        raise ZeroDivisionError("no\nluck")

    def refused() -> Rows:
        raise UnsupportedOptionError("move it to a device")

    calls: list[str] = []
    stages = stages_of(failing=failing, refused=refused, last=partial(counting, calls, "last"))
    assert main(stages, [*MINIATURE, "--to", str(tmp_path / "all")]) == 1
    assert [row.get("amount") for row in found_in(tmp_path / "all")] == [None, None, 1.0]
    summary = (tmp_path / "all" / "summary.md").read_text()
    assert "- made: FAILED: ZeroDivisionError: no luck (test_device.py:" in summary
    assert "- made: cannot: UnsupportedOptionError: move it to a device (refused)" in summary
    assert "failing: FAILED: ZeroDivisionError" in capsys.readouterr().out
    # What is refused is no failure.
    assert main(stages_of(refused=refused), [*MINIATURE, "--to", str(tmp_path / "one")]) == 0


def test_no_case_begins_when_time_is_up(tmp_path: Path) -> None:
    calls: list[str] = []
    stages = stages_of(first=partial(counting, calls, "first"))
    words = [*MINIATURE, "--to", str(tmp_path)]
    assert main(stages, [*words, "--minutes", "-1"]) == 1
    assert calls == []
    assert main(stages, words) == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["no-such-stage", "--to", "x"], "no stage 'no-such-stage'; choose from first, pieces, waits, rows"),
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
        main(STAGES, words)
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_stages_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(STAGES, ["--list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == list(STAGES)
    assert all(stage.minutes < 9 for stage in STAGES.values())
    for miniature in (True, False):
        bench = Bench(torch.device("cpu"), miniature, Models(torch.device("cpu"), miniature))
        assert all(stage.cases(bench) for stage in STAGES.values())


def test_the_embedded_model_can_be_widened_to_the_sizes_that_are_measured() -> None:
    small, models = read_config(str(checkpoint_folder())), Models(torch.device("meta"), miniature=False)
    for name, billions in (("1B", 1.0), ("8B", 7.8)):
        with torch.device("meta"):
            wide = LlamaForCausalLM(widened_config(small, models.size(name)))
        assert wide.num_parameters() / 1e9 == pytest.approx(billions, rel=0.1)
        assert 0 < models.exit_layer(name, 1 / 3) < models.exit_layer(name, 3 / 4) < models.size(name).layers


def test_trained_models_say_what_the_small_one_does() -> None:
    models = Models(torch.device("cpu"), miniature=True, small=STORIES)
    small = models.small()
    prompt = small.encode("Once upon a time")
    said = small.model.generate(prompt, max_new_tokens=12, do_sample=False)
    wide = models.trained("1B")
    assert models.trained("1B") is wide
    assert wide.model.dtype == torch.bfloat16
    assert wide.model.num_parameters() > 2 * small.model.num_parameters()
    assert torch.equal(wide.model.generate(prompt, max_new_tokens=4, do_sample=False), said[:, : prompt.shape[1] + 4])


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
    assert waits_of_rounds(begun, 3) == Estimate.of_median([2.0, 3.0, 4.0])
    assert modes == ["default", *["warn", "default"] * 3]


def test_of_a_round_the_host_does_what_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr("device.stages.time.perf_counter", lambda: next(clock) / 1000)

    def rounds() -> Iterator[None]:
        while True:
            HostCopy(torch.zeros(1)).read()
            yield

    begun: Any = rounds
    # Between its four looks at the clock three thousandths pass, and one of them in a wait.
    assert host_milliseconds(begun, 3).value == pytest.approx(2.0)


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

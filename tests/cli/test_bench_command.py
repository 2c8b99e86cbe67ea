"""`selfspec bench`, `ablate` and `search`: arms side by side, results that can be resumed, reports, and skip sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import selfspec
from helpers.running import Invoke, tight_budget
from selfspec.cli.bench import Arms, Cells, ExtraArm, ModelToBench
from selfspec.measure.embedded import checkpoint_folder as demo_folder
from selfspec.measure.timing import Call
from selfspec.tools.lab.arms import Cell, Prompts, StockArm

pandas = pytest.importorskip("pandas")

QUICK = ("--prompts", "2", "--repeats", "1", "--warm-up", "1", "--max-new-tokens", "16", "--context", "12")
STUDY = ("--texts", "2", "--max-new-tokens", "12", "--pricing", "weights", "--device", "cpu")
ARMS = ("--arm", "lookup", "--arm", "draft", "--draft", "exit:2")


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """A workload."""
    file = tmp_path / "texts.jsonl"
    lines = ("Once upon a time, there was a little girl named Lily.", "One day, a dog and a cat went to the park.")
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return f"stories={file}"


def names(model: str, **given: Any) -> list[str]:
    """The arms that options ask for."""
    return [spec.name for spec in Arms(**given).specs(ModelToBench(model=model, device="cpu"))]


@pytest.mark.usefixtures("invoke")
def test_the_arms_in_order(folder: str) -> None:
    assert names(folder, draft=["exit:2", "lookup+exit:2"]) == [
        "model.generate",
        "model.generate, prompt look-up",
        "model.generate, assistant_early_exit=2, length 3",
        "selfspec plain",
        "selfspec exit:2, length 3",
        "selfspec exit:2",
        "selfspec lookup+exit:2",
    ]
    ruled = {"draft": ["exit:1", "exit:1"], "draft_length": 4, "accept": ["token", "block"]}
    assert names(folder, arm=[ExtraArm.DRAFT, ExtraArm.STATIC], runtime="eager", **ruled) == [
        "model.generate",
        "model.generate, static cache, compiled",
        "selfspec plain, stock modules",
        "selfspec exit:1, length 4, token, stock modules",
        "selfspec exit:1, length 4, block, stock modules",
    ]
    assert names(folder, arm=[ExtraArm.DRAFT], draft=["exit:1"], nodes=[4, 8])[2:] == [
        "selfspec exit:1",
        "selfspec exit:1, 4 nodes",
        "selfspec exit:1, 8 nodes",
    ]
    with pytest.raises(selfspec.errors.DraftConfigError, match="at least its length, 4"):
        names(folder, draft=["exit:1"], draft_length=4, nodes=[3])
    assert names(folder)[-3:] == ["selfspec exit:1", "selfspec lookup", "selfspec lookup+exit:1"]


@pytest.mark.usefixtures("invoke")
def test_an_assistant_is_measured_in_both_ways(folder: str) -> None:
    draft = [f"assistant:{folder}"]
    assert names(folder, draft=draft, arm=[ExtraArm.ASSISTANT, ExtraArm.DRAFT]) == [
        "model.generate",
        f"model.generate, assistant_model={folder}",
        "selfspec plain",
        f"selfspec assistant:{folder}",
    ]
    with pytest.raises(selfspec.errors.DraftConfigError, match="add --draft assistant:FOLDER"):
        names(folder, arm=[ExtraArm.ASSISTANT], draft=["exit:1"])


def test_the_grid_has_every_combination_once() -> None:
    cells = Cells(temperature=[0.0, 0.8], batch=[1, 4, 1], context=[8]).grid(["a", "b"])
    assert len(cells) == len(set(cells)) == 8
    assert cells[0] == Cell("a", 0.0, 1, 8, 64)


@pytest.mark.tools
def test_bench_and_its_report(invoke: Invoke, folder: str, texts: str, tmp_path: Path) -> None:
    to = tmp_path / "results"
    # Of itself the control would not draft with an exit that is worth nothing on these prompts.
    fixed = (*QUICK, "--measure", "costs", *ARMS, "--draft-length", "3")
    words = ("bench", folder, "--workload", texts, *fixed, "--to", str(to), "--dtype", "float64")
    ending = invoke(*words, "--output", "json")
    assert ending.status == 0, ending.stderr
    found = json.loads(ending.stdout)
    assert [each["cell"]["temperature"] for each in found["cells"]] == [0.0, 0.8]
    greedy = {arm["name"]: arm for arm in found["cells"][0]["arms"]}
    stock = ["model.generate", "model.generate, prompt look-up"]
    assert list(greedy) == [*stock, "selfspec plain", "selfspec exit:2, length 3"]
    for arm in greedy.values():
        assert arm["agreement"]["equal"] == arm["agreement"]["texts"] == 2
        assert arm["decoding_tokens_per_second"]["value"] > 0
    assert greedy["model.generate"]["decoding_against"]["model_generate"]["value"] == 1.0
    assert found["cells"][0]["settings"]["dtype"] == "float64"
    assert greedy["selfspec exit:2, length 3"]["round_in_plain_steps"]["verify"] > 0
    text = (to / "report.md").read_text()
    assert "| selfspec exit:2, length 3 |" in text
    pictures = {"speed.png", "speed.svg", "acceptance.png", "acceptance.svg"}
    written = {"runs.jsonl", "report.md", "report.html", "texts.csv", "texts.parquet"}
    assert {file.name for file in to.iterdir()} == written | pictures
    # What is there already is not measured again.
    before = (to / "runs.jsonl").read_bytes()
    (to / "report.md").unlink()
    assert invoke(*words).status == 0
    assert (to / "runs.jsonl").read_bytes() == before
    again = invoke("bench", "--report", str(to), "--output", "json")
    assert json.loads(again.stdout) == found
    assert (to / "report.md").read_text() == text


@pytest.mark.tools
def test_arms_that_say_something_else_fail_it(
    invoke: Invoke, folder: str, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = StockArm.decode

    def slip(self: StockArm, prompts: Prompts, cell: Cell, seed: int) -> Call:
        call = decode(self, prompts, cell, seed)
        if self.spec.kind == "lookup":
            call.rows[0][-1] += 1
        return call

    monkeypatch.setattr(StockArm, "decode", slip)
    words = ("--workload", texts, *QUICK, "--measure", "costs", *ARMS, "--temperature", "0")
    ending = invoke("bench", folder, *words, "--to", str(tmp_path / "to"), "--output", "json")
    found = json.loads(ending.stdout)
    assert ending.status == 1
    assert found["error"]["type"] == "RefusedError"
    assert found["error"]["message"].startswith("greedy tokens differ: model.generate, prompt look-up (stories")
    refused = found["cells"][0]["arms"][1]
    assert refused["agreement"]["refused"]
    assert "decoding_tokens_per_second" not in refused
    assert "REFUSED" in (tmp_path / "to" / "report.md").read_text()


def test_without_matplotlib_it_says_so_before_it_begins(
    invoke: Invoke, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfspec.tools.lab.report.find_spec", lambda name: None)
    ending = invoke("bench", folder, "--to", str(tmp_path / "to"))
    assert (ending.status, ending.stdout) == (2, "")
    assert "selfspec[bench]" in ending.stderr


@pytest.mark.tools
def test_arms_are_measured_within_a_budget(
    invoke: Invoke, folder: str, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight_budget(monkeypatch)
    asked = ["--workload", texts, "--temperature", "0", "--arm", "draft", "--draft", "lookup+int4", "--memory", "1TiB"]
    ending = invoke("bench", folder, *QUICK, *asked, "--to", str(tmp_path / "out"), "--output", "json")
    assert ending.status == 0
    (cell,) = json.loads(ending.stdout)["cells"]
    assert cell["settings"]["model"].endswith("within 1TiB")
    assert len(cell["arms"]) == 3
    for arm in cell["arms"]:
        assert arm["agreement"]["equal"] == arm["agreement"]["texts"] == 2


@pytest.mark.tools
def test_acceptance_alone_of_whole_prompts_times_nothing(
    invoke: Invoke, folder: str, texts: str, tmp_path: Path
) -> None:
    words = f"bench {folder} --workload {texts} --measure acceptance --max-new-tokens 16 --temperature 0".split()
    words += ["--draft", "int8", "--draft", "lookup", "--draft-length", "2", "--to", str(tmp_path)]
    ending = invoke(*words, "--output", "json")
    assert ending.status == 0, ending.stderr
    (cell,) = json.loads(ending.stdout)["cells"]
    assert [arm["name"] for arm in cell["arms"]] == ["selfspec int8, length 2", "selfspec lookup, length 2"]
    assert cell["settings"]["repeats"] == 0
    for arm in cell["arms"]:
        assert arm["mean_accepted_length"]["value"] >= 1
        assert arm["decoding_tokens_per_second"] is None
    assert {file.name for file in tmp_path.glob("*.png")} == {"acceptance.png", "tokens_a_pass.png"}
    rows = pandas.read_parquet(tmp_path / "texts.parquet")
    assert set(rows["draft"]) == {"int8", "lookup"}
    assert rows["prompt"].str.len().min() > 0
    assert rows["text"].str.len().min() > 0
    assert "tokens a pass" in invoke(*words).stdout


@pytest.mark.tools
def test_a_study_by_options(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    words = ("ablate", "--model", folder, "--draft", "exits", "--confirm", "0", "--temperature", "0", *STUDY)
    to = tmp_path / "study"
    ending = invoke(*words, "--to", str(to))
    assert ending.status == 0, ending.stderr
    assert "exit:4" in ending.stdout
    assert "0 failed" in ending.stdout
    names = {"runs.jsonl", "points.csv", "points.parquet", "report.html", "report.md", "pareto.png", "exits.svg"}
    assert names <= {file.name for file in to.iterdir()}
    again = invoke(*words, "--to", str(to), "--output", "json")
    found = json.loads(again.stdout)
    assert found["failed"] == []
    assert {row["temperature"] for row in found["best"]} == {0.0}


@pytest.mark.tools
def test_what_a_search_finds_drafts_for_its_model_alone(invoke: Invoke, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ("search", folder, "--to", str(file), "--evaluations", "8", "--keep", str(tmp_path / "kept"), *STUDY)
    ending = invoke(*words)
    assert ending.status == 0, ending.stderr
    assert "8 sets evaluated" in ending.stdout
    found = json.loads(invoke(*words, "--output", "json").stdout)
    assert found["evaluations"] == 8
    assert found["best"] == json.loads(file.read_text())["promises"]
    plain = ("generate", folder, "--prompt", "Once upon a time", "--max-new-tokens", "12")
    drafted = invoke(*plain, "--draft", f"skip-file:{file}")
    assert drafted.stdout == invoke(*plain).stdout
    other = invoke("generate", str(demo_folder()), "--prompt", "x", "--draft", f"skip-file:{file}")
    assert other.status == 2
    assert "is of another base" in other.stderr

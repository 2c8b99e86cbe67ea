"""`selfspec bench`, `ablate`, `search` and `demo`: arms side by side, reports, results that are resumed, skip sets.

Two checkpoints of one name and shape in one folder each get their own figures, and those that were there stay.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import selfspec
from helpers.saved_folders import checkpoint_folder
from helpers.snippets import Invoke, Said, tight_budget
from selfspec.cli.bench import Arms, Cells
from selfspec.cli.demo import headline
from selfspec.cli.options import ModelOptions
from selfspec.control.profile import VARIABLE
from selfspec.kernels import native
from selfspec.measure.embedded import PROMPTS
from selfspec.measure.embedded import checkpoint_folder as demo_folder
from selfspec.tools.lab.arms import Call, Cell, OwnArm, Prompts, StockArm
from selfspec.tools.lab.report import REPORT
from selfspec.tools.lab.runs import FILE, origin

pandas = pytest.importorskip("pandas")

QUICK = ("--prompts", "2", "--repeats", "1", "--warm-up", "1", "--max-new-tokens", "16", "--context", "12")
STUDY = ("--texts", "2", "--max-new-tokens", "12", "--pricing", "weights", "--device", "cpu")
ARMS = ("--arm", "lookup", "--arm", "draft", "--draft", "exit:2")


@pytest.fixture
def texts(tmp_path: Path) -> str:
    file = tmp_path / "texts.jsonl"
    lines = ("Once upon a time, there was a little girl named Lily.", "One day, a dog and a cat went to the park.")
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return f"stories={file}"


def names(model: str, **given: Any) -> list[str]:
    return [spec.name for spec in Arms(**given).specs(ModelOptions(model=model, device="cpu"))]


@pytest.mark.usefixtures("invoke")
def test_the_arms_in_order(folder: str) -> None:
    assert names(folder, draft=["exit:2", "lookup+exit:2"]) == [
        "model.generate",
        "model.generate, prompt look-up",
        "selfspec plain",
        "selfspec exit:2",
        "selfspec lookup+exit:2",
    ]
    ruled = {"draft": ["exit:1", "exit:1"], "draft_length": 4, "accept": ["token", "block"]}
    assert names(folder, arm=["draft", "static"], runtime="eager", **ruled) == [
        "model.generate",
        "model.generate, static cache, compiled",
        "selfspec plain, eager",
        "selfspec exit:1, length 4, token, eager",
        "selfspec exit:1, length 4, block, eager",
    ]
    assert names(folder, arm=["draft"], draft=["exit:1"], nodes=[4, 8])[2:] == [
        "selfspec exit:1",
        "selfspec exit:1, 4 nodes",
        "selfspec exit:1, 8 nodes",
    ]
    with pytest.raises(selfspec.errors.DraftConfigError, match="at least its length, 4"):
        names(folder, draft=["exit:1"], draft_length=4, nodes=[3])
    assert names(folder)[-3:] == ["selfspec exit:1", "selfspec lookup", "selfspec lookup+exit:1"]
    # Two spellings of a draft are one.
    assert names(folder, arm=["draft"], draft=["exit:2", "lookup", "exit:02"])[2:] == [
        "selfspec exit:2",
        "selfspec lookup",
    ]


def test_an_option_of_one_value_is_given_once(invoke: Invoke) -> None:
    ending = invoke("generate", "demo", "--prompt", "x", "--draft", "exit:1", "--draft=exit:2")
    assert ending.status == 2
    assert "--draft is given 2 times and takes one value" in ending.stderr


def test_the_grid_has_every_combination_once() -> None:
    cells = Cells(temperature=[0.0, 0.8], batch=[1, 4, 1], context=[8]).grid(["a", "b"])
    assert len(cells) == len(set(cells)) == 8
    assert cells[0] == Cell("a", 0.0, 1, 8, 64)


@pytest.mark.tools
def test_bench_and_its_report(said: Said, folder: str, texts: str, tmp_path: Path) -> None:
    to = tmp_path / "results"
    # Of itself the control would not draft with an exit that is worth nothing on these prompts.
    fixed = (*QUICK, "--measure", "costs", *ARMS, "--draft-length", "3")
    words = ("bench", folder, "--workload", texts, *fixed, "--to", str(to), "--dtype", "float64")
    found = said(*words)
    lines = {(row["arm"], row["temperature"]): row for row in found["table"]}
    arms = ["model.generate", "model.generate, prompt look-up", "selfspec plain", "selfspec exit:2, length 3"]
    assert list(lines) == [(arm, temperature) for temperature in (0.0, 0.8) for arm in arms]
    for arm in arms:
        greedy = lines[arm, 0.0]
        assert (greedy["equal"], greedy["n"], greedy["dtype"]) == (1.0, 2, "float64")
        assert greedy["tokens_per_second"] > 0
    assert lines["model.generate", 0.0]["speedup_over_generate"] == 1.0
    drafted = lines["selfspec exit:2, length 3", 0.0]
    assert drafted["verify_seconds"] > 0
    assert drafted["predicted_speedup"] > 0
    assert found["provenance"][0]["weights"]
    text = (to / "report.md").read_text()
    assert "| selfspec exit:2, length 3 |" in text
    pictures = {f"{name}.{end}" for name in ("speed", "tokens", "positions", "cost", "exits") for end in ("png", "pdf")}
    written = {"runs.jsonl", "report.md", "table.csv", "table.parquet"}
    assert written <= {file.name for file in to.iterdir()} <= written | pictures
    (to / "report.md").unlink()
    assert said(*words) == found
    assert (to / "report.md").read_text() == text
    picture = tmp_path / "picture.svg"
    plotted = said("plot", str(to), "--x", "speedup", "--y", "arm", "--only", "temperature=0", "--to", str(picture))
    assert plotted["lines"] == len(arms)
    assert "exit:2" in picture.read_text()


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
    assert [row["arm"] for row in found["table"] if row["refused"]] == ["model.generate, prompt look-up"]
    assert "| refused |" in (tmp_path / "to" / "report.md").read_text()


def test_without_matplotlib_it_says_so_before_it_begins(
    invoke: Invoke, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfspec.tools.lab.report.find_spec", lambda name: None)
    ending = invoke("bench", folder, "--to", str(tmp_path / "to"))
    assert (ending.status, ending.stdout) == (2, "")
    assert "selfspec[bench]" in ending.stderr


@pytest.mark.tools
def test_arms_are_measured_within_a_budget(
    said: Said, folder: str, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight_budget(monkeypatch)
    asked = ["--workload", texts, "--temperature", "0", "--arm", "draft", "--draft", "lookup+int4", "--memory", "1TiB"]
    table = said("bench", folder, *QUICK, *asked, "--to", str(tmp_path / "out"))["table"]
    assert [(row["model"].endswith("within 1TiB"), row["equal"], row["n"]) for row in table] == [(True, 1.0, 2)] * 3


@pytest.mark.tools
def test_acceptance_alone_of_whole_prompts_times_nothing(
    invoke: Invoke, said: Said, folder: str, texts: str, tmp_path: Path
) -> None:
    words = f"bench {folder} --workload {texts} --measure acceptance --max-new-tokens 16 --temperature 0".split()
    words += ["--draft", "int8", "--draft", "lookup", "--draft-length", "2", "--to", str(tmp_path / "to")]
    table = said(*words)["table"]
    assert [row["arm"] for row in table] == ["selfspec int8, length 2", "selfspec lookup, length 2"]
    for row in table:
        assert row["mean_accepted_length"] >= 1
        assert not [name for name in row if "second" in name or "speedup" in name]
    assert {file.name for file in (tmp_path / "to").glob("*.png")} == {"positions.png", "tokens.png"}
    rows = pandas.read_json(tmp_path / "to" / "runs.jsonl", lines=True)
    assert set(rows["draft"]) == {"int8", "lookup"}
    assert rows["prompt"].str.len().min() > 0
    assert rows["text"].str.len().min() > 0
    assert "mean accepted length" in invoke(*words).stdout


@pytest.mark.tools
def test_a_study_by_options(invoke: Invoke, said: Said, folder: str, tmp_path: Path) -> None:
    words = ("ablate", "--model", folder, "--draft", "exits", "--confirm", "0", "--temperature", "0", *STUDY)
    to = tmp_path / "study"
    ending = invoke(*words, "--to", str(to))
    assert ending.status == 0, ending.stderr
    assert "exit:4" in ending.stdout
    assert "0 failed" in ending.stdout
    names = {"runs.jsonl", "table.csv", "table.parquet", "report.md", "cost.png", "exits.pdf"}
    assert names <= {file.name for file in to.iterdir()}
    drawn = ("plot", str(to), "--x", "draft_length", "--y", "exit", "--colour", "predicted_speedup")
    assert invoke(*drawn, "--to", str(tmp_path / "exits.png")).status == 0
    # Of more texts than there are it says how many there were.
    many = said(*words[: -len(STUDY)], "--texts", "99", *STUDY[2:], "--to", str(to))["study"]
    assert many["texts"] == len(PROMPTS)


@pytest.mark.tools
def test_what_a_search_finds_drafts_for_its_model_alone(
    invoke: Invoke, said: Said, folder: str, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    words = ("search", folder, "--to", str(file), "--evaluations", "8", "--keep", str(tmp_path / "kept"), *STUDY)
    assert "8 sets evaluated" in invoke(*words).stdout
    found = said(*words)
    assert found["evaluations"] == 8
    assert found["best"] == json.loads(file.read_text())["promises"]
    plain = ("generate", folder, "--prompt", "Once upon a time", "--max-new-tokens", "12")
    drafted = invoke(*plain, "--draft", f"skip-file:{file}")
    assert drafted.stdout == invoke(*plain).stdout
    other = invoke("generate", str(demo_folder()), "--prompt", "x", "--draft", f"skip-file:{file}")
    assert other.status == 2
    assert "is of another base" in other.stderr


QUICK_DEMO_COMMAND = ["demo", "--max-new-tokens", "8", "--seconds", "0", "--threads", "1"]


@pytest.mark.tools
def test_json(said: Said) -> None:
    found = said(*QUICK_DEMO_COMMAND, "--draft", "exit:3")
    assert found["identical"]
    assert [text["prompt"] for text in found["texts"]] == list(PROMPTS[:1])
    assert all(text["text"].startswith(text["prompt"]) for text in found["texts"])
    names = ["model.generate", "plain", "lookup", "exit:4", "int8", "exit:3", *["planes"] * native.available()]
    assert [(arm["arm"], arm["temperature"]) for arm in found["arms"]] == [*product(names, (0, 0.8))]
    assert all(arm["tokens_per_second"] > 0 for arm in found["arms"])
    assert found["arms"][0]["whole_speedup_over_generate"] == 1
    assert "model.generate" in found["headline"]
    assert (found["settings"]["draft"], found["settings"]["max_new_tokens"], found["turns"]) == ("exit:3", 8, 1)


def test_text_of_a_single_turn_has_no_interval(invoke: Invoke) -> None:
    ending = invoke(*QUICK_DEMO_COMMAND)
    assert (ending.status, ending.stderr) == (0, "")
    assert [line for line in ending.stdout.splitlines() if len(line) > 80] == []
    first, _, last = ending.stdout.partition(f"Now {6 + native.available()} ways to decode")
    assert "def get_db():" in first
    assert first.count("|") > 1
    headed, table = last.split("\n\n")[1:3]
    assert "model.generate" in headed.splitlines()[0]
    assert "identical text" in headed.splitlines()[0]
    assert len(table.splitlines()) == 7 + native.available()
    assert ("15 MB in place of 40 MB, not one bit changed" in headed) == native.available()
    assert "One turn: too few for intervals" in ending.stdout
    assert "(" not in headed + table
    assert "selfspec generate MODEL --draft lookup+int8" in last


@pytest.mark.tools
def test_tokens_that_differ_fail_it(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = OwnArm.decode

    def slipping(self: OwnArm, prompts: Prompts, cell: Cell, seed: int) -> Call:
        call = decode(self, prompts, cell, seed)
        call.rows[0][-1] += 1
        return call

    monkeypatch.setattr(OwnArm, "decode", slipping)
    ending = invoke(*QUICK_DEMO_COMMAND, "--output", "json")
    found = json.loads(ending.stdout)
    assert ending.status == 1
    assert not found["identical"]
    assert "TEXT DIFFERS" in found["headline"]
    assert found["error"]["type"] == "TokensDifferError"
    assert ending.stderr.startswith("error: greedy tokens of plain, lookup")


@pytest.mark.parametrize(("speed", "said"), [(2.14, "2.1x faster than"), (0.97, "0.97x the speed of")])
def test_the_headline_claims_no_more_than_was_measured(speed: float, said: str) -> None:
    row = {"whole_speedup_over_generate": speed, "mean_accepted_length": 3.12}
    line = f"{said} model.generate, 3.1 tokens per pass, identical text"
    assert headline(row, identical=True) == line


# Leaves out what the two differ in.
_DRAFT = "skip:mlp=3"
_PROMPTS = torch.arange(3, 15).view(2, 6)
Way = Callable[[Said, str, Path], Any]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    places = [tmp_path_factory.mktemp("of") / "model" for _ in range(2)]
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    for place in places:
        shutil.copytree(checkpoint_folder(), place)
        model.save_pretrained(place)
        with torch.no_grad():
            model.model.layers[3].mlp.down_proj.weight += 0.5 * torch.randn(
                model.model.layers[3].mlp.down_proj.weight.shape, generator=torch.Generator().manual_seed(0)
            )
    return [str(place) for place in places]


ON_CPU = ("--threads", "1", "--device", "cpu")


def _bench(said: Said, model: str, folder: Path) -> Any:
    words = ("--measure", "acceptance", "--arm", "draft", "--draft", _DRAFT, "--draft-length", "2", "--prompts", "2")
    sizes = ("--temperature", "0", "--max-new-tokens", "16", "--context", "12")
    found = said("bench", model, *words, *sizes, "--to", str(folder), *ON_CPU)
    return [row["mean_accepted_length"] for row in found["table"]]


_STUDY = ("--texts", "2", "--max-new-tokens", "12", "--prompt-tokens", "12", "--pricing", "weights")


def _search(said: Said, model: str, folder: Path) -> Any:
    words = ("--temperature", "0", "--evaluations", "3", "--sublayers", "2", "--to", str(folder / "found.json"))
    found = said("search", model, *words, "--keep", str(folder), *_STUDY, *ON_CPU)
    # All that the report is made of.
    table = pandas.read_parquet(folder / "table.parquet")
    return [(row["draft"], row["alpha"]) for row in found["scores"]], sorted(table["alpha"].tolist())


def _ablate_in_memory(_: Said, model: str, folder: Path) -> Any:
    quick: dict[str, Any] = {"temperatures": [0], "max_new_tokens": 16, "confirm": 0, "pricing": "weights"}
    found = selfspec.ablate(AutoModelForCausalLM.from_pretrained(model), _PROMPTS, drafts=_DRAFT, to=folder, **quick)
    return found["alpha"].tolist()


@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.tools) for way in (_bench, _search)), _ablate_in_memory]
)
def test_each_gets_its_own_figures(
    way: Way, two: list[str], said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures(model: str, folder: str) -> Any:
        monkeypatch.setenv(VARIABLE, str(tmp_path / folder))
        return way(said, model, tmp_path / folder)

    first, others_own = figures(two[0], "both"), figures(two[1], "alone")
    assert first != others_own
    assert figures(two[1], "both") == others_own
    kept = tmp_path / "both" / FILE
    known = kept.read_text() if kept.exists() else ""
    assert figures(two[0], "both") == first
    # Nothing is measured again.
    assert known == (kept.read_text() if kept.exists() else "")


@pytest.mark.tools
def test_a_report_says_them_apart(two: list[str], said: Said, tmp_path: Path) -> None:
    for model in two:
        _bench(said, model, tmp_path)
    bases = [origin(AutoModelForCausalLM.from_pretrained(model))["weights"][:8] for model in two]
    page, texts = (tmp_path / REPORT).read_text(), pandas.read_json(tmp_path / "runs.jsonl", lines=True)
    assert all(f"## model {base}, demo" in page for base in bases)
    assert {each[:8] for each in texts["weights"]} == set(bases)
    study = said(
        "ablate", "--model", two[0], "--model", two[1], "--draft", _DRAFT, "--to", str(tmp_path), *_STUDY, *ON_CPU
    )
    assert {row["model"] for row in study["best"]} == {f"model {base}" for base in bases}
    assert all(f"## model {base}, demo, greedy" in (tmp_path / REPORT).read_text() for base in bases)

"""Quality beside speed: scores of known texts, code in its sandbox, and arms that differ or do not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from helpers.made import CELL, SETTINGS, plain, record
from helpers.stories import checkpoint_folder
from selfspec.decode.stats import Stats
from selfspec.errors import BenchError, PromptError
from selfspec.measure.prompts import Text, Workload, read_workloads
from selfspec.tools.bench.agreement import TextAgreement
from selfspec.tools.bench.arms import ArmSpec, make_arm
from selfspec.tools.bench.quality import sandbox
from selfspec.tools.bench.quality.assess import Assessment
from selfspec.tools.bench.quality.picture import QUALITY, draw_quality
from selfspec.tools.bench.quality.record import FILE, QualityFile, QualityRecord, QualitySetup, p_value
from selfspec.tools.bench.quality.sandbox import function_of, passes
from selfspec.tools.bench.quality.tables import sentence, tables
from selfspec.tools.bench.quality.tasks import Task, tasks_of
from selfspec.tools.bench.results import MeasuredCell

SETUP = QualitySetup("tiny", "float32", "cpu", "w", 0.8, 16, "abc")
PLAIN, EXIT = ArmSpec("plain"), ArmSpec("draft", "exit:2", accept="block")
RELAXED = ArmSpec("draft", "exit:2", length=3, accept="relaxed-top-k:top_k=50,tolerance=20")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float32)
    return found


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint_folder())
    return found


def made(arm: ArmSpec, scores: Sequence[float], lossless: bool = True) -> QualityRecord:
    """A record whose texts have these scores, and as many nats a token."""
    values = list(scores)
    return QualityRecord(
        SETUP, arm, "references", lossless, values, values, values, [10 * each for each in values], [10] * len(values)
    )


def assessed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    temperature: float,
    specs: Sequence[ArmSpec],
    tasks: Sequence[Task],
) -> list[QualityRecord]:
    assessment = Assessment("stories", model, tokenizer, run_code=False)
    setup = assessment.setup("w", temperature, 16, tasks)
    return [*assessment.assess([make_arm(spec, model) for spec in specs], tasks, setup, lambda: None)]


def story_tasks(tokenizer: PreTrainedTokenizerBase, number: int, **fields: str) -> list[Task]:
    names = ["Tom", "Lily", "Ben", "Mia", "Sam", "Anna", "Max", "Sue"]
    texts = [Text(f"One day, {names[n % 8]} went to the {n}", whole=False, **fields) for n in range(number)]
    return tasks_of(Workload("w", tuple(texts)), tokenizer, number, 64, 16)


class TestScores:
    def test_of_known_texts(self) -> None:
        pytest.importorskip("sacrebleu")
        pytest.importorskip("rouge_score")
        from selfspec.tools.bench.quality.scores import score

        same, other, half = score(" a b c d\n", "a b c d"), score("x y z w", "a b c d"), score("a b x y", "a b c d")
        assert (same.exact, same.bleu, same.rouge_l) == (1, 1, 1)
        assert other.exact == other.rouge_l == 0
        assert half.exact == 0
        assert half.rouge_l == pytest.approx(0.5)
        assert other.bleu < half.bleu < 1
        assert score("", "").exact == 1

    def test_means_have_intervals_and_pairs_have_differences(self) -> None:
        worse = made(EXIT, [0.0, 0.5, 0.2, 0.3, 0.1, 0.4])
        better = made(PLAIN, [0.1 + each for each in worse.exact])
        figures = worse.figures
        assert figures["exact"].value == pytest.approx(0.25)
        assert figures["exact"].low < 0.25 < figures["exact"].high
        assert figures["perplexity"].value == pytest.approx(math.exp(0.25))
        found = worse.differences(better)
        # In pairs there is no spread, however far apart prompts are.
        assert found["exact"].estimate.low == pytest.approx(-0.1)
        assert found["exact"].estimate.high == pytest.approx(-0.1)
        assert found["perplexity"].estimate.value == pytest.approx(math.exp(-0.1))
        assert {each.p_value for each in found.values()} == {2 / 2**6}
        assert {each.p_value for each in worse.differences(worse).values()} == {1.0}

    def test_signs_are_tested_and_not_only_their_spread(self) -> None:
        assert p_value([1.0, -1.0, 2.0, -2.0]) == 1.0
        assert p_value([1.0] * 20) < 0.001
        generator = random.Random(0)
        chance = [p_value([generator.gauss(0, 1) for _ in range(10)]) for _ in range(200)]
        assert sum(each <= 0.05 for each in chance) <= 20

    def test_the_sentence_says_who_differs(self) -> None:
        base = [0.1, 0.5, 0.2, 0.3, 0.1, 0.4, 0.2, 0.6, 0.5, 0.3]
        more = [each + 1 for each in base]
        own, same, off = made(PLAIN, base), made(EXIT, base), made(RELAXED, more, lossless=False)
        assert "No lossless arm differs" in sentence([own, same, off])
        assert f"Relaxed rules that do: {RELAXED.name} (exact match" in sentence([own, same, off])
        assert "Nor do the relaxed rules" in sentence([own, same, made(RELAXED, base, lossless=False)])
        said = sentence([own, replace(off, arm=EXIT, lossless=True)])
        assert f"Lossless arms that differ from plain decoding by more than chance: {EXIT.name}" in said

    def test_many_comparisons_do_not_make_a_difference(self) -> None:
        """Each of twenty arms is off by chance, some alone beyond 5 %; together none is."""
        generator = random.Random(11)
        base = [0.5] * 12
        arms = [replace(EXIT, length=number) for number in range(1, 21)]
        records = [made(arm, [each + generator.gauss(0, 0.1) for each in base]) for arm in arms]
        plain = made(PLAIN, base)
        assert any(found.p_value < 0.05 for each in records for found in each.differences(plain).values())
        assert sentence([plain, *records]) == "No lossless arm differs from plain decoding by more than chance."


class TestSandbox:
    def test_a_right_program_passes_and_a_wrong_one_does_not(self) -> None:
        assert passes("import math, typing, collections, random, re\nassert math.sqrt(4) == 2\nprint('much')")
        assert not passes("assert 1 + 1 == 3")
        assert not passes("def broken(:")

    @pytest.mark.parametrize(
        "program",
        [
            "import os; os._exit(0)",
            "raise SystemExit(0)",
            "open('file', 'w').write('x')",
            "import pathlib; pathlib.Path('file').write_text('x')",
            "import socket; socket.create_connection(('127.0.0.1', 9))",
            "import subprocess; subprocess.run(['true'])",
            "import os; os.system('true')",
            "import os; os.fork()",
            "import ctypes",
            "x = bytearray(2**30)",
        ],
    )
    def test_what_a_program_may_not_do(self, program: str) -> None:
        assert not passes(program)

    def test_a_program_that_does_not_end_is_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sandbox, "SECONDS", 1)
        assert not passes("while True: pass")

    def test_it_sees_nothing_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECRET", "x")
        assert passes("import os\nassert 'SECRET' not in os.environ\nassert os.listdir() == []")

    def test_an_answer_ends_where_the_function_does(self) -> None:
        assert function_of("    return 1\n\ndef other():\n    pass") == "    return 1\n"
        assert function_of("    return 1\n    # inside\n") == "    return 1\n    # inside\n"


class TestTasks:
    def test_references_and_tests_are_read(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        lines = [
            {
                "prompt": "def f():\n",
                "canonical_solution": "    return 1",
                "test": "def check(f): ...",
                "entry_point": "f",
            },
            {"prompt": "Say it", "reference": "it"},
            {"prompt": "Alone", "test": "x", "entry_point": "os.system('x')"},
        ]
        (tmp_path / "file.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = tasks_of(read_workloads([f"w={tmp_path / 'file.jsonl'}"])["w"], tokenizer, 9, 64, 16)
        assert [task.reference for task in found] == ["    return 1", "it", None]
        assert found[0].test == "def check(f): ...\ncheck(f)\n"
        assert [task.test for task in found[1:]] == [None, None]

    def test_prompts_are_whole_and_documents_begin(self, tokenizer: PreTrainedTokenizerBase) -> None:
        long = " ".join(["word"] * 50)
        whole, beginning = tasks_of(
            Workload("w", (Text(long, whole=False), Text(long, whole=True))), tokenizer, 2, 400, 6
        )
        assert whole.ids.shape[1] > 50
        assert beginning.ids.shape == (1, 6)
        with pytest.raises(PromptError, match="no tokens"):
            tasks_of(Workload("w", ()), tokenizer, 2, 400, 6)


class TestArms:
    def test_greedy_lossless_texts_are_plain_decodings_and_relaxed_ones_are_not(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        pytest.importorskip("sacrebleu")
        pytest.importorskip("rouge_score")
        specs = [ArmSpec("generate"), PLAIN, replace(EXIT, accept=None), RELAXED]
        stock, own, drafted, relaxed = assessed(model, tokenizer, 0.0, specs, story_tasks(tokenizer, 6))
        assert stock.exact == own.exact == drafted.exact == [1.0] * 6
        assert stock.nats == pytest.approx(own.nats)
        assert own.against == "plain decoding"
        # The tolerance lets nearly any draft stand: this is what the scores have to see.
        assert sum(relaxed.exact) < 6
        assert not relaxed.lossless
        found = relaxed.differences(own)
        assert found["rouge_l"].estimate.value < 0
        assert found["perplexity"].estimate.value > 1
        table = tables([stock, own, drafted, relaxed])[0]
        assert len({len(row) for row in (table.head, *table.rows)}) == 1

    def test_references_are_taken_where_there_are_some(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        pytest.importorskip("sacrebleu")
        pytest.importorskip("rouge_score")
        (own,) = assessed(model, tokenizer, 0.0, [PLAIN], story_tasks(tokenizer, 2, reference="something else"))
        assert own.against == "references"
        assert own.exact == [0.0, 0.0]

    def test_a_rule_that_is_not_lossless_is_not_refused_for_its_texts(self) -> None:
        times, differing = [[1.0]], TextAgreement(4, 1)
        assert differing.refused
        lossless = replace(record("draft", times, "exit:2"), agreement=differing)
        assert lossless.refused
        relaxed = replace(lossless, arm=RELAXED)
        assert relaxed.scored
        assert not relaxed.refused

    def test_known_arms_are_not_assessed_again(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        pytest.importorskip("sacrebleu")
        pytest.importorskip("rouge_score")
        tasks = story_tasks(tokenizer, 2, reference="something else")
        assessment, ticks = Assessment("stories", model, tokenizer, run_code=False), list[int]()
        arms, setup = [make_arm(spec, model) for spec in (PLAIN, EXIT)], assessment.setup("w", 0.0, 4, tasks)
        found = assessment.assess(arms, tasks, setup, lambda: ticks.append(1), {PLAIN})
        assert next(found).arm == EXIT
        assert len(ticks) == 2
        assert next(found, None) is None

    def test_tests_of_prompts_are_run_where_that_is_asked_for(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        pytest.importorskip("sacrebleu")
        pytest.importorskip("rouge_score")
        texts = (Text("x = 1  # ", False, test="assert x == 1"), Text("x = 1  # ", False, test="assert x == 2"))
        tasks = tasks_of(Workload("w", texts), tokenizer, 2, 64, 16)
        assessment = Assessment("stories", model, tokenizer, run_code=True)
        (own,) = assessment.assess([make_arm(PLAIN, model)], tasks, assessment.setup("w", 0.0, 2, tasks), lambda: None)
        assert own.passed is not None
        # What the model writes stands behind a comment, if it stays on its line.
        assert own.passed[1] == 0.0

    @pytest.mark.statistical
    def test_sampled_lossless_texts_differ_by_chance_alone(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        specs = [PLAIN, EXIT, RELAXED]
        own, drafted, relaxed = assessed(model, tokenizer, 0.8, specs, story_tasks(tokenizer, 80))
        assert drafted.differences(own)["perplexity"].p_value > 0.01
        assert relaxed.differences(own)["perplexity"].p_value < 0.01


class TestFiles:
    def test_results_are_read_back_and_the_latest_counts(self, tmp_path: Path) -> None:
        file, first = QualityFile(tmp_path), made(PLAIN, [0.5, 0.25])
        file.add([first, made(RELAXED, [0.5, 0.5], lossless=False)])
        again = replace(first, exact=[1.0, 1.0])
        file.add([again])
        assert file.records() == [again, made(RELAXED, [0.5, 0.5], lossless=False)]
        (tmp_path / FILE).write_text("{}\n")
        with pytest.raises(BenchError, match="line 1"):
            file.records()

    def test_speed_against_quality_is_drawn_for_relaxed_rules(self, tmp_path: Path) -> None:
        times = [[1.0, 1.2], [1.1, 1.0]]
        cell = replace(CELL, workload="w", temperature=0.8)
        counts = Stats(8, 8, 8, judged_per_depth=[9], accepted_per_depth=[5], seconds={"draft": 0.5, "verify": 1.0})
        arms = [record("generate", times), plain(times), record("draft", times, "exit:2", counts=counts)]
        arms[2] = replace(arms[2], arm=RELAXED)
        cells = [MeasuredCell(cell, SETTINGS, tuple(replace(arm, cell=cell) for arm in arms))]
        records = [made(PLAIN, [0.5, 0.4]), made(RELAXED, [0.2, 0.1], lossless=False)]
        assert draw_quality(cells, records, tmp_path, "kept") == [QUALITY]
        assert (tmp_path / QUALITY).stat().st_size > 1000
        assert draw_quality(cells, records[:1], tmp_path, "kept") == []
        assert not (tmp_path / QUALITY).exists()

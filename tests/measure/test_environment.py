"""What a measurement is made with, how long it will take, and how far its medians, ratios and shares can be trusted.

Prompts come from files, and are of one length.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helpers import joints
from helpers.saved_folders import checkpoint_folder as stories_folder
from helpers.tokenizers import PLAIN
from selfspec.errors import PromptError
from selfspec.measure import spare_cores
from selfspec.measure.checkpoint import Checkpoint, load_checkpoint
from selfspec.measure.embedded import checkpoint_folder as demo_folder
from selfspec.measure.environment import environment
from selfspec.measure.estimate import LEVEL, Estimate, holm_rejects
from selfspec.measure.prompts import Text, Workload, built_in, check_context, parse_workloads, read_prompts
from selfspec.measure.spare_cores import CoreWatch, SpareCores
from selfspec.tools.lab.arms import prompt_writer


def statistics(busy: list[int], idle: list[int]) -> str:
    """A file of the system's, with one line for each core and one for all."""
    lines = [f"cpu{core} {of[0]} 0 0 {of[1]} 0 0 0 0 0 0" for core, of in enumerate(zip(busy, idle, strict=True))]
    return "\n".join([f"cpu {sum(busy)} 0 0 {sum(idle)} 0 0 0 0 0 0", *lines, "intr 5", ""])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(spare_cores, "_STATISTICS", tmp_path / "stat")
    monkeypatch.setattr(spare_cores, "_usable_cores", lambda: frozenset({0, 1}))
    return tmp_path / "stat"


@pytest.mark.parametrize(
    ("busy", "own", "free"),
    [([0, 0], 0.0, 2.0), ([100, 0], 0.0, 1.0), ([100, 0], 1.0, 2.0), ([100, 100], 0.5, 0.5), ([100, 100], 0.0, 0.0)],
)
def test_what_others_take_is_not_free(
    file: Path, monkeypatch: pytest.MonkeyPatch, busy: list[int], own: float, free: float
) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr("time.process_time", iter([3.0, 3.0 + own]).__next__)
    file.write_text(statistics([50, 50], [900, 900]))
    watch = CoreWatch()
    took = [each * ticks // 100 for each in busy]
    file.write_text(statistics([50 + each for each in took], [900 + ticks - each for each in took]))
    found = watch.read()
    assert found.cores == 2
    assert found.free == pytest.approx(free)


def test_where_the_system_does_not_tell_nothing_is_known(file: Path) -> None:
    assert CoreWatch().read() == SpareCores(2, None)
    file.write_text(statistics([50, 50], [900, 900]))
    watch = CoreWatch()
    assert watch.read() == SpareCores(2, None)


@pytest.mark.parametrize(
    ("free", "threads"), [(None, 4), (0.0, 1), (1.0, 1), (1.6, 1), (1.7, 2), (2.0, 2), (7.9, 4)], ids=str
)
def test_there_is_a_thread_for_each_free_core(free: float | None, threads: int) -> None:
    assert SpareCores(8, free).threads(most=4) == threads


def test_an_environment_names_the_commit_and_says_whether_kernels_run() -> None:
    found = environment(torch.device("cpu"))
    assert found["cpu_kernels"] is False
    assert (found["commit"] is not None) == (Path(__file__).resolve().parents[2] / ".git").exists()


def test_one_sample_says_that_it_knows_nothing_and_none_is_refused() -> None:
    assert Estimate.of_median([2.0]) == Estimate.of_ratio([4.0], [2.0]) == Estimate(2.0, 2.0, 2.0, 0.0, 1)
    assert Estimate.of_rate([1.0], [0.0]) is None
    with pytest.raises(ValueError, match="no samples"):
        Estimate.of_median([])
    with pytest.raises(ValueError, match="in pairs"):
        Estimate.of_ratio([], [])
    with pytest.raises(ValueError, match="in pairs"):
        Estimate.of_mean([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        Estimate.of_ratio([1.0, 0.0], [1.0, 2.0])
    assert Estimate.of_share(0, 0) is None


@pytest.mark.parametrize("times", [[1.0, 9.0], [1.0, 2.0, 9.0], [0.5, 40.0, 2.0, 1.0]], ids=str)
def test_no_interval_of_a_ratio_of_times_ends_below_nothing(times: list[float]) -> None:
    ones = [1.0] * len(times)
    found, back = Estimate.of_ratio(times, ones), Estimate.of_ratio(ones, times)
    assert 0 < found.low < found.value < found.high
    assert found.value == pytest.approx(sum(times) / len(times))
    # So many times as fast, or as slow, is one statement.
    assert [1 / back.high, 1 / back.low] == pytest.approx([found.low, found.high])


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60))
def test_intervals_of_medians_are_as_narrow_as_their_confidence_allows(values: list[float]) -> None:
    found = Estimate.of_median(values)
    number, ordered = len(values), sorted(values)
    assert found.low <= found.value <= found.high
    # Between the k-th smallest and the k-th largest: missed if fewer than k values lie on one side of the median.
    ranks = [k for k in range(1, number // 2 + 1) if 1 - 2 * binom.cdf(k - 1, number, 0.5) >= LEVEL]
    rank = max(ranks, default=1)
    assert (found.low, found.high) == (ordered[rank - 1], ordered[number - rank])
    assert found.confidence == pytest.approx(1 - 2 * binom.cdf(rank - 1, number, 0.5), abs=1e-9)


# Times that intervals are drawn, and how sure that makes their coverage.
_DRAWN, _ERROR = 10_000, 0.005


@pytest.mark.statistical
@pytest.mark.parametrize("number", [4, 6, 8, 20])
@pytest.mark.parametrize("texts", [(8, 4, 20), (30, 2, 20), (97, 3, 16)], ids=["half", "most", "nearly all"])
def test_intervals_over_few_texts_cover_the_truth(number: int, texts: tuple[int, int, int]) -> None:
    """Texts differ in how often they accept a draft token, beta distributed, and in how many rounds they have."""
    good, bad, usual = texts
    draws = np.random.default_rng(0)

    def counts(of: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        rounds = 8 + draws.poisson(usual, of)
        chance, alive, judged, accepted = draws.beta(good, bad, of), rounds, 0 * rounds, 0 * rounds
        for _ in range(4):
            judged = judged + alive
            alive = draws.binomial(alive, chance)
            accepted = accepted + alive
        return accepted, judged, rounds

    accepted, judged, rounds = counts(1_000_000)
    truths = accepted.sum() / judged.sum(), 1 + accepted.sum() / rounds.sum(), 1.5
    held = np.zeros(3)
    for _ in range(_DRAWN):
        accepted, judged, rounds = (each.astype(float) for each in counts(number))
        rate = Estimate.of_rate(accepted.tolist(), judged.tolist())
        length = Estimate.of_ratio((accepted + rounds).tolist(), rounds.tolist())
        # Times of texts of these lengths, in which a draft gains more of some than of others.
        plain = accepted + rounds
        own = plain / 1.5 * draws.gamma(25, 1 / 25, number)
        speedup = Estimate.of_ratio(plain.tolist(), own.tolist())
        assert rate is not None
        found = zip((rate, length, speedup), truths, strict=True)
        held += [each.low <= truth <= each.high for each, truth in found]
    assert (held / _DRAWN > 0.92 - _ERROR).all(), held / _DRAWN
    assert (held / _DRAWN < 0.98).all(), held / _DRAWN


def test_where_all_texts_agree_a_rate_still_has_an_interval() -> None:
    found = Estimate.of_rate([8.0] * 4, [8.0] * 4)
    alone = Estimate.of_share(32, 32)
    assert found is not None
    assert alone is not None
    assert (found.value, found.low, found.high, found.n) == (1.0, alone.low, 1.0, 4)


def test_wilson_is_the_textbooks() -> None:
    shares: list[Any] = [Estimate.of_share(*counts) for counts in ((8, 10), (0, 20), (20, 20))]
    found, none, all_of = shares
    # Newcombe (1998), table I for other numbers, by the formula.
    assert [found.low, found.high] == pytest.approx([0.4902, 0.9433], abs=1e-4)
    assert (none.low, all_of.high) == (0.0, 1.0)
    assert none.high == pytest.approx(1 - all_of.low)


@pytest.mark.parametrize(
    "p_values", [[0.5, 0.004, 0.0001, 0.02], [0.004, 0.004, 0.004], [1e-9] * 3, [0.3], [], [0.002, 0.9, 0.006, 0.004]]
)
def test_holm(p_values: list[float]) -> None:
    named = {str(index): value for index, value in enumerate(p_values)}
    rejected = {int(name) for name in joints.holm_rejects(named, 0.01)}
    assert holm_rejects(p_values, 0.01) == [index in rejected for index in range(len(p_values))]


@pytest.fixture(scope="module")
def demo() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo_folder())
    return found


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Three questions of two sorts, and a line that is none."""
    file = tmp_path / "questions.jsonl"
    lines = [
        {"category": "maths", "turns": ["one and one", "and two"]},
        {"category": "prose", "prompt": "a tale"},
        {"category": "maths", "turns": ["two and two"]},
        {"category": "none"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return file


def test_every_line_with_a_text(questions: Path) -> None:
    (found,) = parse_workloads(f"all={questions}")
    assert found.name == "all"
    assert [text.text for text in found.texts] == ["one and one", "and two", "a tale", "two and two"]
    assert not any(text.whole for text in found.texts)
    # A later turn knows what was asked before.
    assert [text.messages for text in found.texts] == [(), ({"role": "user", "content": "one and one"},), (), ()]
    # Only lines that say so, and one for each value.
    (found,) = parse_workloads(f"sums={questions}#category=maths")
    assert [text.text for text in found.texts] == ["one and one", "and two", "two and two"]
    lines = questions.read_text().splitlines()
    questions.write_text("\n".join(lines[:3]) + "\n")
    every = parse_workloads(f"q={questions}#category")
    assert [(each.name, len(each.texts)) for each in every] == [("q/maths", 3), ("q/prose", 1)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("file.jsonl", "write NAME=FILE"),
        ("name=", "write NAME=FILE"),
        ("name=nowhere.jsonl", "cannot be read"),
        ("name={file}#category=none", "has any of prompt, turns, text"),
        ("name={file}#sort", "no line with a field 'sort'"),
        ("name={file}#sort=a", "no line with a field 'sort'"),
        ("name={file}#category=math", "no line with category=math; it has maths, none, prose"),
        ("no json\n", "line 1 of"),
        ("[1]\n", "line 1 of"),
    ],
)
def test_bad_input(questions: Path, given: str, said: str) -> None:
    if given.endswith("\n"):
        questions.write_text(given)
        given = "name={file}"
    with pytest.raises(PromptError, match=said):
        parse_workloads(given.format(file=questions))


def test_documents_give_their_beginning_and_prompts_their_end(demo: PreTrainedTokenizerBase) -> None:
    text = "import os\n\ndef walk(path):\n    return path\n" * 3
    ids = demo(text).input_ids
    for whole, expected in ((True, ids[:12]), (False, ids[-12:])):
        (prompts,) = Workload("w", (Text(text, whole),)).prompts(demo, 1, 1, 12)
        assert prompts.tolist() == [expected]
    # Short texts have others before them.
    first, second = (demo(text).input_ids for text in ("import os", "def walk"))
    workload = Workload("w", (Text("import os", False), Text("def walk", False)))
    width = len(first) + len(second)
    found = workload.prompts(demo, 2, 1, width)
    assert [each.tolist() for each in found] == [[second + first], [first + second]]


def test_every_prompt_begins_as_texts_of_the_model_do(tokenizer: PreTrainedTokenizerBase) -> None:
    (prompts,) = Workload("w", (Text("Once upon a time there was a dog", False),)).prompts(tokenizer, 1, 1, 6)
    assert prompts.shape == (1, 6)
    assert prompts[0, 0] == tokenizer.bos_token_id
    assert (prompts[0, 1:] != tokenizer.bos_token_id).all()


@pytest.mark.parametrize(("number", "batch", "shapes"), [(4, 1, [1] * 4), (4, 2, [2, 2]), (5, 2, [2, 2]), (1, 6, [6])])
def test_batches(demo: PreTrainedTokenizerBase, number: int, batch: int, shapes: list[int]) -> None:
    found = built_in().prompts(demo, number, batch, 10)
    assert [each.shape for each in found] == [(rows, 10) for rows in shapes]


CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And you?"},
    {"role": "assistant", "content": "Well."},
]


def test_every_turn_of_a_conversation_is_a_prompt_with_all_before_it(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CONVERSATION, "reference": ["a list", "of two"]}))
    texts = read_prompts(file).texts
    assert [text.text for text in texts] == ["Hello?", "And you?"]
    assert [list(text.messages) for text in texts] == [CONVERSATION[:1], CONVERSATION[:3]]
    assert parse_workloads(f"c={file}")[0].texts == texts


@pytest.fixture(scope="module")
def chatty() -> Checkpoint:
    checkpoint = load_checkpoint(str(stories_folder()), "float32", "cpu")
    checkpoint.tokenizer.chat_template = PLAIN
    return checkpoint


def test_as_chats_the_model_answers_what_nobody_answered(chatty: Checkpoint) -> None:
    asked, more = "One day a dog", "What then?"
    workload = Workload("w", (Text(asked), Text(more, messages=({"role": "user", "content": asked},))))
    first, second = workload.whole_prompts(prompt_writer(chatty, True, 6))
    said = chatty.tokenizer.decode(first[0])
    assert said.endswith(f"user: {asked}\nassistant:")
    own = chatty.model.generate(first, attention_mask=torch.ones_like(first), max_new_tokens=6, do_sample=False)
    answer = chatty.tokenizer.decode(own[0, first.shape[1] :], skip_special_tokens=True)
    expected = f"user: {asked}\nassistant: {answer}\nuser: {more}\nassistant:"
    assert second[0].tolist() == chatty.tokenizer(expected, add_special_tokens=False).input_ids
    # An answer that is there stays.
    messages = ({"role": "user", "content": asked}, {"role": "assistant", "content": "It ran."})
    (third,) = Workload("w", (Text(more, messages=messages),)).whole_prompts(prompt_writer(chatty, True, 6))
    assert "assistant: It ran.\nuser: What then?" in chatty.tokenizer.decode(third[0])
    # As text a later turn stands behind those before it.
    (found,) = Workload("w", (Text("b", messages=({"role": "user", "content": "a"},)),)).whole_prompts(
        prompt_writer(chatty, False, 6)
    )
    assert found[0].tolist() == chatty.tokenizer("a\n\nb").input_ids


def test_prompts_that_leave_no_room_are_refused(chatty: Checkpoint) -> None:
    check_context(chatty.model, [torch.ones(1, 500)], 12)
    with pytest.raises(PromptError, match="exceed the model's context of 512"):
        check_context(chatty.model, [torch.ones(1, 500)], 13)

"""`selfspec generate`: the text is the model's own, however it is drafted, read in, printed or ended."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import selfspec
from helpers import tiny
from helpers.snippets import Invoke, Said, tight_budget
from selfspec.cli.generate import DraftDisplay, PlainDisplay
from selfspec.decode.output import RowRound
from selfspec.decode.text_stream import TextStream

PROMPT = "Once upon a time"
NEW = 24


@pytest.fixture(scope="session")
def expected(stories: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    sequence: list[int] = stories.generate(prompt, max_new_tokens=NEW, do_sample=False)[0].tolist()
    return sequence


@pytest.fixture(scope="session")
def expected_text(expected: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    whole = tokenizer.decode(expected, skip_special_tokens=True)
    assert isinstance(whole, str)
    return whole.removeprefix(PROMPT)


def words(folder: str, *more: str) -> list[str]:
    return ["generate", folder, "--prompt", PROMPT, "--max-new-tokens", str(NEW), *more]


RULED = [f"exit:3 --accept {rule}" for rule in ("token", "block", "coupled")]


@pytest.mark.parametrize("draft", ["none", "exit:3", "skip:attn=0;mlp=2", "skip:layers=1-2", *RULED])
def test_prints_the_continuation_and_a_line_break(invoke: Invoke, folder: str, expected_text: str, draft: str) -> None:
    ending = invoke(*words(folder, "--draft", *draft.split()))
    assert (ending.status, ending.stdout, ending.stderr) == (0, expected_text + "\n", "")


def test_a_prediction_drafts(invoke: Invoke, folder: str, expected_text: str, tmp_path: Path) -> None:
    edited = tmp_path / "edited.txt"
    edited.write_text(expected_text.removeprefix(" ").replace(" was ", " is "), encoding="utf-8")
    found = json.loads(invoke(*words(folder, "--prediction", str(edited), "--output", "json")).stdout)
    assert found["text"] == expected_text
    assert 0 < found["stats"]["predicted_accepted"] <= found["stats"]["predicted"]
    ending = invoke(*words(folder, "--prediction", str(tmp_path / "none")))
    assert (ending.status, "cannot be read" in ending.stderr) == (2, True)


def test_json_says_all(invoke: Invoke, folder: str, expected: list[int], expected_text: str) -> None:
    ending = invoke(*words(folder, "--draft", "exit:4", "--draft-length", "3", "--output", "json"))
    found = json.loads(ending.stdout)
    assert (ending.status, ending.stderr) == (0, "")
    assert found["sequence"] == expected == found["prompt_token_ids"] + found["token_ids"]
    assert (found["prompt"], found["text"]) == (PROMPT, expected_text)
    assert found["stats"]["new_tokens"] == NEW == len(found["token_ids"])
    assert found["stats"]["accepted"] == sum(found["stats"]["accepted_per_depth"])
    assert len(found["stats"]["accepted_per_depth"]) == 3
    assert found["versions"].keys() == {"selfspec", "torch", "transformers", "python"}
    settings = found["settings"]
    assert (settings["model"], settings["draft"], settings["draft_length"]) == (folder, "exit:4", 3)
    assert (settings["dtype"], settings["device"]) == ("float32", "cpu")
    assert settings["sampling"] == {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None, "seed": None}
    assert "rounds" not in found


def test_trees_give_the_same_text(said: Said, folder: str, expected: list[int]) -> None:
    for length, levels in ((("--draft-length", "2"), 2), ((), 5)):
        found = said(*words(folder, "--draft", "exit:4", "--nodes", "5", *length))
        assert (found["sequence"], found["settings"]["nodes"]) == (expected, 5)
        assert len(found["stats"]["accepted_per_depth"]) <= levels
        assert found["stats"]["drafted"] <= 5 * found["stats"]["rounds"]


@pytest.mark.tools
def test_json_from_a_process_of_its_own_is_all_that_stdout_holds(folder: str, expected: list[int]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-m", "selfspec", *words(folder, "--draft", "exit:4", "--output", "json")]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(ended.stdout)["sequence"] == expected
    assert ended.stderr == ""


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_reads_a_file_and_stdin_less_the_last_line_break(
    invoke: Invoke, folder: str, tmp_path: Path, expected_text: str, end: str
) -> None:
    content = (PROMPT + end).encode()
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    common = ["generate", folder, "--max-new-tokens", str(NEW)]
    assert invoke(*common, "--prompt-file", str(file)).stdout == expected_text + "\n"
    assert invoke(*common, stdin=content).stdout == expected_text + "\n"


def test_an_empty_prompt_starts_from_the_bos_token(said: Said, folder: str) -> None:
    assert said("generate", folder, "--prompt", "", "--max-new-tokens", "3")["prompt_token_ids"] == [1]


def test_sampling_is_what_the_library_draws_with_the_same_seed(
    said: Said, folder: str, stories: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = said(*words(folder, "--draft", "exit:4", "--temperature", "1.3", "--seed", "7"))
    spec = selfspec.wrap(stories, draft=selfspec.drafts.EarlyExit(layer=4))
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    # The default top-k of transformers is 50; the command line's is none.
    output = spec.generate(prompt, max_new_tokens=NEW, do_sample=True, temperature=1.3, top_k=0, seed=7)
    assert found["sequence"] == output.sequences[0].tolist()


def test_filters_reach_the_sampler(said: Said, folder: str, expected: list[int]) -> None:
    for only_the_likeliest in (["--top-k", "1"], ["--top-p", "1e-6"], ["--min-p", "1.0"]):
        assert said(*words(folder, "--temperature", "2", *only_the_likeliest))["sequence"] == expected


def test_a_sampled_text_can_be_repeated_from_its_json(said: Said, folder: str) -> None:
    sampled = words(folder, "--temperature", "1")
    first, other = (said(*sampled) for _ in range(2))
    seed = first["settings"]["sampling"]["seed"]
    assert seed != other["settings"]["sampling"]["seed"]
    assert said(*sampled, "--seed", str(seed))["token_ids"] == first["token_ids"]


def test_the_checkpoints_sampling_defaults_are_not_used(said: Said, copied: Path, expected: list[int]) -> None:
    file = copied / "generation_config.json"
    defaults = {"do_sample": True, "temperature": 5.0, "top_k": 3, "repetition_penalty": 1.5}
    file.write_text(json.dumps({**json.loads(file.read_text()), **defaults}))
    assert said(*words(str(copied)))["sequence"] == expected


def test_stats_are_a_table_on_stderr(invoke: Invoke, folder: str, expected_text: str) -> None:
    ending = invoke(*words(folder, "--draft", "int8", "--draft-length", "3", "--stats"))
    assert ending.stdout == expected_text + "\n"
    counts = ("new tokens", "rounds", "mean accepted length", "acceptance by depth", "seconds", "KV cache")
    for count in (*counts, "substitutes"):
        assert count in ending.stderr
    # Four layers of five and the head: not even a good draft would pay.
    ending = invoke(*words(folder, "--draft", "exit:4", "--stats"))
    assert ending.stdout == expected_text + "\n"
    assert "drafted               nothing" in ending.stderr


def test_show_drafts_as_json_lists_the_rounds(said: Said, folder: str) -> None:
    found = said(*words(folder, "--draft", "exit:4", "--draft-length", "3", "--show-drafts"))
    rounds = found["rounds"]
    assert [token for each in rounds for token in each["tokens"]] == found["token_ids"]
    assert all(each["tokens"][: each["accepted"]] == each["draft"][: each["accepted"]] for each in rounds)
    assert sum(each["accepted"] for each in rounds) == found["stats"]["accepted"]


@pytest.mark.parametrize("draft", ["exit:3", "recycle"])
def test_show_drafts_strikes_rejected_tokens_through(
    invoke: Invoke, folder: str, expected_text: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    ending = invoke(*words(folder, "--draft", draft, "--draft-length", "2", "--show-drafts"))
    shown = Text.from_ansi(ending.stdout)
    legend, text = shown.split("\n")[0], shown[len(shown.split("\n")[0]) + 2 :]
    assert legend.plain == "accepted draft | the target's own | rejected draft (+n: tokens of other branches)"
    kept, struck = split_by_stroke(text)
    assert kept.rstrip("\n") == expected_text
    assert struck


def split_by_stroke(text: Text) -> Sequence[str]:
    struck = {
        index
        for span in text.spans
        if not isinstance(span.style, str) and span.style.strike
        for index in range(span.start, span.end)
    }
    parts = (True, False)
    return ["".join(c for i, c in enumerate(text.plain) if (i not in struck) is kept) for kept in parts]


@pytest.mark.parametrize(
    ("stdin", "fault"), [(b"", "is empty"), (b"\n", "is empty"), (b"caf\xe9", "is not UTF-8")], ids=repr
)
def test_unusable_stdin(invoke: Invoke, folder: str, stdin: bytes, fault: str) -> None:
    ending = invoke("generate", folder, stdin=stdin)
    assert (ending.status, ending.stdout) == (2, "")
    assert f"error: standard input {fault}" in ending.stderr


def test_an_interrupt_keeps_what_was_printed(
    invoke: Invoke, folder: str, expected: list[int], expected_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = PlainDisplay.show

    def interrupted(display: PlainDisplay, committed: RowRound) -> None:
        show(display, committed)
        if committed.tokens[0] == expected[10]:
            raise KeyboardInterrupt

    monkeypatch.setattr(PlainDisplay, "show", interrupted)
    ending = invoke(*words(folder))
    assert (ending.status, ending.stderr) == (130, "interrupted\n")
    assert len(ending.stdout) > 5
    assert expected_text.startswith(ending.stdout.removesuffix("\n"))


def poison(copied: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Make a checkpoint whose logits become NaN after some tokens; return the new tokens before that."""
    model = tiny.llama(vocab_size=len(tokenizer), dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    tokens: list[int] = model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0, prompt.shape[1] :].tolist()
    fatal = next(i for i in range(3, NEW) if tokens[i] not in prompt[0].tolist() + tokens[:i])
    with torch.no_grad():
        model.get_input_embeddings().weight[tokens[fatal]] = torch.nan
    model.save_pretrained(copied)
    return tokens[: fatal + 1]


@pytest.mark.parametrize("draft", ["none", "exit:2", "exit:3", "skip:mlp=1"])
def test_logits_that_are_not_finite_fail_the_run_and_keep_the_text(
    invoke: Invoke, copied: Path, tokenizer: PreTrainedTokenizerBase, draft: str
) -> None:
    tokens = poison(copied, tokenizer)
    ending = invoke(*words(str(copied), "--draft", draft))
    assert ending.status == 1
    assert len(ending.stdout) > 1
    assert ending.stderr.startswith("error: the full model's logits became NaN")
    as_json = invoke(*words(str(copied), "--draft", draft, "--output", "json"))
    found = json.loads(as_json.stdout)
    assert as_json.status == 1
    assert found["error"]["type"] == "NonFiniteLogitsError"
    assert found["token_ids"] == tokens


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--repetition-penalty", "4"], {"repetition_penalty": 4.0}),
        (["--no-repeat-ngram-size", "1"], {"no_repeat_ngram_size": 1}),
        (["--stop-string", "girl", "--stop-string", "named"], {"stop_strings": ["girl", "named"]}),
    ],
    ids=str,
)
def test_penalties_and_stop_strings_mean_what_they_mean_in_transformers(
    said: Said,
    folder: str,
    stories: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    expected: list[int],
    flags: list[str],
    options: dict[str, Any],
) -> None:
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    wanted = stories.generate(prompt, max_new_tokens=NEW, do_sample=False, tokenizer=tokenizer, **options)[0].tolist()
    assert wanted != expected
    found = said(*words(folder, "--draft", "skip:attn=1", *flags))
    assert found["sequence"] == wanted
    assert found["lossless"] is True


def test_a_relaxed_rule_says_that_the_text_is_not_the_models_own(invoke: Invoke, said: Said, folder: str) -> None:
    relaxed = words(folder, "--draft", "exit:3", "--accept", "relaxed-top-k")
    ending = invoke(*relaxed)
    assert ending.status == 0
    assert "not lossless" in ending.stderr
    found = said(*relaxed)
    assert found["lossless"] is False
    assert found["settings"]["accept"] == "relaxed-top-k"


@pytest.mark.parametrize("draft", ["", "none", "lookup", "int8", "lookup+int4", "exit:2"])
def test_within_a_budget_the_text_is_the_same(
    said: Said, folder: str, expected: list[int], monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    tight_budget(monkeypatch)
    found = said(*words(folder, "--memory", "1TiB", "--context", "200", *(("--draft", draft) if draft else ())))
    assert found["sequence"] == expected
    settings = found["settings"]
    assert settings["draft"] in ((draft,) if draft else ("lookup+int8", "lookup+int4"))
    assert (settings["memory"], settings["context"]) == ("1TiB", 200)


class _Letters:
    def push(self, tokens: tuple[int, ...]) -> str:
        return "".join(map(chr, tokens))

    foresee = push


def test_of_a_tree_the_first_branch_is_shown_and_the_other_nodes_are_counted() -> None:
    out = io.StringIO()
    display = DraftDisplay(cast(TextStream, _Letters()), out)
    out.truncate(out.seek(0))
    # Of five nodes "a" was accepted; "b" and "c" followed it.
    display.show(RowRound((97, 120), (97, 100, 98, 101, 99), 1, (98, 99)))
    display.show(RowRound((97, 120), (97, 98), 1, (98,)))
    assert out.getvalue() == "abc(+2)xabx"

"""More model than memory, where it is hard: a batch, a long prompt, threads, an interrupt, a file that goes away.

    python benchmarks/widen.py MODEL --size 1.3B --to WIDE
    python benchmarks/streaming_trials.py WIDE --memory 3GiB --held-out FILE --threads 2

Linux alone. Texts are compared with those of `model.generate` of the model in memory whole, in another process. Prints
a table, which is kept in results/ as well; the exit status is 1 where one text differs. A run that was stopped goes on
after the last trial that passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kept import RESULTS
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import selfspec
from selfspec.environment import commit, environment
from selfspec.files.writing import write_json
from selfspec.measure.prompts import parse_workloads
from selfspec.model.checkpoint import load_tokenizer
from selfspec.placement.byte_size import shown_bytes
from selfspec.placement.drafts import placement_of
from selfspec.placement.resident import status_bytes

_LONG, _SHORT, _NEW, _AFTER_LONG = 2000, 64, 48, 16
_RECORD = RESULTS / "streaming_trials.json"
_GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class FailedError(Exception):
    """A text is another one, or an error is missing."""


def main() -> int:
    """Run all trials; 1 where one failed."""
    options = _options()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    prompts = _prompts(options)
    if options.only_references:
        write_json(options.references, {"texts": _references(options.model, prompts)})
        return 0
    if not options.references.exists():
        subprocess.run([sys.executable, *sys.argv, "--only-references"], check=True)
    references = json.loads(options.references.read_text())["texts"]
    with tempfile.TemporaryDirectory(dir=options.model.parent) as folder:
        # Links, so that a file can go away and the checkpoint stay.
        for file in options.model.iterdir():
            if file.is_file():
                os.link(file, Path(folder) / file.name)
        begun = time.perf_counter()
        spec = selfspec.load(folder, options.memory, device="cpu", context=_LONG + 64)
        loading, peak = time.perf_counter() - begun, status_bytes("VmHWM")
        placement = placement_of(spec.model)
        assert placement is not None
        record = _begun(
            {
                "memory": options.memory,
                "threads": options.threads,
                "streamed": placement.plan.streamed,
                "bits": placement.plan.bits,
                "loading_seconds": loading,
                "loading_peak": peak,
                "environment": environment(torch.device("cpu")),
                "trials": [],
            }
        )
        done = {row["trial"] for row in record["trials"]}
        for trial in _Trials(spec, prompts, references, Path(folder)).all:
            name = (trial.__doc__ or "").partition("\n")[0].rstrip(".")
            if name not in done:
                record["trials"].append({"trial": name, **_tried(trial)})
                write_json(_RECORD, record)
                _RECORD.with_suffix(".md").write_text(_report(record))
    print(_report(record))
    return int(any(row["failed"] for row in record["trials"]))


def _begun(record: dict[str, Any]) -> dict[str, Any]:
    """A record, with the trials that an earlier run of the same settings passed."""
    earlier: dict[str, Any] = json.loads(_RECORD.read_text()) if _RECORD.exists() else {}
    same = ("memory", "threads", "bits")
    if any(earlier.get(name) != record[name] for name in same):
        return record
    return {**earlier, "trials": [row for row in earlier["trials"] if not row["failed"]]}


def _tried(trial: Callable[[], str]) -> dict[str, Any]:
    # Linux begins to look for the peak anew.
    Path("/proc/self/clear_refs").write_text("5")
    begun = time.perf_counter()
    try:
        said, failed = trial(), False
    except FailedError as error:
        said, failed = f"FAILED: {error}", True
    seconds = time.perf_counter() - begun
    return {"found": said, "failed": failed, "seconds": seconds, "peak": status_bytes("VmHWM"), "commit": commit()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", default="3GiB")
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--references", type=Path, help="file of the texts to compare with; made where there is none")
    parser.add_argument("--only-references", action="store_true", help="make that file, and try nothing")
    options = parser.parse_args()
    options.references = options.references or options.model / "streaming_trials_references.json"
    return options


def _prompts(options: argparse.Namespace) -> list[list[int]]:
    """Four short prompts of different lengths, and a long one."""
    texts, tokenizer = parse_workloads(f"code={options.held_out}#kind=code")[0], load_tokenizer(str(options.model))
    short = [each[0].tolist() for each in texts.prompts(tokenizer, 4, 1, _SHORT)]
    long = [token for each in texts.prompts(tokenizer, 40, 1, _SHORT) for token in each[0].tolist()]
    return [*(prompt[8 * number :] for number, prompt in enumerate(short)), long[:_LONG]]


def _references(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    news = [_NEW] * 4 + [_AFTER_LONG]
    made = []
    for prompt, new in zip(prompts, news, strict=True):
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **_GREEDY)
        made.append(text[0, len(prompt) :].tolist())
    return made


class _Trials:
    """Each trial says what it found.

    Args:
        spec: streams.
        prompts: as of `_prompts`.
        wanted: what follows each of them.
        folder: that weights are read from.
    """

    def __init__(
        self, spec: selfspec.SelfSpeculative, prompts: list[list[int]], wanted: list[list[int]], folder: Path
    ) -> None:
        self._spec, self._prompts, self._wanted, self._folder = spec, prompts, wanted, folder
        placement = placement_of(spec.model)
        assert placement is not None
        self._placement = placement
        self.all = (self.batch, self.threads, self.interrupt, self.file_goes, self.long_prompt)

    def batch(self) -> str:
        """A batch of four prompts of different lengths."""
        prompts = self._prompts[:4]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self._spec.generate(ids, mask, max_new_tokens=_NEW, **_GREEDY)
        for number, row in enumerate(output.sequences):
            _check(f"row {number}", row[longest:], self._wanted[number])
        return f"4 x {_NEW} tokens are the model's, in {output.stats.rounds} rounds"

    def long_prompt(self) -> str:
        """A prompt of 2,000 tokens."""
        ids = torch.tensor([self._prompts[4]])
        output = self._spec.generate(ids, torch.ones_like(ids), max_new_tokens=_AFTER_LONG, **_GREEDY)
        _check("the text", output.sequences[0, _LONG:], self._wanted[4])
        return f"{_AFTER_LONG} tokens are the model's; {output.stats.seconds['prefill']:.0f} s for the prompt"

    def threads(self) -> str:
        """Two threads at once."""
        errors: list[BaseException] = []

        def generate(number: int) -> None:
            try:
                self._alone(number)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=generate, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise FailedError(str(errors[0])) from errors[0]
        return f"2 x {_NEW} tokens are the model's"

    def interrupt(self) -> str:
        """An interrupt in the middle of a transfer, and the next call."""
        self._in_the_second_pass(lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            self._alone(2)
        except KeyboardInterrupt:
            self._alone(2)
            return f"KeyboardInterrupt, then {_NEW} tokens are the model's"
        raise FailedError("it was not interrupted")

    def file_goes(self) -> str:
        """Weights deleted while they are streamed, and the next call."""

        def delete() -> None:
            for file in self._folder.glob("*.safetensors"):
                file.unlink()

        self._in_the_second_pass(delete)
        self._alone(3)
        if list(self._folder.glob("*.safetensors")):
            raise FailedError("it ended before the weights were deleted")
        self._alone(0)
        return f"2 x {_NEW} tokens are the model's: an open file stays until it is closed"

    def _alone(self, number: int) -> None:
        """Check what one prompt gives."""
        prompt = self._prompts[number]
        ids = torch.tensor([prompt])
        output = self._spec.generate(ids, torch.ones_like(ids), max_new_tokens=_NEW, **_GREEDY)
        _check(f"prompt {number}", output.sequences[0, len(prompt) :], self._wanted[number])

    def _in_the_second_pass(self, act: Callable[[], None]) -> None:
        """Act once half of the weights have moved again, after the prompt's pass."""
        stream, pass_bytes = self._placement.stream, self._placement.plan.streamed
        assert stream is not None
        place = stream.bytes_moved + pass_bytes * 3 // 2

        def wait() -> None:
            while stream.bytes_moved < place:
                time.sleep(0.001)
            act()

        threading.Thread(target=wait, daemon=True).start()


def _check(name: str, text: Tensor, wanted: list[int]) -> None:
    if text.tolist() != wanted:
        raise FailedError(f"{name}: {text.tolist()}, and not {wanted}")


def _report(record: dict[str, Any]) -> str:
    lines = [
        "# More model than memory, where it is hard\n",
        f"{record['environment']['processor']}, {record['threads']} threads, {record['memory']}: "
        f"{shown_bytes(record['streamed'])} streamed, drafts in {record['bits']} bits. Loading took "
        f"{record['loading_seconds']:.0f} s, and {shown_bytes(record['loading_peak'])} at most. Other programs ran: "
        "the seconds are no timings. *Peak*: resident memory of the process. "
        f"At {', '.join(sorted({'commit ' + str(row['commit']) for row in record['trials']}))}.\n",
        "| trial | found | seconds | peak |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['trial']} | {row['found']} | {row['seconds']:.0f} | {shown_bytes(row['peak'])} |"
        for row in record["trials"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

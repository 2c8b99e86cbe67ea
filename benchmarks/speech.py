"""Whisper by each draft, its decoder and the whole, beside `model.generate`, assisted decoding and faster-whisper.

    python benchmarks/speech.py WHISPER --threads 2 --draft int8 --draft recycle --draft recycle+int8

espeak-ng reads a file of texts aloud. Clips are transcribed one at a time, greedily: one of at most 30 s as one piece
without timestamps, a longer one whole, in pieces by its timestamps. Arms run in turns.
Times are from the features on, encoder included; of clips of one piece also those of the decoder alone, given the
encoder's output. Assisted decoding is `transformers`' own, with the model's early exit. It reads features of one piece,
and its arm ends where it raises. With --faster-whisper, a folder of the same weights that ct2-transformers-converter
made, that engine runs too, without beams; it makes its own features, within its time. Word errors are those against the
text that was read aloud.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from harness import HERE, equal_tokens, keep, seconds_of
from rich.progress import track
from scipy.signal import resample_poly
from transformers import AutoProcessor, PreTrainedModel, WhisperForConditionalGeneration

import selfspec
from selfspec.measure.environment import environment
from selfspec.tools.lab.report import markdown_table

TEXTS = HERE / "prompts" / "spoken.jsonl"
RATE = 16_000
_SECONDS = 30
# Of a WAV file as espeak-ng writes it.
_HEADER, _RATE_OF_ESPEAK = 44, 22_050
_PLAIN, _ASSISTED = "model.generate", "assisted, exit"
_SHORT, _LONG, _DECODER = "one piece", "long form", "decoder alone"

Sound = np.ndarray[Any, np.dtype[np.float32]]


def read_texts(file: Path = TEXTS) -> list[dict[str, str]]:
    """Return the texts to be read aloud, each with its `language` and `text`."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def spoken(text: str, language: str) -> Sound:
    """Let espeak-ng read a text aloud, and return what Whisper takes: one channel, `RATE` samples a second."""
    command = ["espeak-ng", "-v", language, "--stdout", text]
    wave = subprocess.run(command, capture_output=True, check=True).stdout
    ratio = Fraction(RATE, _RATE_OF_ESPEAK)
    samples = np.frombuffer(wave[_HEADER:], np.int16).astype(np.float32) / 2**15
    resampled: Sound = resample_poly(samples, ratio.numerator, ratio.denominator).astype(np.float32)
    return resampled


def features(processor: Any, sounds: Sequence[Sound]) -> dict[str, Any]:
    """Return what Whisper reads of some clips: all whole, or each filled up to one piece where none is longer."""
    longest = max(len(sound) for sound in sounds) / RATE
    whole = {"truncation": False, "padding": "longest"} if longest > _SECONDS else {}
    made = processor(list(sounds), sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **whole)
    return dict(made)


def word_errors(text: str, spoken: str) -> tuple[int, int]:
    """Return how many words must be put in, left out or replaced to get what was spoken, and how many were spoken."""
    found, wanted = (re.findall(r"\w+", each.lower()) for each in (text, spoken))
    line = list(range(len(wanted) + 1))
    for row, word in enumerate(found, 1):
        last, line[0] = line[0], row
        for column, other in enumerate(wanted, 1):
            last, line[column] = line[column], min(last + (word != other), line[column] + 1, line[column - 1] + 1)
    return line[-1], len(wanted)


def _arms(model: PreTrainedModel, drafts: list[str], exit_layer: int | None) -> dict[str, Callable[..., Any]]:
    arms: dict[str, Callable[..., Any]] = {_PLAIN: model.generate}
    if exit_layer is not None:
        arms[_ASSISTED] = partial(model.generate, assistant_early_exit=exit_layer)
    for name in ("none", *drafts):
        arms[name] = partial(_forgetful, selfspec.wrap(model, None if name == "none" else name))
    return arms


def _forgetful(spec: selfspec.SelfSpeculative, **call: Any) -> Any:
    """Transcribe with nothing that drafts kept of earlier runs of the clip."""
    spec.forget()
    return spec.generate(**call)


def _faster(folder: str, kind: str, threads: int) -> Callable[..., Any]:
    from faster_whisper import WhisperModel  # type: ignore[import-not-found,unused-ignore]

    engine = WhisperModel(folder, device="cpu", compute_type=kind, cpu_threads=threads)

    def transcribe(sound: Sound, language: str) -> list[Any]:
        segments, _ = engine.transcribe(
            sound,
            language=language,
            beam_size=1,
            temperature=0.0,
            without_timestamps=len(sound) <= RATE * _SECONDS,
            condition_on_previous_text=False,
        )
        return list(segments)

    return transcribe


@dataclass
class _Arm:
    """One arm: what it raised, seconds by what was timed, equal texts, wrong words, accepted lengths of each clip."""

    raised: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    alike: int = 0
    wrong: int = 0
    lengths: list[float] = field(default_factory=list)

    def timed(self, what: str, times: Sequence[float]) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + median(times)


def main() -> None:
    """Run the benchmark and keep its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a Whisper")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="lines of JSON, each with a language and a text")
    parser.add_argument("--every", type=int, default=1, help="take one of so many texts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draft", action="append", default=[], help="as `selfspec drafts` lists them; several")
    parser.add_argument("--assisted-exit", type=int, help="layer of transformers' own early-exit assistant")
    parser.add_argument("--faster-whisper", help="folder of the same weights for that engine")
    parser.add_argument("--name", default="speech", help="of the files of results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = WhisperForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(options.model)
    arms = _arms(model, options.draft, options.assisted_exit)
    others = {
        f"faster-whisper, {kind}": _faster(options.faster_whisper, kind, options.threads)
        for kind in (("float32", "int8") if options.faster_whisper else ())
    }
    known = {name: _Arm() for name in (*arms, *others)}
    tokens = words = 0
    texts = read_texts(options.texts)[:: options.every]
    for done, line in enumerate(track(texts, description="clips"), 1):
        sound = spoken(line["text"], line["language"])
        long = len(sound) > RATE * _SECONDS
        call = {"language": line["language"], "task": "transcribe", "do_sample": False, "return_timestamps": long}
        inputs = {_LONG if long else _SHORT: features(processor, [sound])}
        if not long:
            with torch.no_grad():
                inputs[_DECODER] = {"encoder_outputs": model.get_encoder()(inputs[_SHORT]["input_features"])}
        if not long and _ASSISTED in arms:
            try:
                arms[_ASSISTED](**inputs[_SHORT], **call)
            except (IndexError, ValueError) as error:
                del arms[_ASSISTED]
                known[_ASSISTED] = _Arm(raised=type(error).__name__)
        running = {what: {name: run for name, run in arms.items() if name != _ASSISTED} for what in inputs}
        if not long:
            running[_SHORT] = arms
        whole = next(iter(inputs))
        plain: list[int] = []
        for name, run in running[whole].items():
            out = run(**inputs[whole], **call)
            text = (out if isinstance(out, torch.Tensor) else out.sequences)[0].tolist()
            plain = plain or text
            known[name].alike += text == plain
            wrong, spoken_words = word_errors(processor.decode(text, skip_special_tokens=True), line["text"])
            known[name].wrong += wrong
            if not isinstance(out, torch.Tensor):
                known[name].lengths.append(out.stats.mean_accepted_length)
        tokens, words = tokens + len(plain), words + spoken_words
        for name, transcribe in others.items():
            segments = transcribe(sound, line["language"])
            text = [token for segment in segments for token in segment.tokens]
            known[name].alike += equal_tokens(text, plain) == len(plain)
            known[name].wrong += word_errors("".join(segment.text for segment in segments), line["text"])[0]
        for what, given in inputs.items():
            times: dict[str, list[float]] = {name: [] for name in running[what]}
            for _ in range(options.repeats):
                for name, run in running[what].items():
                    times[name].append(seconds_of(partial(run, **given, **call)))
            for name, each in times.items():
                known[name].timed(what, each)
        for name, transcribe in others.items():
            again = partial(transcribe, sound, line["language"])
            known[name].timed(whole, [seconds_of(again) for _ in range(options.repeats)])
        # After each clip: what was measured stays where the rest is not.
        record = {
            "environment": environment(model.device),
            "model": model.config.to_dict(),
            "clips": done,
            "tokens": tokens,
            "words": words,
            "threads": options.threads,
            "arms": {name: asdict(arm) for name, arm in known.items()},
        }
        keep(options.name, record, _report(record))


def _report(record: dict[str, Any]) -> str:
    arms, kinds = record["arms"], (_SHORT, _LONG, _DECODER)
    rows = []
    for name, arm in arms.items():
        timed, stock = arm["seconds"], arms[_PLAIN]["seconds"]
        cells = [name if not arm["raised"] else f"{name}: raised {arm['raised']}"]
        for kind in kinds:
            cells += [f"{timed[kind]:.2f}", f"{stock[kind] / timed[kind]:.2f}"] if kind in timed else ["", ""]
        errors = "" if name == _ASSISTED else f"{arm['wrong'] / record['words']:.1%}"
        rows.append([*cells, str(arm["alike"]), errors, f"{mean(arm['lengths']):.2f}" if arm["lengths"] else ""])
    heads = ["", *(head for kind in kinds for head in (kind, "")), "texts alike", "word errors", "tokens a pass"]
    title = f"# Whisper, {record['clips']} clips, {record['tokens']} tokens, {record['threads']} threads"
    said = "Seconds, and times as fast as `model.generate`."
    return f"{title}\n\n{said}\n\n{markdown_table(heads, rows)}\n"


if __name__ == "__main__":
    main()

"""Whisper by each draft, its decoder and the whole, beside `model.generate`, assisted decoding and faster-whisper.

    python benchmarks/speech.py WHISPER sound/*.wav --threads 2 --draft int8 --draft recycle --draft recycle+int8

Clips are read one at a time, greedily and without timestamps, as one segment each of at most 30 s. Arms run in turns.
The pipeline counts from the features on, encoder included; the decoder alone is given the encoder's output. Assisted
decoding is `transformers`' own, with the model's early exit. With --faster-whisper, a folder of the same weights that
ct2-transformers-converter made, that engine runs too, without beams; it makes its own features, within its time.
"""

from __future__ import annotations

import argparse
import wave
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import equal_tokens, keep, seconds_of
from rich.progress import track
from scipy.signal import resample_poly
from transformers import AutoProcessor, PreTrainedModel, WhisperForConditionalGeneration

import selfspec
from selfspec.environment import environment

_RATE, _SECONDS = 16_000, 30
_PLAIN = "model.generate"


def _sound(path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Read a clip of one channel, 16 bits, as Whisper takes it."""
    with wave.open(str(path)) as clip:
        samples = np.frombuffer(clip.readframes(clip.getnframes()), np.int16).astype(np.float32) / 2**15
        ratio = Fraction(_RATE, clip.getframerate())
    resampled: np.ndarray[Any, np.dtype[np.float32]] = resample_poly(samples, ratio.numerator, ratio.denominator)
    return resampled[: _RATE * _SECONDS].astype(np.float32)


def _arms(model: PreTrainedModel, drafts: list[str], exit_layer: int | None) -> dict[str, Callable[..., Any]]:
    arms: dict[str, Callable[..., Any]] = {_PLAIN: model.generate}
    if exit_layer is not None:
        arms["assisted, exit"] = lambda **inputs: model.generate(**inputs, assistant_early_exit=exit_layer)
    for name in ("none", *drafts):
        arms[name] = selfspec.wrap(model, None if name == "none" else name).generate
    return arms


def _faster(folder: str, kind: str, threads: int) -> Callable[..., Any]:
    from faster_whisper import WhisperModel  # type: ignore[import-not-found,unused-ignore]

    engine = WhisperModel(folder, device="cpu", compute_type=kind, cpu_threads=threads)

    def transcribe(sound: np.ndarray[Any, Any]) -> list[int]:
        segments, _ = engine.transcribe(
            sound,
            language="en",
            beam_size=1,
            temperature=0.0,
            without_timestamps=True,
            condition_on_previous_text=False,
        )
        return [token for segment in segments for token in segment.tokens]

    return transcribe


def main() -> None:
    """Run the benchmark and keep its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a Whisper")
    parser.add_argument("clips", nargs="+", type=Path, help="WAV files of one channel, 16 bits, English")
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
    taken: dict[str, dict[str, list[float]]] = {name: {"pipeline": [], "decoder": []} for name in (*arms, *others)}
    alike = dict.fromkeys((*arms, *others), 0)
    tokens, accepted = 0, dict.fromkeys(arms, 0.0)
    for path in track(options.clips, description="clips"):
        sound = _sound(path)
        features = processor(sound, sampling_rate=_RATE, return_tensors="pt").input_features
        with torch.no_grad():
            encoded = model.get_encoder()(features)
        inputs = {"pipeline": {"input_features": features}, "decoder": {"encoder_outputs": encoded}}
        call: dict[str, Any] = {"language": "en", "task": "transcribe", "do_sample": False}
        plain = arms[_PLAIN](**inputs["pipeline"], **call)[0].tolist()
        tokens += len(plain)
        for name, run in arms.items():
            out = run(**inputs["pipeline"], **call)
            text = out if isinstance(out, torch.Tensor) else out.sequences
            alike[name] += text[0].tolist() == plain
            accepted[name] += 0.0 if isinstance(out, torch.Tensor) else out.stats.mean_accepted_length
        for name, transcribe in others.items():
            alike[name] += equal_tokens(transcribe(sound), plain) == len(plain)
        for what, given in inputs.items():
            times: dict[str, list[float]] = {name: [] for name in arms}
            for _ in range(options.repeats):
                for name, run in arms.items():
                    times[name].append(seconds_of(partial(run, **given, **call)))
            for name, each in times.items():
                taken[name][what].append(median(each))
        for name, transcribe in others.items():
            each = [seconds_of(partial(transcribe, sound)) for _ in range(options.repeats)]
            taken[name]["pipeline"].append(median(each))
    seconds = {name: {what: sum(each) for what, each in by.items() if each} for name, by in taken.items()}
    record = {
        "environment": environment(model.device),
        "clips": len(options.clips),
        "tokens": tokens,
        "threads": options.threads,
        "seconds": seconds,
        "texts alike": alike,
        "mean accepted length": {name: total / len(options.clips) for name, total in accepted.items() if total},
    }
    keep(options.name, record, _report(record))


def _report(record: dict[str, Any]) -> str:
    plain = record["seconds"][_PLAIN]
    lines = [
        f"# Whisper, {record['clips']} clips, {record['tokens']} tokens, {record['threads']} threads",
        "",
        "| | pipeline, s | times plain | decoder, s | times plain | texts alike | tokens a pass |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, by in record["seconds"].items():
        columns = [
            column
            for what in ("pipeline", "decoder")
            for column in ((f"{by[what]:.2f}", f"{plain[what] / by[what]:.2f}") if what in by else ("", ""))
        ]
        length = record["mean accepted length"].get(name)
        shown = "" if length is None else f"{length:.2f}"
        lines.append(f"| {name} | {' | '.join(columns)} | {record['texts alike'][name]} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

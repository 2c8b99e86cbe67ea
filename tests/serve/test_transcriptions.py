"""`/v1/audio/transcriptions` writes what `spec.generate` does of a sound, whole and as it is heard."""

from __future__ import annotations

import http.client
import io
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import selfspec
from helpers.encoder_decoders import feature_extractor, tokenizer, whisper
from helpers.http_server import Reply, asked, listening

pytest.importorskip("python_multipart")
pytest.importorskip("soundfile")

import soundfile

from selfspec.serve.app import create_app
from selfspec.serve.client_limits import ServerLimits
from selfspec.serve.endpoints.transcriptions import ServedSpeech, read_sound
from selfspec.serve.transcriber import Hearing, Transcriber

PATH, FORM = "/v1/audio/transcriptions", "multipart/form-data; boundary=b"
RATE = 16_000
# Of pieces of a second.
SECONDS = 2.5


@dataclass(frozen=True)
class Heard:
    port: int
    transcriber: Transcriber
    expected: Any

    def ask(self, file: bytes | None, origin: str = "", **fields: str) -> Reply:
        more = {"origin": origin} if origin else {}
        return asked(self.port, PATH, form(file, **fields), content_type=FORM, **more)


def form(file: bytes | None, **fields: str) -> bytes:
    parts = [(f'name="{name}"', value.encode()) for name, value in {"model": "ear", **fields}.items()]
    parts += [] if file is None else [('name="file"; filename="a.wav"', file)]
    head = b"--b\r\nContent-Disposition: form-data; "
    return b"".join(head + what.encode() + b"\r\n\r\n" + value + b"\r\n" for what, value in parts) + b"--b--\r\n"


def sound(seconds: float = SECONDS, rate: int = RATE) -> Any:
    return np.random.default_rng(0).uniform(-0.5, 0.5, int(seconds * rate)).astype(np.float32)


def wav(samples: Any, rate: int = RATE, **how: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **{"format": "WAV", "subtype": "FLOAT", **how})
    return file.getvalue()


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Heard]:
    folder, model, extractor = tmp_path_factory.mktemp("ear"), whisper(), feature_extractor()
    extractor.save_pretrained(folder)
    transcriber = Transcriber(selfspec.wrap(model, "exit:1"), tokenizer(), str(folder))
    how: Any = {"return_tensors": "pt", "return_attention_mask": True, "truncation": False, "padding": "longest"}
    inputs = extractor(sound(), sampling_rate=RATE, **how)
    expected = model.generate(**inputs, return_timestamps=True, return_segments=True, temperature=0.0)
    served = ServedSpeech(transcriber, "ear", limits=ServerLimits(body_bytes=2**20))
    with listening(create_app(served, origins=["https://a.example"]), served.limits) as port:
        yield Heard(port, transcriber, expected)


def test_text_and_segments_are_those_of_generate(heard: Heard) -> None:
    reply = heard.ask(wav(sound()), response_format="verbose_json")
    assert reply.status == 200, reply.raw
    body, read = reply.body, tokenizer()
    ids = heard.expected["sequences"][0].tolist()
    assert body["text"] == read.decode(ids, skip_special_tokens=True).strip()
    assert body["text"]
    segments = heard.expected["segments"][0]
    assert [each["tokens"] for each in body["segments"]] == [each["tokens"].tolist() for each in segments]
    assert [each["start"] for each in body["segments"]] == [float(each["start"]) for each in segments]
    assert [each["end"] for each in body["segments"]] == [float(each["end"]) for each in segments]
    assert (body["language"], body["duration"]) == ("english", SECONDS)
    assert heard.ask(wav(sound()), response_format="text").raw.decode() == body["text"] + "\n"
    assert heard.ask(wav(sound())).body == {"text": body["text"], "usage": {"type": "duration", "seconds": SECONDS}}
    assert heard.transcriber.stats().drafted > 0


def test_a_stream_says_the_same(heard: Heard) -> None:
    raw = heard.ask(wav(sound()), stream="true").raw.decode()
    events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n") if line]
    assert events[-1]["type"] == "transcript.text.done"
    assert len(events) > 2
    assert "".join(event["delta"] for event in events[:-1]).strip() == events[-1]["text"]
    assert events[-1]["text"] == heard.ask(wav(sound())).body["text"]


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"file": None}, 400, "file", "file"),
        ({"file": b"no sound"}, 400, "file", "read (Format not recognised.); send WAV"),
        ({"file": wav(sound(0))}, 400, "file", "no sound"),
        ({"model": "another"}, 404, "model", "ear"),
        ({"language": "de"}, 400, "language", "hears en"),
        ({"response_format": "srt"}, 400, "response_format", "json"),
        ({"timestamp_granularities[]": "word"}, 400, "timestamp_granularities[]", "segment"),
        ({"temperature": "2"}, 400, "temperature", "less"),
        ({"colour": "red"}, 400, "colour", "unrecognized"),
        ({"origin": "https://b.example"}, 403, None, "--cors"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_refused_by_name(heard: Heard, fields: dict[str, Any], status: int, param: str | None, words: str) -> None:
    reply = heard.ask(**{"file": wav(sound()), **fields})
    assert reply.status == status, reply.raw
    assert (reply.body["error"]["param"], words in reply.body["error"]["message"]) == (param, True)


def test_a_page_that_may_ask_is_answered(heard: Heard) -> None:
    for origin in ("https://a.example", f"http://127.0.0.1:{heard.port}"):
        assert heard.ask(wav(sound()), origin=origin).status == 200


@pytest.mark.parametrize("how", [{"subtype": "PCM_16"}, {"format": "FLAC", "subtype": "PCM_16"}], ids=str)
def test_files_are_joined_and_brought_to_the_rate(how: dict[str, str]) -> None:
    times = np.arange(8000) / 8000
    tone = 0.5 * np.sin(2 * np.pi * 440 * times).astype(np.float32)
    read = read_sound(wav(np.stack([tone, tone], 1), 8000, **how), RATE)
    wanted = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert read.dtype == np.float32
    assert np.abs(read - wanted)[100:-100].max() < 1e-3


@pytest.mark.parametrize("stream", ["true", "false"])
def test_who_leaves_is_not_heard_any_more(heard: Heard, monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    ended, begun = threading.Event(), threading.Event()

    def generate(stopping_criteria: list[Hearing], **_: Any) -> Any:
        begun.set()
        try:
            while True:
                stopping_criteria[0].check()
        finally:
            ended.set()

    monkeypatch.setattr(heard.transcriber.spec, "generate", generate)
    with closing(http.client.HTTPConnection("127.0.0.1", heard.port, timeout=60)) as connection:
        connection.request("POST", PATH, form(wav(sound()), stream=stream), {"content-type": FORM})
        assert begun.wait(10)
        assert not ended.is_set()
    assert ended.wait(10)


@pytest.mark.clients
def test_openai_transcribes(heard: Heard) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{heard.port}/v1", api_key="none", max_retries=0)
    given = {"model": "ear", "file": ("a.wav", wav(sound()))}
    form = {"response_format": "verbose_json", "timestamp_granularities": ["segment"]}
    whole = client.audio.transcriptions.create(**given, **form, language="en", temperature=0)
    assert whole.text == heard.ask(wav(sound())).body["text"]
    assert len(whole.segments) == len(heard.expected["segments"][0])
    *deltas, done = client.audio.transcriptions.create(**given, stream=True)
    assert "".join(each.delta for each in deltas).strip() == done.text == whole.text

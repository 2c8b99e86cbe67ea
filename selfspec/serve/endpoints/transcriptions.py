"""`POST /v1/audio/transcriptions`: the text of a sound."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from fractions import Fraction
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import numpy as np
import soundfile
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from scipy.signal import resample_poly
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from selfspec.decode.generation import Transcript
from selfspec.errors import SelfSpecError
from selfspec.serve.api_error import ApiError, api_error, stopping_error
from selfspec.serve.endpoints.answering import Body, Stream, event, unless_gone
from selfspec.serve.monitoring import note
from selfspec.serve.schemas import Many, ModelT, validated
from selfspec.serve.served import ServedModel
from selfspec.serve.transcriber import Hearing, LeftError, Samples, Transcriber

# A small file may have hours of silence.
_MOST_SAMPLES = 2**27


class TranscriptionRequest(BaseModel):
    """`POST /v1/audio/transcriptions`, a form of several parts."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    file: Annotated[Any, WithJsonSchema({"type": "string", "format": "binary"})]
    model: str
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    stream: bool = False
    seed: int | None = None
    # Refused unless they say what holds anyway.
    granularities: Annotated[Many[Literal["segment"]] | None, Field(alias="timestamp_granularities[]")] = None
    chunking_strategy: Literal["auto"] | None = None


class ServedSpeech(ServedModel):
    """A model that writes what is said in sounds."""

    engine: Transcriber

    async def parse(self, http: Request, model: type[ModelT]) -> ModelT:
        """Read the parts of a form; `file` is the bytes of a file."""
        # A page of another site may send a form without asking.
        origin, own = http.headers.get("origin"), http.headers.get("host")
        if origin and urlsplit(origin).netloc != own and not {"*", origin} & set(http.app.state.origins):
            said = f"pages of {origin[:200]!r} may not ask; start the server with --cors ORIGIN"
            raise ApiError(403, said, None, "cors")
        async with http.form(max_files=1, max_fields=32) as form:
            fields: Body = {name: form.getlist(name) if name.endswith("[]") else form[name] for name in form}
            if not isinstance(fields.get("file"), UploadFile):
                raise ApiError(400, "file: send a form of several parts, one of them a file with the sound", "file")
            fields["file"] = await fields["file"].read()
        return validated(model, fields)


def read_sound(file: bytes, rate: int) -> Samples:
    """Read the samples of a file, channels joined, at this rate. ApiError: it is none that libsndfile reads."""
    try:
        with soundfile.SoundFile(io.BytesIO(file)) as sound:
            if sound.frames * sound.channels > _MOST_SAMPLES:
                raise ApiError(400, f"file: it has more than {_MOST_SAMPLES} samples; send it in parts", "file")
            samples, ratio = sound.read(dtype="float32", always_2d=True).mean(1), Fraction(rate, sound.samplerate)
    except soundfile.SoundFileError as error:
        why = getattr(error, "error_string", error)
        said = f"file: it cannot be read ({why}); send WAV, FLAC, MP3 or OGG: ffmpeg -i IN OUT.wav makes it"
        raise ApiError(400, said, "file") from error
    if not len(samples):
        raise ApiError(400, "file: there is no sound in it", "file")
    heard = samples if ratio == 1 else resample_poly(samples, ratio.numerator, ratio.denominator)
    return np.asarray(heard, np.float32)


async def transcribe(served: ServedSpeech, http: Request, asked: TranscriptionRequest) -> Response:
    """Answer a request: once all is heard, or segment by segment."""
    served.check(asked.model)
    engine, loop = served.engine, asyncio.get_running_loop()
    samples = await asyncio.to_thread(read_sound, asked.file, engine.rate)
    pieces: asyncio.Queue[str | None] = asyncio.Queue()
    hearing = Hearing(lambda text: loop.call_soon_threadsafe(pieces.put_nowait, text))
    try:
        sampling = {"temperature": asked.temperature, "seed": asked.seed}
        work = asyncio.wrap_future(engine.submit(samples, hearing, asked.language, asked.prompt, **sampling))
    except SelfSpecError as error:
        raise api_error(error) from error
    work.add_done_callback(lambda _: pieces.put_nowait(None))
    usage, begun = {"type": "duration", "seconds": len(samples) / engine.rate}, loop.time()
    late = loop.call_later(served.limits.request_seconds, hearing.cancel)

    async def heard() -> Transcript:
        try:
            found = await work
        except LeftError:
            said = "the sound was not heard in the time of a request"
            raise stopping_error() if served.stopping else ApiError(408, said, None, "request_timeout") from None
        except SelfSpecError as error:
            raise api_error(error) from error
        finally:
            late.cancel()
        stats = found.stats
        note(http.scope, sound_seconds=usage["seconds"], completion_tokens=stats.new_tokens)
        note(http.scope, drafted=stats.drafted, accepted=stats.accepted)
        if served.log_text:
            note(http.scope, answers=[hearing.text])
        served.metrics.whole_answer.observe(loop.time() - begun)
        served.metrics.ended("stop")
        return found

    async def events() -> AsyncIterator[str]:
        while (new := await pieces.get()) is not None:
            yield event({"type": "transcript.text.delta", "delta": new})
        try:
            await heard()
            yield event({"type": "transcript.text.done", "text": hearing.text.strip(), "usage": usage})
        except ApiError as error:
            yield event(error.body)

    if asked.stream:
        return Stream(hearing.cancel, events())
    try:
        found = await unless_gone(http, heard())
    finally:
        hearing.cancel()
    text = hearing.text.strip()
    if asked.response_format == "text":
        return PlainTextResponse(text + "\n")
    body: Body = {"text": text, "usage": usage}
    if asked.response_format == "verbose_json":
        language = LANGUAGES.get(hearing.language, hearing.language)
        body |= {"task": "transcribe", "language": language, "duration": usage["seconds"], "segments": []}
        for number, each in enumerate((found.segments or [[]])[0]):
            ids, times = each["tokens"].tolist(), {"start": float(each["start"]), "end": float(each["end"])}
            more = {"text": hearing.read(ids), "tokens": ids, "temperature": asked.temperature}
            body["segments"].append({"id": number, "seek": 0, **times, **more})
    return JSONResponse(body)

"""What operators see: a line of JSON for each request, with no text unless asked for, and metrics for Prometheus."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.serve.api_error import ApiError
from selfspec.serve.events import EngineStats, Shown

LOGGER = logging.getLogger("selfspec.serve")

LOG_CONFIG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"json": {"()": "selfspec.serve.monitoring.JsonLines"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
    "loggers": {
        name: {"handlers": ["stderr"], "level": "INFO", "propagate": False} for name in (LOGGER.name, "uvicorn.error")
    },
}
"""Lines of JSON on stderr."""

_ID = re.compile(r"[\x21-\x7e]{1,128}")

_HEADER = b"x-request-id"

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class JsonLines(logging.Formatter):
    """Writes a record as one line of JSON: time, level, message, and the fields of `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def note(scope: Scope, **fields: Any) -> None:
    """Add fields to the line of a request, `scope["selfspec"]`, which has its `request_id` from the beginning."""
    scope["selfspec"].update(fields)


class RequestLog:
    """Gives every request an id, the client's own if it sends one, and writes a line when it has been answered."""

    def __init__(self, app: ASGIApp, responded: Callable[[int], None]) -> None:
        self._app = app
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER), "")
        own = given if _ID.fullmatch(given) else uuid.uuid4().hex
        fields: dict[str, Any] = {"request_id": own}
        scope["selfspec"] = fields
        begun, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_HEADER, own.encode("latin-1"))]
            await send(message)

        ending = "answered"
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            if status:
                ending = "broken off"
                raise
            LOGGER.error("a request failed", exc_info=error, extra={"fields": {"request_id": own}})
            failure = ApiError(500, "the server failed at this request; its log says why")
            await failure.response(scope["path"])(scope, receive, answer)
        except BaseException:
            ending = "broken off"
            raise
        finally:
            fields = {
                **fields,
                "method": scope["method"],
                "path": scope["path"],
                "status": status or None,
                "seconds": round(time.monotonic() - begun, 4),
            }
            self._responded(status)
            LOGGER.info(ending, extra={"fields": fields})


class Metrics(Collector):
    """Counts of requests, and of the engine when they are read; each is labelled with the model's name."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model = model
        self._stats = stats
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

        def histogram(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, words, ["model_name"], registry=self._registry, buckets=buckets)
            return made.labels(model)

        self.first_token = histogram("vllm:time_to_first_token_seconds", "Until an answer's first token.", _SECONDS)
        self.between_tokens = histogram(
            "vllm:inter_token_latency_seconds", "From one token of an answer to the next, by their rounds.", _SECONDS
        )
        self.whole_answer = histogram("vllm:e2e_request_latency_seconds", "Until an answer's last token.", _SECONDS)
        self.prompt_tokens = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.answer_tokens = histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._successes = Counter(
            "vllm:request_success",
            "Answers, by why they ended.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._responses = Counter(
            "selfspec:http_responses", "Responses, by status.", ["model_name", "status"], registry=self._registry
        )

    def ended(self, reason: str) -> None:
        """Count an answer."""
        self._successes.labels(self._model, reason).inc()

    def responded(self, status: int) -> None:
        """Count a response."""
        self._responses.labels(self._model, str(status)).inc()

    def written(self) -> bytes:
        """Write all metrics in the text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Read the engine's own counts."""
        stats, families = self._stats(), {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        rows, drafts = stats.running + stats.prefilling, stats.rounds - stats.plain_rounds
        used = stats.cache_bytes / stats.cache_bound
        shown: list[tuple[Shown, float]] = [
            (Shown("gauge", "vllm:num_requests_running", "Rows in the running batch, or being read."), rows),
            (Shown("gauge", "vllm:kv_cache_usage_perc", "Share of the cache's bound that is used."), used),
            (Shown("counter", "vllm:spec_decode_num_drafts", "Rounds with a draft."), drafts),
        ]
        for name, hint in get_type_hints(EngineStats, include_extras=True).items():
            shown += [(each, getattr(stats, name)) for each in getattr(hint, "__metadata__", ())]
        for each, value in shown:
            metric = families[each.kind](each.name, each.words, labels=["model_name"])
            metric.add_metric([self._model], value)
            yield metric
        labels = ["model_name", "reason"]
        ended = CounterMetricFamily("selfspec:rows_finished", "Rows, by why they ended.", labels=labels)
        for reason, count in stats.finished.items():
            ended.add_metric([self._model, reason], count)
        yield ended

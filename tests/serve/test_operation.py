"""What operators see: health, metrics, logs, the key, and the page of the endpoints."""

from __future__ import annotations

import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.http_server import NAME, Running, running
from selfspec.serve.monitoring import LOGGER, JsonLines


def metrics(server: Running) -> dict[str, float]:
    """Values by name and labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(server.ask("/metrics").raw.decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name + (str(labels) if labels else "")] = sample.value
    return found


def test_models(server: Running) -> None:
    (card,) = server.ask("/v1/models").body["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (NAME, "model", 512)
    assert server.ask(f"/v1/models/{NAME}").body == card


def test_alive_and_ready(server: Running) -> None:
    assert server.ask("/health").body == {"status": "ok"}
    assert server.ask("/ready").body == {"status": "ready"}


def test_metrics_count_what_was_done(server: Running) -> None:
    before = metrics(server)
    usage = server.complete(temperature=0, max_tokens=12, n=2).body["usage"]
    server.settled()
    after = metrics(server)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert more("vllm:generation_tokens_total") == 24
    assert more("vllm:time_to_first_token_seconds_count") == 2
    assert more("vllm:inter_token_latency_seconds_count") >= 12
    assert more("vllm:request_success_total{'finished_reason': 'length'}") == 2
    details = usage["completion_tokens_details"]
    assert 0 < details["accepted_prediction_tokens"] <= usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    assert more("vllm:spec_decode_num_accepted_tokens_total") == details["accepted_prediction_tokens"]
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["process_resident_memory_bytes"] > 10**7


def test_ids_of_requests(server: Running) -> None:
    assert server.ask("/health", X_Request_Id="mine-7").headers["x-request-id"] == "mine-7"
    made = server.ask("/health", X_Request_Id="a b\x01").headers["x-request-id"]
    assert len(made) == 32
    assert server.complete(model="none").headers["x-request-id"]


@pytest.mark.parametrize("log_text", [False, True])
def test_the_log_has_a_line_a_request_and_no_text_unless_asked(
    caplog: pytest.LogCaptureFixture, log_text: bool
) -> None:
    with caplog.at_level(logging.INFO, LOGGER.name), running(log_text=log_text) as server:
        answers = [
            server.chat(temperature=0),
            server.complete(prompt="Tell me of Lily.", stream=True),
            server.complete(temperature="hot"),
        ]
    said = answers[0].body["choices"][0]["message"]["content"]
    ids = [answer.headers["x-request-id"] for answer in answers]
    # Another server of this process may still write of its own requests.
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records if record.name == LOGGER.name]
    lines = sorted(
        (line for line in lines if line["request_id"] in ids), key=lambda line: ids.index(line["request_id"])
    )
    assert [line["status"] for line in lines] == [200, 200, 400]
    assert [line.get("completion_tokens") for line in lines] == [8, 8, None]
    assert lines[0]["finish_reasons"] == ["length"]
    written = json.dumps(lines)
    assert ("Tell me of Lily." in written) == log_text
    assert (json.dumps(said)[1:-1] in written) == log_text


def test_a_broken_engine_is_no_health() -> None:
    with running() as server:
        server.served.engine.stop(drain=False)
        assert server.ask("/health").status == 503
        assert server.complete().status == 503


def test_the_page_of_the_endpoints_needs_nothing_from_elsewhere(server: Running) -> None:
    page = server.ask("/docs").raw.decode()
    assert "http://" not in page
    assert "https://" not in page
    described = server.ask("/openapi.json").body
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/ready", "/metrics"} <= described[
        "paths"
    ].keys()


def test_refusals_are_described_as_they_are(server: Running) -> None:
    described = server.ask("/openapi.json").body
    responses = described["paths"]["/v1/completions"]["post"]["responses"]
    assert responses.keys() == {"200", "4XX", "503"}
    schemas = described["components"]["schemas"]
    assert "HTTPValidationError" not in schemas
    reply = server.complete(temperature="hot")
    assert reply.status == 400
    assert reply.body.keys() == schemas["Refusal"]["properties"].keys()
    assert reply.body["error"].keys() == schemas["RefusalError"]["properties"].keys()

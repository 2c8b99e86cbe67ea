"""`selfspec serve`: a model behind OpenAI's endpoints."""

from __future__ import annotations

import ipaddress
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from selfspec.cli.options import DraftingOptions, MemoryOptions, ModelOptions, Output, Template, read_template
from selfspec.cli.outcome import print_json
from selfspec.errors import UnsupportedOptionError

_LOCAL = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address."""

    host: Annotated[str, typer.Option(help="Listen on this address; by default, only for this machine.")] = _LOCAL
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen on port N; 0: on any free port.")] = 8000
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="SELFSPEC_API_KEY",
            help="Take only requests with this key; may be repeated.",
            show_envvar=True,
        ),
    ] = None
    name: Annotated[str | None, typer.Option(help="Name of the model in requests; by default, MODEL as given.")] = None
    alias: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another name for it in requests; may be repeated.")
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Take requests of pages from ORIGIN, e.g. https://example.com; *: any."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Batching."""

    max_rows: Annotated[int, typer.Option(min=1, help="Run at most N answers at once.")] = 32
    cache: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Keys and values take at most `2GiB`, say; by default what the rows need."),
    ] = None
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of --cache, keep at most `1GiB`, say, of finished answers, for texts that begin like them; 0: none; "
            "by default a quarter, at most 1 GiB.",
        ),
    ] = None
    prefill_tokens: Annotated[
        int, typer.Option(min=1, help="Read N tokens of new prompts before each round of the running answers.")
    ] = 512
    max_waiting: Annotated[int, typer.Option(min=1, help="Let at most N answers wait; refuse more with 429.")] = 256


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits."""

    max_body: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Refuse larger bodies with 413; by default 4MiB, of sound 25MiB.")
    ] = None
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Write at most N tokens; by default what the context has room for.")
    ] = None
    max_answers: Annotated[int, typer.Option(min=1, help="At most N answers a request: prompts times n.")] = 128
    request_seconds: Annotated[float, typer.Option(min=1, help="Give up answers that take longer, with 408.")] = 600.0
    client_seconds: Annotated[
        float, typer.Option(min=0.1, help="Give up clients that take longer to send headers or body, or to read.")
    ] = 20.0
    max_connections: Annotated[int, typer.Option(min=1, help="At most N connections at once.")] = 1000
    stop_seconds: Annotated[
        float, typer.Option(min=1, help="When told to stop, let running answers take up to X seconds.")
    ] = 60.0


@dataclass(frozen=True)
class Serving:
    """`selfspec serve`, once it takes requests.

    Attributes:
        url: of the server; OpenAI's endpoints are below /v1.
        model: the name that clients ask for.
        context: the most tokens of a prompt and its answer.
    """

    url: str
    model: str
    context: int


def _check_installed(*libraries: str) -> None:
    for library in libraries:
        if find_spec(library) is None:
            raise UnsupportedOptionError(
                f"serving needs {library}, which is not installed; run: pip install 'selfspec[serve]'"
            )


def serve(
    model: ModelOptions,
    address: Address,
    batching: Batching,
    bounds: Bounds,
    budget: MemoryOptions,
    drafting: DraftingOptions,
    template: Template = None,
    log_text: Annotated[bool, typer.Option("--log-text", help="Write prompts and answers to the log, too.")] = False,
    output: Output = "text",
) -> Serving | None:
    """Serve a model over HTTP, as OpenAI's clients expect it: /v1/completions and /v1/chat/completions.

    Every answer is what the model writes alone, whatever runs beside it. The log is JSON, one line a request, on
    stderr; /docs shows all endpoints. SIGTERM and Ctrl-C finish what runs.
    """
    _check_installed("fastapi", "fastapi_offline", "llguidance", "prometheus_client", "uvicorn")
    keys = address.api_key or ()
    if "" in keys:
        raise UnsupportedOptionError("--api-key is empty; give one, or drop it to let anybody ask who reaches the port")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise UnsupportedOptionError("--api-key has spaces, or characters that no header holds; use ASCII without them")
    source = read_template(template)
    drafting.check(model, budget)

    from selfspec.model.checkpoint import read_config
    from selfspec.placement.plan import parse_bytes
    from selfspec.serve.app import create_app, listen, run
    from selfspec.serve.client_limits import ServerLimits
    from selfspec.serve.engine import Engine
    from selfspec.serve.served import Served, ServedModel

    hears = read_config(model.place).is_encoder_decoder
    if hears:
        _check_installed("soundfile", "python_multipart")
    limits = ServerLimits(
        body_bytes=parse_bytes("--max-body", bounds.max_body or ("25MiB" if hears else "4MiB")),
        new_tokens=bounds.max_new_tokens,
        answers=bounds.max_answers,
        request_seconds=bounds.request_seconds,
        client_seconds=bounds.client_seconds,
        connections=bounds.max_connections,
    )
    cache_bytes = None if batching.cache is None else parse_bytes("--cache", batching.cache)
    kept_bytes = None if batching.keep is None else 0 if batching.keep == "0" else parse_bytes("--keep", batching.keep)
    with listen(address.host, address.port) as bound:
        loaded = drafting.load(model, budget, drafting.control())
        name = address.name or model.model
        named: dict[str, Any] = {"limits": limits, "log_text": log_text, "aliases": address.alias or ()}
        served: ServedModel
        if hears:
            from selfspec.serve.endpoints.transcriptions import ServedSpeech
            from selfspec.serve.transcriber import Transcriber

            hearer = Transcriber(loaded.spec, loaded.tokenizer, model.place, batching.max_waiting)
            served = ServedSpeech(hearer, name, **named)
        else:
            engine = Engine(
                loaded.spec,
                max_rows=batching.max_rows,
                cache_bytes=cache_bytes,
                prefill_tokens=batching.prefill_tokens,
                max_waiting=batching.max_waiting,
                kept_bytes=kept_bytes,
            )
            served = Served(engine, loaded.tokenizer, name, template=source, **named)
        local = ipaddress.ip_address(bound.getsockname()[0]).is_loopback
        # A proxy keeps the name that it was asked by, and a page does not know the key.
        open_here = local and not keys
        hosts = ["localhost", "127.0.0.1", "[::1]", address.host] if open_here else ["*"]
        app = create_app(served, keys, bounds.stop_seconds, address.cors or (), hosts)
        port = bound.getsockname()[1]
        url = f"http://{f'[{address.host}]' if ':' in address.host else address.host}:{port}"

        def ready() -> None:
            if output == "json":
                print_json(Serving(url, name, served.engine.longest))
                return
            said = [f"{name} is served at {url}/v1, described at {url}/docs; Ctrl-C stops"]
            if isinstance(served, Served) and served.template is None:
                said.append("note: there is no chat template; --template FILE gives one")
            if not keys and not local:
                said.append("note: anyone who reaches this address may ask; --api-key KEY asks for a key")
            # A full disk behind stderr stops no server.
            with suppress(OSError):
                print(*said, sep="\n", file=sys.stderr, flush=True)

        run(app, served, bound, bounds.stop_seconds, ready)
    return None

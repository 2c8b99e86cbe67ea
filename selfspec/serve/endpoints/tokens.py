"""`POST /tokenize` and `/detokenize`: text to tokens and back."""

from __future__ import annotations

from pydantic import model_validator
from starlette.requests import Request

from selfspec.serve.api_error import ApiError
from selfspec.serve.endpoints.answering import Body
from selfspec.serve.endpoints.chat_completions import read_chat
from selfspec.serve.schemas import Many, Strict, Token
from selfspec.serve.served import Served


class TokenizeRequest(Strict):
    """A text, or messages as of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[Body] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: say a text here, or messages, and not both")
        return self


class DetokenizeRequest(Strict):
    """Tokens."""

    model: str | None = None
    tokens: Many[Token]


async def tokenize(served: Served, http: Request, request: TokenizeRequest) -> Body:
    """Turn text or messages into tokens."""
    served.check(request.model or served.name)

    def of_text() -> list[int]:
        text = request.prompt or ""
        served.check_text(text, "prompt")
        found: list[int] = served.tokenizer(text, add_special_tokens=request.add_special_tokens).input_ids
        return found

    if request.messages is not None:
        _, work = await read_chat(served, http, lambda: {"model": served.name, "messages": request.messages})
        tokens = list(work.prompts[0])
    else:
        tokens = await served.read(of_text)
    texts = served.tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": served.engine.longest, "tokens": tokens, "token_strs": texts}


async def detokenize(served: Served, _: Request, request: DetokenizeRequest) -> Body:
    """Turn tokens into text."""
    served.check(request.model or served.name)
    if len(request.tokens) > served.engine.longest:
        said = f"tokens: there are {len(request.tokens)}, and the context has {served.engine.longest}"
        raise ApiError(400, said, "tokens", "context_length_exceeded")
    served.check_tokens(request.tokens, "tokens", served.readable)
    return {"prompt": await served.read(lambda: str(served.tokenizer.decode(request.tokens)))}

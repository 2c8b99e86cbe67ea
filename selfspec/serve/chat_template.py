"""A chat's messages to the tokens of a prompt, by the template of the checkpoint or of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from selfspec.errors import CheckpointError, PromptError

Message = Mapping[str, Any]
"""`role`, `content`, and what else a template may read."""

_TRIAL: tuple[Message, ...] = ({"role": "user", "content": "Hello"},)


class ChatTemplate:
    """Writes messages the way the model was taught to read them, by a template in Jinja; None: the tokenizer's own.

    Raises:
        CheckpointError: there is none, or it cannot be rendered; the message names the remedy.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._source = source
        if source is None and not tokenizer.chat_template:
            raise CheckpointError(
                "the checkpoint has no chat template, so nothing says how it was taught to read messages; give one "
                "with --template FILE (Jinja, as in tokenizer_config.json), or continue text with `selfspec generate`"
            )
        try:
            self.prompt(_TRIAL)
        except PromptError as error:
            raise CheckpointError(f"the chat template does not write one message of a user: {error}") from error

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Write the tokens of a conversation, up to where the model's answer begins.

        What becomes of tools, JSON schemas of functions as OpenAI's `tools`, the template says.

        Raises:
            PromptError: the template refuses these messages.
        """
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self._source,
                add_generation_prompt=True,
                return_dict=False,
            )
        # What a template computes with messages of another shape than it expects may fail in any of these ways.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"the chat template refuses these messages ({reason})") from error
        return [int(token) for token in ids]


def read_template(file: Path) -> str:
    """A template from a file.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise CheckpointError(f"--template {file} is not UTF-8 text ({error}); convert it first") from error
    except OSError as error:
        raise CheckpointError(f"--template {file} cannot be read: {error.strerror or error}") from error

"""What `--draft` means: `exit:4`, `head:FOLDER`, `skip:attn=3,5;mlp=4;layers=7-9` or `none`, and `+vocab:FILE`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selfspec.errors import DraftConfigError

if TYPE_CHECKING:
    from selfspec.draft import Drafter


def parse_draft(text: str) -> Drafter | None:
    """The drafter that `text` names; None for plain decoding.

    Raises:
        DraftConfigError: it is not of the grammar.
    """
    # Imported when first needed: `--help` needs no torch.
    from selfspec.draft.named import parse_draft as parse

    try:
        return parse(text)
    except DraftConfigError as error:
        raise DraftConfigError(f"--{error}") from error

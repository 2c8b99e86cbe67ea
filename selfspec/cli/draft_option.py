"""What `--draft` means: `exit:4`, `head:FOLDER`, `skip:attn=3,5;mlp=4;layers=7-9`, `lookup`, `auto` or `none`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selfspec.errors import DraftConfigError

if TYPE_CHECKING:
    from selfspec.control.profile import Profile
    from selfspec.draft import Drafter


def parse_drafter(text: str) -> Drafter | None:
    """The drafter that `text` names; None for plain decoding.

    Raises:
        DraftConfigError: it is not of the grammar.
        ExitHeadError: what it names on disk cannot be used.
    """
    # Imported when first needed: `--help` needs no torch.
    from selfspec.draft.named import parse_draft as parse

    try:
        return parse(text)
    except DraftConfigError as error:
        raise DraftConfigError(f"--{error}") from error


def parse_draft(text: str) -> Drafter | Profile | str | None:
    """What `text` names, as `selfspec.wrap` takes it: a drafter, a profile, `auto` itself, None for plain decoding.

    Raises:
        DraftConfigError: it is not of the grammar.
        ExitHeadError, ProfileError: what it names on disk cannot be used.
    """
    from selfspec.draft.named import AUTO

    given = text.strip()
    if given == AUTO:
        # Which profile fits is known once there is a model.
        return AUTO
    if given.startswith(AUTO + ":"):
        from selfspec.control.profile import Profile

        return Profile.load(given.removeprefix(AUTO + ":"))
    return parse_drafter(text)

"""Asking the model hub once whether it has a checkpoint: its own clients ask six times, which takes half a minute."""

from __future__ import annotations

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from selfspec.errors import CheckpointError

_SECONDS = 10.0


def check_on_hub(name: str, file: str) -> None:
    """Refuse a name of which neither the cache nor the hub has a file; one request, of ten seconds at most.

    Raises:
        CheckpointError: saying what to do about it.
    """
    try:
        if try_to_load_from_cache(name, file) is None:
            get_hf_file_metadata(hf_hub_url(name, file), timeout=_SECONDS)
    # What a network raises depends on the library below.
    except Exception as error:
        raise CheckpointError(f"there is no folder {name!r} here, and {_reason(file, error)}") from error


def _reason(file: str, error: Exception) -> str:
    """Why the hub does not give it, and what to do."""
    match error:
        case HFValidationError():
            return "it is no name on the model hub; check the path"
        # A gated repository is a kind of one that is not found.
        case GatedRepoError():
            return "on the model hub it is gated: accept its terms at its page, and log in with `hf auth login`"
        case RepositoryNotFoundError():
            return (
                "the model hub has no public model of this name; check the spelling or, for a private one, your login"
            )
        case EntryNotFoundError():
            return f"on the model hub it has no {file}: is it a transformers checkpoint?"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE forbids asking the model hub; check the path, or unset it"
        case _:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            return f"the model hub cannot be reached ({said}); check the path or the network, or give a folder"

"""Say what a measurement was made with: versions, commit, machine."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch
import transformers

from selfspec.device import device_name, on_host
from selfspec.kernels import native
from selfspec.version import __version__


def versions() -> dict[str, str]:
    """Return the versions of what runs."""
    return {
        "selfspec": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Return the versions of what runs, the commit of selfspec's source, and what it runs on."""
    return {
        **versions(),
        "commit": commit(),
        "processor": device_name(torch.device("cpu")),
        "device": device.type if on_host(device) else device_name(device),
        "threads": torch.get_num_threads(),
        "cpu_kernels": native.available(),
    }


def commit() -> str | None:
    """Return the commit of selfspec's source, with a `+` if it was changed since; None without a git checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", "selfspec", "adapters")
    return head + "+" if changed else head


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

"""What a measurement was made with: versions, commit, machine."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from selfspec.cli.json_output import versions


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Versions of what runs, the commit of selfspec's source, and what it runs on."""
    return {
        **versions(),
        "commit": commit(),
        "processor": processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """The model of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str | None:
    """The commit of selfspec's source, with a `+` where it was changed since; None where it is no git checkout."""
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

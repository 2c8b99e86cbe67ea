"""What a measurement was made with: versions, commit, machine."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch
import transformers

from selfspec.device import backend, on_host
from selfspec.kernels import native
from selfspec.version import __version__


def versions() -> dict[str, str]:
    """Versions of what runs."""
    return {
        "selfspec": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Versions of what runs, the commit of selfspec's source, and what it runs on."""
    return {
        **versions(),
        "commit": commit(),
        "processor": device_name(torch.device("cpu")),
        "device": device.type if on_host(device) else device_name(device),
        "threads": torch.get_num_threads(),
        "cpu_kernels": native.load_kernels(),
    }


def device_name(device: torch.device) -> str:
    """What a device calls itself: the name of its processor."""
    if not on_host(device):
        ask = getattr(backend(device), "get_device_name", None)
        return device.type if ask is None else str(ask(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of selfspec's source, with a `+` where it was changed since; None where it is no git checkout."""
    folder = Path(__file__).resolve().parents[1]
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

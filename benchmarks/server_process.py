"""A server in a process of its own: started, waited for, watched and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class ServerProcess:
    """A server that answers."""

    process: subprocess.Popen[bytes]
    port: int

    def resident(self) -> int:
        """Bytes of its memory that are resident."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def metrics(self) -> dict[str, float]:
        """The values of /metrics, by name without labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as reply:
            lines = [line for line in reply.read().decode().splitlines() if line and not line.startswith("#")]
        return {line.split("{")[0].split()[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        """Tell it to stop."""
        self.process.send_signal(signal.SIGTERM)


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    command: Sequence[str], port: int, threads: int, log: Path, ready: str = "/health", seconds: float = 120
) -> Iterator[ServerProcess]:
    """Start a server, wait until it answers, and end it afterwards.

    Args:
        command: that starts it.
        port: that it listens on.
        threads: of its computations.
        log: what it writes.
        ready: a place that is answered once it is ready.
        seconds: to wait for that.

    Raises:
        RuntimeError: it ended, or does not answer in time.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written, env=environment)
    until = time.monotonic() + seconds
    try:
        while True:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{' '.join(command)} does not answer; see {log}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield ServerProcess(process, port)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

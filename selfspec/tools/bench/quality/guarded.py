"""Runs a program from standard input in a process that can do little: a script of its own, without selfspec.

The first line is a word to print if the program ends well, the second the seconds and bytes it may take. The process
gets limits of time, memory, files and processes, no network where the system can take it away, and a hook that refuses
sockets, other programs, native libraries, and files to write. This stops accidents. Python is no prison: a program
written to break out may.
"""

import contextlib
import ctypes
import os
import resource
import sys

_NEWUSER, _NEWNET = 0x10000000, 0x40000000
_REFUSED: tuple[str, ...] = (
    "socket.",
    "ctypes.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
)
_REFUSED += ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown")
_REFUSED += ("os.truncate", "os.kill", "os.putenv", "shutil.", "signal.", "pty.", "winreg.", "webbrowser.")
_MODULES = {"_ctypes", "_posixsubprocess", "_socket", "ctypes", "multiprocessing", "socket", "subprocess"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _limit(seconds: int, memory: int) -> None:
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
    }
    if hasattr(resource, "RLIMIT_NPROC"):
        limits[resource.RLIMIT_NPROC] = 0
    for kind, most in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def _leave_network() -> None:
    # Where the system does not allow it the hook below is what is left.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).unshare(_NEWUSER | _NEWNET)


def _refuse(event: str, arguments: tuple) -> None:  # type: ignore[type-arg]
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING
    imports = event == "import" and arguments[0].partition(".")[0] in _MODULES
    if writes or imports or event.startswith(_REFUSED):
        raise PermissionError(f"{event} is not allowed here")


def main() -> None:
    """Run what standard input holds."""
    word = sys.stdin.readline()
    seconds, memory = map(int, sys.stdin.readline().split())
    program = sys.stdin.read()
    answer = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    _leave_network()
    _limit(seconds, memory)
    # What is loaded could be imported unseen.
    for name in [name for name in sys.modules if name.partition(".")[0] in _MODULES]:
        del sys.modules[name]
    sys.addaudithook(_refuse)
    exec(compile(program, "answer", "exec"), {"__name__": "__main__"})
    os.write(answer, word.encode())


if __name__ == "__main__":
    main()

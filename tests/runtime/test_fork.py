"""A child forked while another thread records a pass decodes, and records passes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from selfspec.process import ProcessLock

CHILD = """
import os, signal, threading
import torch
torch.set_num_threads(1)
import selfspec
from helpers import tiny
from helpers.proving import ticking
from helpers.captures import StandIn, StandInRecorder
from selfspec.runtime.graph_cache import GraphCache

prompt, options = tiny.prompt(5), {"max_new_tokens": 12, "do_sample": False}
model = tiny.llama()
wanted = model.generate(prompt, **options).tolist()
spec = selfspec.wrap(model, runtime=StandIn(0, 8))
spec.programs = GraphCache(spec.runtime, ticking())
recording, forked = threading.Event(), threading.Event()
record = StandInRecorder.record

def held(*arguments):
    recording.set()
    forked.wait()
    return record(*arguments)

StandInRecorder.record = held
other = threading.Thread(target=spec.generate, args=(prompt,), kwargs=options)
other.start()
recording.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    StandInRecorder.record = record
    other = selfspec.wrap(model, runtime=StandIn(0, 8))
    other.programs = GraphCache(other.runtime, ticking())
    for each in (other, spec):
        assert each.generate(prompt, **options).sequences.tolist() == wanted
        assert each.programs.proved
    os._exit(0)
forked.set()
other.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert spec.generate(prompt, **options).sequences.tolist() == wanted
assert spec.programs.proved
"""


@pytest.mark.contract
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_child_forked_while_a_thread_records_decodes() -> None:
    tests = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_a_lock_lets_one_thread_in_at_a_time() -> None:
    lock = ProcessLock()
    seen: list[bool] = []
    with lock:
        other = threading.Thread(target=lambda: seen.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
    assert seen == [False]
    assert lock.acquire(blocking=False)
    lock.release()

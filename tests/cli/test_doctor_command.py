"""`selfspec doctor`: plain lines, or JSON."""

from __future__ import annotations

import json

import selfspec
from helpers.running import Invoke


def test_text(invoke: Invoke) -> None:
    ending = invoke("doctor")
    assert (ending.status, ending.stderr) == (0, "")
    assert ending.stdout.startswith(f"selfspec      {selfspec.__version__}")
    for said in ("versions      torch", "cores", "CPU kernels   ", "products      torch: ", "extras        "):
        assert said in ending.stdout
    assert ("What to change:" in ending.stdout) != ("Nothing here needs a change." in ending.stdout)


def test_json(invoke: Invoke) -> None:
    ending = invoke("doctor", "--output", "json")
    found = json.loads(ending.stdout)
    assert ending.status == 0
    assert found.keys() >= {"machine", "packages", "products", "findings", "versions"}
    assert found["products"]["torch"]["four_rows"] > 0

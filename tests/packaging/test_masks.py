"""Whoever has whole prompts says so by a mask: without one `transformers` takes the padding token for padding."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What hands on the prompt that it was given, with the mask or without it.
HANDS_ON = {Path("selfspec/saved/custom_generate.py"), Path("selfspec/decode/request.py")}
CALLS = ("generate", "stream")


def test_every_call_with_a_prompt_has_a_mask() -> None:
    files = [*(ROOT / "selfspec").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    calls = {f"{file.relative_to(ROOT)}:{call.lineno}": call for file in files for call in _calls(file)}
    assert len(calls) > 20
    assert not [place for place, call in calls.items() if not _has_mask(call)]


def _calls(file: Path) -> list[ast.Call]:
    if file.relative_to(ROOT) in HANDS_ON:
        return []
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    methods = [
        (node, node.func) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    # Another engine's prompts are texts, and a stream of a device is none of tokens.
    others = ("torch.cuda.stream", "self._backend.stream", "engine.generate")
    return [call for call, method in methods if method.attr in CALLS and ast.unparse(method) not in others]


def _has_mask(call: ast.Call) -> bool:
    """Whether it is an argument; where ids and mask come as a whole, as keywords, there is no first one either."""
    return len(call.args) != 1 or any(each.arg == "attention_mask" for each in call.keywords)

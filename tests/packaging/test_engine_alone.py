"""The engine stands alone: it needs the libraries that a model runs with, and none of a tool's."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# triton comes with torch where it runs; huggingface_hub and tokenizers with transformers.
ALLOWED = {"selfspec", "torch", "transformers", "safetensors", "numpy", "huggingface_hub", "tokenizers", "triton"}

_GENERATES = """
import sys
import torch, transformers, safetensors.torch, huggingface_hub
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()
prompt = torch.tensor([[1, 2, 3]])
model.generate(prompt, max_new_tokens=4, do_sample=False)
before = set(sys.modules)
import selfspec
selfspec.wrap(model, draft="exit:1").generate(prompt, max_new_tokens=4)
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


def file_of(module: str) -> Path | None:
    place = ROOT / module.replace(".", "/")
    found = [file for file in (place / "__init__.py", place.with_suffix(".py")) if file.exists()]
    return found[0] if found else None


def imported(module: str) -> Iterator[str]:
    """All modules that a file imports when it runs, and the names in them, which may be modules, too."""
    file = file_of(module)
    assert file is not None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from (f"{node.module}.{each.name}" for each in node.names)


def outside(starts: set[str]) -> dict[str, str]:
    """The packages beside selfspec and Python's own that modules need, each with a module that imports it."""
    found, seen, waiting = {}, set(), list(starts)
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for name in imported(module):
            parts = name.split(".")
            if parts[0] == "selfspec":
                above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
                waiting += {each for each in above if file_of(each)} - seen
            elif parts[0] not in sys.stdlib_module_names:
                found[parts[0]] = module
    return found


def test_the_engine_imports_what_a_model_runs_with() -> None:
    adapters = {f"selfspec.adapters.{file.stem}" for file in (ROOT / "adapters").glob("[!_]*.py")}
    found = outside({"selfspec.api", *adapters})
    assert {"torch", "transformers"} <= set(found)
    assert {package: module for package, module in found.items() if package not in ALLOWED} == {}


def test_the_command_line_needs_more() -> None:
    assert {"typer", "rich", "pydantic", "scipy"} <= set(outside({"selfspec.cli.app", "selfspec.cli.bench"}))


def test_generating_loads_what_a_model_runs_with() -> None:
    ran = subprocess.run([sys.executable, "-c", _GENERATES], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) - ALLOWED - set(sys.stdlib_module_names) == set()

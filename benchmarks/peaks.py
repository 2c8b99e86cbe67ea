"""Compare the peak memory of decoding over a packed folder, by its upper plane, with that of transformers in bfloat16.

    selfspec pack MODEL --to MODEL-planes
    python benchmarks/peaks.py MODEL... --texts heldout.jsonl --name peaks

Linux alone. Each figure is the most resident memory that a process of its own has had, loading included.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from harness import HERE, JsonWorker, keep, prompts_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec
from selfspec.measure.environment import environment
from selfspec.process import status_bytes
from selfspec.tools.lab.report import markdown_table


def main() -> None:
    """Run the benchmark, or in a worker decode once and print the peak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders of checkpoints in bfloat16, each packed to NAME-planes")
    parser.add_argument("--texts", required=True, metavar="FILE[#FIELD=VALUE]")
    parser.add_argument("--context", type=int, default=1000, help="tokens of the prompt")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--arm", choices=("stock", "packed"), help="of a worker")
    parser.add_argument("--name", default="peaks")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.arm:
        _decode(options)
        return
    told: list[dict[str, Any]] = []
    for model in options.models:
        peaks = {arm: _peak(options, model, arm) for arm in ("stock", "packed")}
        told.append({"model": Path(model).name, **peaks, "ratio": peaks["packed"] / peaks["stock"]})
    rows = [[each["model"], *(f"{each[arm] >> 20}" for arm in peaks), f"{each['ratio']:.2f}"] for each in told]
    page = markdown_table(["", "model.generate, MiB", "planes, upper, MiB", "ratio"], rows) + "\n"
    asked = {"context": options.context, "max_new_tokens": options.max_new_tokens}
    keep(options.name, {"peaks": told, **asked, "environment": environment(torch.device("cpu"))}, page)
    print(page)


def _peak(options: argparse.Namespace, model: str, arm: str) -> int:
    command: list[object] = [sys.executable, HERE / "peaks.py", model, "--arm", arm]
    for name in ("texts", "context", "max_new_tokens", "threads"):
        command += ["--" + name.replace("_", "-"), getattr(options, name)]
    return int(JsonWorker(command).read()["peak"])


def _decode(options: argparse.Namespace) -> None:
    (model,) = options.models
    (ids,) = prompts_of(options.texts, AutoTokenizer.from_pretrained(model), 1, options.context)
    limits: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "eos_token_id": None, "do_sample": False}
    if options.arm == "stock":
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        loaded.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **limits)
    else:
        spec = selfspec.load(f"{model}-planes", draft="upper", device="cpu")
        spec.generate(ids, torch.ones_like(ids), **limits)
    print(f'{{"peak": {status_bytes("VmHWM")}}}', flush=True)


if __name__ == "__main__":
    main()

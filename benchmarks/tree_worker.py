"""Decodes by the selfspec of another tree what it is asked, a line of JSON each; `decoding.py --tree` starts it.

It uses nothing but torch, transformers and the public API, so that most commits can run it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import selfspec


def main() -> None:
    """Serve until standard input ends."""
    tree, model_folder, dtype, threads = sys.argv[1:]
    assert Path(tree).resolve() in Path(selfspec.__file__).resolve().parents, f"selfspec is {selfspec.__file__}"
    torch.set_num_threads(int(threads))
    plain = selfspec.wrap(AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype)).eval())
    specs: dict[tuple[str, int], selfspec.SelfSpeculative] = {}
    for line in sys.stdin:
        job = json.loads(line)
        key = job["draft"], job["length"]
        if key not in specs:
            specs[key] = plain.drafting(job["draft"], job["length"])
        print(json.dumps(decoded(specs[key], job)), flush=True)


def decoded(spec: selfspec.SelfSpeculative, job: dict[str, Any]) -> dict[str, Any]:
    """Do a job: `ids` of a prompt, `tokens` to add, `temperature` (0: greedy), `seed`, `draft` and its `length`."""
    sampling = {"do_sample": True, "temperature": job["temperature"], "top_k": 0, "seed": job["seed"]}
    options: dict[str, Any] = sampling if job["temperature"] else {"do_sample": False}
    ids = torch.tensor([job["ids"]])
    spec.forget()
    text: list[int] = []
    started = begun = time.perf_counter()
    first = passes = 0
    for chunk in spec.stream(ids, torch.ones_like(ids), max_new_tokens=job["tokens"], eos_token_id=None, **options):
        text += chunk.rows[0].tokens
        if not first:
            first, begun = len(text), time.perf_counter()
        passes += 1
    ended = time.perf_counter()
    return {"text": text, "seconds": ended - begun, "whole": ended - started, "first": first, "passes": passes}


if __name__ == "__main__":
    main()

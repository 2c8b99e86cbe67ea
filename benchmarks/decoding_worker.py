"""Decodes what it is asked on standard input, a line of JSON each, and answers how long that took.

`two_commits.py` runs it over two trees, so it uses nothing but torch, transformers and the public API.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import selfspec


def main() -> None:
    """Serve until standard input ends."""
    tree, model_folder, threads = sys.argv[1:]
    assert Path(tree).resolve() in Path(selfspec.__file__).resolve().parents, f"selfspec is {selfspec.__file__}"
    torch.set_num_threads(int(threads))
    plain = selfspec.wrap(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval())
    specs: dict[tuple[str, int], selfspec.SelfSpeculative] = {}
    for line in sys.stdin:
        job = json.loads(line)
        key = job["draft"], job["length"]
        if key not in specs:
            specs[key] = plain.drafting(job["draft"], job["length"] or None)
        print(json.dumps(decoded(specs[key], job)), flush=True)


def decoded(spec: selfspec.SelfSpeculative, job: dict[str, Any]) -> dict[str, Any]:
    """Do a job: `ids` and `mask` of a left-padded batch, `tokens` to add, `temperature` (0: greedy), `seed`."""
    sampling = {"do_sample": True, "temperature": job["temperature"], "top_k": 0, "seed": job["seed"]}
    options: dict[str, Any] = sampling if job["temperature"] else {"do_sample": False}
    ids, mask = torch.tensor(job["ids"]), torch.tensor(job["mask"])
    started = time.perf_counter()
    out = spec.generate(ids, mask, max_new_tokens=job["tokens"], eos_token_id=None, pad_token_id=0, **options)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "tokens": out.stats.new_tokens,
        "rounds": out.stats.rounds,
        "row rounds": out.stats.row_rounds,
        "verify seconds": out.stats.seconds["verify"],
        "text": out.sequences[:, ids.shape[1] :].tolist(),
        "peak": peak_bytes(),
    }


def peak_bytes() -> int:
    """Return the most memory that this process has held so far, by Linux; 0 elsewhere."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(found[1]) if found else 0


if __name__ == "__main__":
    main()

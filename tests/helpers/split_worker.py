"""What each of two processes does with a model that is split over them: run by torchrun, from tests/processes.

    torchrun --nproc-per-node 2 split_worker.py JOB.json ANSWER.json

A job has `folders` of checkpoints by name; the answer what each gave, on rank 0 and on all others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

# The folder above is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import selfspec
from helpers import tiny
from selfspec.control import FixedLength
from selfspec.tools.export import export_checkpoint
from selfspec.tools.verify.settings import Settings
from selfspec.tools.verify.verification import verify

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SAMPLED: dict[str, Any] = {**GREEDY, "do_sample": True, "temperature": 0.8, "seed": 5}
TREE = FixedLength(3, nodes=6)


def answers(model: Any) -> dict[str, Any]:
    one, ragged = tiny.prompt(9), torch.cat([tiny.prompt(9), tiny.prompt(9, seed=1)])
    mask = torch.ones_like(ragged)
    mask[1, :4] = 0
    found: dict[str, Any] = {}
    for name, draft, length, options in (
        ("plain", None, None, GREEDY),
        ("exit", "exit:2", 3, GREEDY),
        ("exit, as long as it pays", "exit:2", None, GREEDY),
        ("skip", "skip:attn=1;mlp=2", 3, GREEDY),
        ("layers", "skip:layers=1", 3, GREEDY),
        ("int8", "int8", 3, GREEDY),
        ("int8+exit", "int8+exit:3", 3, GREEDY),
        ("look-up", "lookup+exit:2", 3, GREEDY),
        ("tree", "exit:2", TREE, GREEDY),
        ("recycled tree", "recycle", TREE, GREEDY),
        ("sampled", "exit:2", 3, SAMPLED),
        ("sampled tree", "exit:2", TREE, SAMPLED),
        ("coupled", "exit:2", 3, {**SAMPLED, "accept": "coupled"}),
    ):
        spec = selfspec.wrap(model, draft, draft_length=length)
        out = spec.generate(one, **options)
        both = spec.generate(ragged, mask, **options)
        found[name] = [out.sequences.tolist(), both.sequences.tolist()]
        if name in ("exit", "skip", "layers", "tree", "sampled"):
            found[f"{name}, accepted"] = out.stats.accepted
    return found


def refusals(model: Any) -> dict[str, str]:
    draft, rank = selfspec.drafts.EarlyExit(2), torch.distributed.get_rank()
    tried: dict[str, Callable[[], object]] = {
        "by_clock": lambda: selfspec.wrap(model, draft).generate(tiny.prompt(5), **GREEDY, max_time=3.0),
        "differently": lambda: selfspec.wrap(model, f"exit:{1 + rank}"),
        "few_rows": lambda: selfspec.wrap(model, selfspec.drafts.ReducedVocabulary(draft, (1, 2, 3))),
        "engine": lambda: selfspec.Engine(selfspec.wrap(model, draft)),
        "export": lambda: export_checkpoint(model, None, draft, "nowhere"),
    }
    said = dict.fromkeys(tried, "")
    for name, attempt in tried.items():
        try:
            attempt()
        except selfspec.errors.SelfSpecError as error:
            said[name] = str(error)
    return said


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, Any] = {}
    for name, folder in job["folders"].items():
        # Experts of other kinds have no float64.
        kernels = {"experts_implementation": "eager"} if name == "mixtral" else {}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, tp_plan="auto", **kernels).eval()
        rank = torch.distributed.get_rank()
        answer = answers(model)
        torch.manual_seed(rank)
        drawn = selfspec.wrap(model, "exit:2").generate(tiny.prompt(9), **{**SAMPLED, "seed": None}).sequences.tolist()
        report = verify(
            model, [tiny.prompt(6)], [selfspec.drafts.EarlyExit(2)], Settings(max_new_tokens=8, samples=200)
        )
        whole = sum(weight.numel() for weight in model.parameters())
        here = sum(getattr(weight, "to_local", lambda weight=weight: weight)().numel() for weight in model.parameters())
        answer |= {"drawn": drawn, "verified": report.exact, "split": here / whole}
        if name == job["refused"]:
            answer["refusals"] = refusals(model)
        gathered: list[Any] = [None, None]
        torch.distributed.all_gather_object(gathered, answer)
        found[name] = gathered
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

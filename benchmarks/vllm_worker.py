"""Decodes greedily by vLLM what it is asked in a file, and writes down the texts and what became of drafts.

    python benchmarks/vllm_worker.py JOB.json ANSWER.json

The tests of exports and `other_engines.py` run it, with whatever Python has vLLM. A job has `model`,
`speculative_config` (or null), `prompts` (token ids) and `tokens`; an answer `texts`, and `rounds`, `drafted` and
`accepted`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    """Do the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(
        model=job["model"],
        dtype="float32",
        speculative_config=job["speculative_config"],
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=False,
    )
    texts = engine.generate(
        [{"prompt_token_ids": ids} for ids in job["prompts"]],
        SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True),
    )
    counts = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    answer = {
        "texts": [list(text.outputs[0].token_ids) for text in texts],
        "rounds": counts.get("vllm:spec_decode_num_drafts", 0),
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()

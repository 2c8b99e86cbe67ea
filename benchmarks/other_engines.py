"""Measure how often an exported draft is accepted: by selfspec without the export, by `transformers`, and by vLLM.

    python benchmarks/other_engines.py MODEL --draft exit:8 --texts 'heldout.jsonl#kind=code' --vllm PYTHON

Greedy text in float32, so that all give the same. selfspec and `transformers` draft for one text at a time, vLLM for
all together. Accepted tokens are counted, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import HERE, keep, prompts_of
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator

import selfspec
from selfspec.draft.registry import parse_draft
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.environment import environment
from selfspec.tools.export import export_checkpoint
from selfspec.tools.lab.report import markdown_table


@dataclass(frozen=True)
class Count:
    """Counts passes with a draft and accepted draft tokens; `equal`: all texts are plain decoding's."""

    rounds: int
    accepted: int
    equal: bool


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--texts", required=True, metavar="FILE[#FIELD=VALUE]")
    parser.add_argument("--vllm", help="Python of the environment that has vLLM")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--name", default="other_engines", help="of the results")
    options = parser.parse_args()
    checkpoint = load_checkpoint(str(options.model), "float32", "cpu")
    model = checkpoint.model
    prompts = prompts_of(options.texts, checkpoint.tokenizer, options.prompts, options.context)
    greedy = {"max_new_tokens": options.max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = [_new(selfspec.wrap(model).generate(ids, torch.ones_like(ids), **greedy).sequences, ids) for ids in prompts]
    counts: dict[str, Count] = {}
    for name in (options.draft, "lookup"):
        spec = selfspec.wrap(model, name, draft_length=options.draft_length)
        outs = [spec.generate(ids, torch.ones_like(ids), **greedy) for ids in prompts]
        equal = [_new(out.sequences, ids) for out, ids in zip(outs, prompts, strict=True)] == plain
        # Rounds in which a look-up finds nothing have no draft.
        rounds = sum((out.stats.judged_per_depth or [0])[0] for out in outs)
        counts[f"selfspec {name}"] = Count(rounds, sum(out.stats.accepted for out in outs), equal)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "draft"
        export_checkpoint(model, checkpoint.tokenizer, parse_draft(options.draft), exported)
        draft = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
        counts[f"transformers {options.draft}"] = _by_transformers(model, draft, prompts, options.draft_length, plain)
        if options.vllm:
            way = {"method": "draft_model", "model": str(exported), "num_speculative_tokens": options.draft_length}
            job = {
                "model": str(options.model.resolve()),
                "speculative_config": way,
                "prompts": [ids[0].tolist() for ids in prompts],
                "tokens": options.max_new_tokens,
            }
            counts[f"vLLM {options.draft}"] = _by_vllm(options.vllm, job, Path(folder), plain)
    shown = {name: value for name, value in vars(options).items() if name not in ("model", "texts", "vllm")}
    record = {
        "model": options.model.name,
        "settings": shown,
        "environment": environment(torch.device("cpu")),
        "counts": {name: asdict(count) for name, count in counts.items()},
    }
    keep(options.name, record, _report(record))
    print(_report(record))


def _new(sequences: Tensor, ids: Tensor) -> list[int]:
    found: list[int] = sequences[0, ids.shape[1] :].tolist()
    return found


@dataclass(frozen=True)
class AssistedText:
    """Prompt and text, `[1, tokens]`, and the tokens drafted and accepted in each round, in order."""

    ids: Tensor
    drafted: list[int]
    accepted: list[int]


def assisted(model: PreTrainedModel, draft: PreTrainedModel, ids: Tensor, length: int, **options: Any) -> AssistedText:
    """Generate from a prompt, `[1, tokens]`, with an assistant that always drafts `length` tokens."""
    drafted, accepted = list[int](), list[int]()
    stock = AssistedCandidateGenerator.update_candidate_strategy

    def counted(self: Any, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        drafted.append(scores.shape[1] - 1)
        accepted.append(int(num_matches))
        stock(self, input_ids, scores, num_matches)

    draft.generation_config.num_assistant_tokens = length
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0
    AssistedCandidateGenerator.update_candidate_strategy = counted
    try:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **options)
    finally:
        AssistedCandidateGenerator.update_candidate_strategy = stock
    return AssistedText(out, drafted, accepted)


def _by_transformers(
    model: PreTrainedModel, draft: PreTrainedModel, prompts: list[Tensor], length: int, plain: list[list[int]]
) -> Count:
    settings = {"max_new_tokens": len(plain[0]), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = [assisted(model, draft, ids, length, **settings) for ids in prompts]
    drafted = sum(each > 0 for text in texts for each in text.drafted)
    equal = [_new(text.ids, ids) for text, ids in zip(texts, prompts, strict=True)] == plain
    return Count(drafted, sum(sum(text.accepted) for text in texts), equal)


def _by_vllm(python: str, job: dict[str, Any], folder: Path, plain: list[list[int]]) -> Count:
    asked, answer = folder / "job.json", folder / "answer.json"
    asked.write_text(json.dumps(job))
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parent)}
    command = [python, str(HERE / "vllm_worker.py"), str(asked), str(answer)]
    subprocess.run(command, env={**os.environ, **settings}, check=True)
    found = json.loads(answer.read_text())
    return Count(int(found["rounds"]), int(found["accepted"]), found["texts"] == plain)


def _report(record: dict[str, Any]) -> str:
    settings, rows = record["settings"], []
    for name, count in record["counts"].items():
        rate, equal = count["accepted"] / max(1, count["rounds"]), "yes" if count["equal"] else "no"
        rows.append([name, str(count["rounds"]), str(count["accepted"]), f"{rate:.3f}", equal])
    heads = ("", "rounds with a draft", "draft tokens accepted", "accepted a round", "text is plain decoding's")
    said = (
        f"{record['model']}, float32, greedy, {settings['prompts']} prompts of {settings['context']} tokens, "
        f"{settings['max_new_tokens']} new ones, drafts of {settings['draft_length']}."
    )
    return f"# An exported draft in other engines\n\n{said}\n\n{markdown_table(heads, rows)}\n"


if __name__ == "__main__":
    main()

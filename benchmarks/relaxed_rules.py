"""Score relaxed acceptance rules by lm-eval: how many answers are right, beside the tokens a pass that a rule gives.

    python benchmarks/relaxed_rules.py MODEL --draft skip:layers=12,14 --to FOLDER
    selfspec plot FOLDER/relaxed_rules.csv --x mean_accepted_length --y exact_match --by rule --to quality.pdf

Questions and answers are lines of `--questions`, asked by the chat template; an answer is right where it names the
expected one. Decoding is greedy. Needs lm-eval and datasets.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
import torch
from datasets import Dataset
from harness import HERE
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import selfspec
from selfspec.decode.output import Stats
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.environment import environment
from selfspec.measure.estimate import Estimate
from selfspec.measure.stock import bare
from selfspec.tools.lab.table import lengths, rates, spread

QUESTIONS = HERE / "prompts" / "questions.jsonl"
RULES = (
    "token",
    "relaxed-top-k:top_k=3,tolerance=1",
    "relaxed-top-k:top_k=5,tolerance=2",
    "relaxed-top-k:top_k=10,tolerance=4",
)
_ANSWER = 24


class Drafting(HFLM):
    """Lets lm-eval generate by a wrapped model, and keeps the counts of each answer."""

    def __init__(self, spec: selfspec.SelfSpeculative, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(spec.model, tokenizer=tokenizer, batch_size=1, device="cpu")
        self._spec, self.counts = spec, list[Stats]()

    def _model_generate(self, context: Tensor, max_length: int, stop: Sequence[str], **options: Any) -> Tensor:
        mask, new = options.pop("attention_mask", None), max_length - context.shape[1]
        output = self._spec.generate(context, mask, max_new_tokens=new, do_sample=False)
        self.counts.append(output.stats)
        return output.sequences


def scored(lm: Drafting, questions: Path) -> list[bool]:
    """Return whether each answer is right."""
    task = ConfigurableTask(
        config={
            "task": "questions",
            "custom_dataset": lambda **_: {"test": Dataset.from_json(str(questions))},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": _ANSWER, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
    )
    found = evaluate(lm, {"tasks": {"questions": task}}, bootstrap_iters=None, apply_chat_template=True)
    samples = sorted(found["samples"]["questions"], key=lambda each: each["doc_id"])
    return [each["target"].lower() in each["filtered_resps"][0].lower() for each in samples]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--accept", action="append", help=f"rule; may be repeated. Default: {', '.join(RULES)}")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, metavar="FILE")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkpoint = load_checkpoint(options.model, "float32", "cpu")
    lines = []
    for rule in options.accept or RULES:
        spec = selfspec.wrap(bare(checkpoint.model), options.draft, accept=rule, draft_length=options.draft_length)
        lm = Drafting(spec, checkpoint.tokenizer)
        right, counts = scored(lm, options.questions), lm.counts
        lines.append(
            {
                "draft": options.draft,
                "rule": rule,
                **spread("exact_match", Estimate.of_share(sum(right), len(right))),
                **lengths([each.new_tokens for each in counts], [each.row_rounds for each in counts]),
                **rates([each.judged_per_depth for each in counts], [each.accepted_per_depth for each in counts]),
                **environment(checkpoint.model.device),
            }
        )
    options.to.mkdir(parents=True, exist_ok=True)
    table = pandas.DataFrame(lines)
    table.to_csv(options.to / "relaxed_rules.csv", index=False, float_format="%.6g")
    print(table[["rule", "n", "exact_match", "mean_accepted_length", "acceptance_rate"]].to_string(index=False))


if __name__ == "__main__":
    main()

"""Plain decoding, transformers' own self-speculation and selfspec's, side by side on one checkpoint, in turns.

    python benchmarks/side_by_side.py                        the embedded checkpoint
    python benchmarks/side_by_side.py --model FOLDER ...     any other

Every arm decodes the same prompts. Greedily, the run fails if the tokens of one differ from `model.generate`'s. Times
are wall clock of whole calls, prefill included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from arms import Arm, measure, new_tokens, save, wrapped
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from selfspec.checkpoint import load_checkpoint
from selfspec.cli.draft_option import parse_draft
from selfspec.demo import PROMPTS, checkpoint_folder

_PROMPT = 48


def stock(model: PreTrainedModel, options: Mapping[str, Any], name: str = "", **assistant: Any) -> Arm:
    """`model.generate`, with or without help of its own. Sampling is seeded by the repeat."""

    def run(ids: Tensor, repeat: int) -> list[list[int]]:
        torch.manual_seed(repeat)
        mask = torch.ones_like(ids)
        return new_tokens(model.generate(ids, attention_mask=mask, **options, **assistant), ids)

    return Arm(f"model.generate{name}", run)


def stock_early_exit(model: PreTrainedModel, options: Mapping[str, Any], layer: int, length: int) -> Arm:
    """`model.generate` with its own early exit as the assistant."""
    arm = stock(model, options, f", assistant_early_exit={layer}", assistant_early_exit=layer)
    run = arm.run

    def run_with_length(ids: Tensor, repeat: int) -> list[list[int]]:
        # transformers reads the draft length from the model's own generation config only.
        config = model.generation_config
        kept = config.num_assistant_tokens, config.num_assistant_tokens_schedule
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = length, "constant"
        try:
            return run(ids, repeat)
        finally:
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = kept

    arm.run = run_with_length
    return arm


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; the embedded one if not given")
    parser.add_argument("--held-out", type=Path, help="JSONL with `text` and `kind`; prompts begin its code")
    parser.add_argument("--documents", type=int, default=8, help="how many of them")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exit", type=int, default=4, help="exit layer of transformers' own early exit")
    parser.add_argument("--draft-length", type=int, default=3, help="of transformers' own early exit")
    parser.add_argument("--drafts", nargs="*", default=["exit:2", "exit:4", "lookup", "lookup+exit:2", "lookup+exit:4"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="side_by_side_embedded", help="name of the result files")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    checkpoint = load_checkpoint(options.model or str(checkpoint_folder()), dtype=options.dtype, device="cpu")
    model = checkpoint.model
    prompts = [checkpoint.tokenizer(text, return_tensors="pt").input_ids[:, :_PROMPT] for text in _texts(options)]
    sampled = {"temperature": options.temperature, "top_k": 0} if options.temperature else {}
    # All texts have one length, so that all arms do the same work.
    decoding = {
        "do_sample": bool(sampled),
        "max_new_tokens": options.max_new_tokens,
        "eos_token_id": None,
        "pad_token_id": 0,
        **sampled,
    }
    arms = [
        stock(model, decoding),
        stock(model, decoding, ", prompt look-up", prompt_lookup_num_tokens=10),
        stock_early_exit(model, decoding, options.exit, options.draft_length),
        wrapped("selfspec, plain", selfspec.wrap(model), decoding),
    ]
    drafting = {draft: selfspec.wrap(model, parse_draft(draft)) for draft in options.drafts}
    arms += [wrapped(f"selfspec, {draft}", spec, decoding) for draft, spec in drafting.items()]
    measure(arms, prompts, options.repeats)
    settings = vars(options) | {"model": _name(options.model), "held_out": _name(options.held_out)}
    save(options.name, settings, arms)
    differing = [arm.name for arm in arms if not arm.equal]
    if differing and not sampled:
        sys.exit("tokens differ: " + ", ".join(differing))


def _texts(options: argparse.Namespace) -> list[str]:
    if options.held_out is None:
        return list(PROMPTS)
    documents = map(json.loads, options.held_out.read_text(encoding="utf-8").splitlines())
    code = [document["text"] for document in documents if document["kind"] == "code"]
    return code[:: max(1, len(code) // options.documents)][: options.documents]


def _name(place: object) -> str:
    return "embedded" if place is None else Path(str(place)).name


if __name__ == "__main__":
    main()

"""The lossless acceptance rules against each other: tokens per round and speed at temperatures above 0, in turns.

    python benchmarks/rules.py                                        the embedded checkpoint
    python benchmarks/rules.py --model FOLDER --draft exit:8 ...      any other

Plain decoding is the first arm. Four rows at a time, seeded by the repeat; times are wall clock of whole calls.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from arms import measure, save, wrapped

import selfspec
from selfspec.checkpoint import load_checkpoint
from selfspec.cli.draft_option import parse_draft
from selfspec.demo import PROMPTS, checkpoint_folder


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; the embedded one if not given")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft", default="exit:4")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="rules_embedded", help="name of the result files")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    checkpoint = load_checkpoint(options.model or str(checkpoint_folder()), dtype=options.dtype, device="cpu")
    prompts = [
        checkpoint.tokenizer(prompt, return_tensors="pt").input_ids.expand(4, -1).contiguous() for prompt in PROMPTS
    ]
    sampled = {
        "do_sample": True,
        "temperature": options.temperature,
        "top_k": None,
        "max_new_tokens": options.max_new_tokens,
    }
    draft = parse_draft(options.draft)
    arms = [wrapped("plain", selfspec.wrap(checkpoint.model), sampled)] + [
        wrapped(
            f"{options.draft}, {rule}",
            selfspec.wrap(checkpoint.model, draft, draft_length=options.draft_length, accept=rule),
            sampled,
        )
        for rule in ("token", "block", "coupled")
    ]
    measure(arms, prompts, options.repeats)
    save(options.name, vars(options) | {"model": Path(options.model).name if options.model else "embedded"}, arms)


if __name__ == "__main__":
    main()

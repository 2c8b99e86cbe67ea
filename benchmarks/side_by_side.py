"""Plain decoding, transformers' own self-speculation and selfspec's, side by side on one checkpoint, in turns.

    python benchmarks/side_by_side.py                        the embedded checkpoint
    python benchmarks/side_by_side.py --model FOLDER ...     any other

Every arm decodes the same prompts greedily; the run fails if the tokens of one differ from `model.generate`'s. Times
are wall clock of whole calls, prefill included.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import transformers
from arms import Arm, measure, new_tokens, save, wrapped
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from selfspec.checkpoint import load_checkpoint
from selfspec.cli.draft_option import parse_draft
from selfspec.demo import PROMPTS, checkpoint_folder


def stock(model: PreTrainedModel, new: int) -> Arm:
    """`model.generate`."""
    return Arm(
        "model.generate", lambda ids, _: new_tokens(model.generate(ids, do_sample=False, max_new_tokens=new), ids)
    )


def stock_early_exit(model: PreTrainedModel, new: int, layer: int, length: int) -> Arm:
    """`model.generate` with its own early exit as the assistant."""

    def run(ids: Tensor, _repeat: int) -> list[list[int]]:
        # transformers reads the draft length from the model's own generation config only.
        config = model.generation_config
        kept = config.num_assistant_tokens, config.num_assistant_tokens_schedule
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = length, "constant"
        try:
            sequences = model.generate(ids, do_sample=False, max_new_tokens=new, assistant_early_exit=layer)
        finally:
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = kept
        return new_tokens(sequences, ids)

    return Arm(f"model.generate, assistant_early_exit={layer}", run)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; the embedded one if not given")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exit", type=int, default=4, help="exit layer, of both early exits")
    parser.add_argument("--skip", default="skip:attn=0", help="a skip set, as the command line writes it")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="side_by_side_embedded", help="name of the result files")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    checkpoint = load_checkpoint(options.model or str(checkpoint_folder()), dtype=options.dtype, device="cpu")
    model, new, length = checkpoint.model, options.max_new_tokens, options.draft_length
    prompts = [checkpoint.tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    greedy = {"do_sample": False, "max_new_tokens": new}
    exit_layer = selfspec.EarlyExit(options.exit)
    arms = [
        stock(model, new),
        stock_early_exit(model, new, options.exit, length),
        wrapped("selfspec, plain", selfspec.wrap(model), greedy),
        wrapped(f"selfspec, exit:{options.exit}", selfspec.wrap(model, exit_layer, draft_length=length), greedy),
        wrapped(
            f"selfspec, {options.skip}", selfspec.wrap(model, parse_draft(options.skip), draft_length=length), greedy
        ),
    ]
    measure(arms, prompts, options.repeats)
    save(options.name, vars(options) | {"model": Path(options.model).name if options.model else "embedded"}, arms)
    if not all(arm.equal for arm in arms):
        sys.exit("tokens differ: " + ", ".join(arm.name for arm in arms if not arm.equal))


if __name__ == "__main__":
    main()

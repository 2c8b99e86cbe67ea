"""What it costs to see that the model is still the one whose passes were recorded, beside a short generation.

    python benchmarks/model_state.py --threads 2

Greedy plain decoding of the embedded model, once its programs are made. Medians, with quartiles, in milliseconds.
"""

from __future__ import annotations

import argparse

import torch
from timed import seconds_of, spread
from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec
from selfspec.measure.embedded import PROMPTS, checkpoint_folder
from selfspec.runtime.model_state import ModelState

_WARM_UPS = 4


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    prompt = AutoTokenizer.from_pretrained(checkpoint_folder())(PROMPTS[0], return_tensors="pt").input_ids
    spec = selfspec.wrap(model)

    def generate() -> None:
        spec.generate(prompt, torch.ones_like(prompt), max_new_tokens=options.new_tokens, do_sample=False)

    for _ in range(_WARM_UPS):
        generate()
    state = ModelState(model)
    # In turns, so that both see the same moments of a busy machine.
    pairs = [(seconds_of(state.holds), seconds_of(generate)) for _ in range(options.repeats)]
    print(f"looking: {spread([1000 * looking for looking, _ in pairs])} ms")
    print(f"generating {options.new_tokens} tokens: {spread([1000 * whole for _, whole in pairs])} ms")
    print(f"share: {spread([100 * looking / whole for looking, whole in pairs])} %")


if __name__ == "__main__":
    main()

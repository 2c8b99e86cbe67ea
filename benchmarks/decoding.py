"""Ways to decode one checkpoint side by side, in turns, by the lab: those that `selfspec bench` has no arm for.

    python benchmarks/decoding.py MODEL --texts 'heldout.jsonl#kind=code' --draft int8 --llama PYTHON --gguf F32.gguf
    python benchmarks/decoding.py FILE.gguf --texts heldout.jsonl --draft int8 --llama PYTHON
    python benchmarks/decoding.py MODEL --dtype bfloat16 --texts heldout.jsonl --draft int8 --planes upper lookup+upper
    python benchmarks/decoding.py MODEL --texts heldout.jsonl --draft int8 int8+window:512 --behind --context 32000
    python benchmarks/decoding.py demo --texts heldout.jsonl --draft exit:4 --length 1 2 3 4 5 6 --prompts 60 --costs

`--llama` is the Python of an environment with llama-cpp-python, which then decodes the files of `--gguf`, as
`convert_hf_to_gguf.py` of llama.cpp makes them, or the model, if it is such a file. `--planes` decodes over the same
weights in planes too, without a draft and with these. `--length` sets fixed draft lengths beside the default control.
Beside a quantised checkpoint `model.generate` runs it by its own library, which has to be installed. With `--behind`
the prompt is read once, and every way goes on from its keys and values: `selfspec bench --context` reads it each time,
as users do, which takes hours at tens of thousands of tokens. `benchmarks/widen.py` makes larger models of a small one.
"""

from __future__ import annotations

import argparse
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from harness import WorkerArm, compare, prompts_of
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import selfspec
from selfspec.measure.checkpoint import load_checkpoint
from selfspec.measure.embedded import model_place
from selfspec.measure.stock import bare
from selfspec.model.checkpoint import load_tokenizer
from selfspec.tools.lab.arms import Arm, ArmSpec, Cell, OwnArm, Prompts, make_arm
from selfspec.tools.lab.generations import Part


@dataclass
class Behind:
    """A wrapper that goes on from the keys and values of a prompt that was read once; each call writes to a copy."""

    spec: selfspec.SelfSpeculative
    cache: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.spec, name)

    def stream(self, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
        return self.spec.stream(ids, mask, cache=deepcopy(self.cache), **options)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint, a GGUF file, or demo")
    parser.add_argument("--texts", required=True, metavar="FILE[#FIELD=VALUE]")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--draft", nargs="+", default=[], help="over the weights as they are")
    parser.add_argument("--length", type=int, nargs="+", default=[], help="of these drafts, fixed")
    parser.add_argument("--planes", nargs="*", metavar="DRAFT", help="over the same weights in planes")
    parser.add_argument("--llama", metavar="PYTHON", help="of the environment that has llama.cpp")
    parser.add_argument("--gguf", nargs="+", type=Path, default=[], help="files of the same weights, for llama.cpp")
    parser.add_argument("--behind", action="store_true", help="read the prompt once")
    parser.add_argument("--costs", action="store_true", help="predict speed-ups from the costs of a round's parts")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="decoding", help="of the folder of results")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    place, is_file = model_place(options.model), options.model.endswith(".gguf")
    if is_file:
        base = selfspec.load(place, draft=False)
    else:
        base = selfspec.wrap(bare(load_checkpoint(place, options.dtype, "cpu").model))
    ids = prompts_of(options.texts, load_tokenizer(place), 1 if options.behind else options.prompts, options.context)
    prompts, cache = [Prompts.of_one_length(each) for each in ids], None
    if options.behind:
        began = time.perf_counter()
        given: dict[str, Any] = {"max_new_tokens": 1, "eos_token_id": None, "return_dict_in_generate": True}
        read = base.generate(prompts[0].ids, prompts[0].mask, **given)
        held = read.stats.cache_bytes / 2**20
        print(f"read in {time.perf_counter() - began:.0f} s; keys and values take {held:.0f} MiB")
        prompts, cache = [Prompts.of_one_length(read.sequences)], read.cache
    drafts = [(draft, length) for draft in options.draft for length in (None, *options.length)]
    # Stock modules have dense weights of a GGUF file, and read each prompt themselves.
    arms: list[Arm] = [] if is_file or options.behind else [make_arm(ArmSpec("generate"), _stock(place, base.model))]
    arms.append(OwnArm(ArmSpec("plain"), _behind(base, cache)))
    for draft, length in drafts:
        arms.append(OwnArm(ArmSpec("draft", draft, length), _behind(base.drafting(draft, length), cache)))
    if options.planes is not None:
        planes = selfspec.load(place, weights="planes", dtype=options.dtype, draft=False)
        arms.append(OwnArm(ArmSpec("other", "planes"), planes))
        arms += [OwnArm(ArmSpec("other", f"planes, {each}"), planes.drafting(each)) for each in options.planes]
    if options.llama:
        how = (options.llama, options.threads, options.context + options.max_new_tokens)
        files = [Path(place)] if is_file else options.gguf
        arms += [WorkerArm.llama_cpp(f"llama.cpp {file.stem}", file, *how) for file in files]
    cells = {
        Cell("texts", temperature, 1, options.context, options.max_new_tokens): prompts
        for temperature in options.temperatures
    }
    parts = frozenset[Part]({"speed", "costs"} if options.costs else {"speed"})
    compare(options.name, Path(options.model).name, base.model, arms, cells, options.repeats, options.warm_up, parts)
    for worker in {id(arm.worker): arm.worker for arm in arms if isinstance(arm, WorkerArm)}.values():
        worker.end()


def _stock(place: str, model: PreTrainedModel) -> PreTrainedModel:
    """Return the model as its own library runs it; a dense one is wrapped as it is."""
    if getattr(AutoConfig.from_pretrained(place), "quantization_config", None) is None:
        return model
    return AutoModelForCausalLM.from_pretrained(place, dtype=model.dtype)


def _behind(spec: selfspec.SelfSpeculative, cache: Any) -> selfspec.SelfSpeculative:
    return spec if cache is None else cast(selfspec.SelfSpeculative, Behind(spec, cache))


if __name__ == "__main__":
    main()

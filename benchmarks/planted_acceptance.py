"""What self-speculation costs at real sizes, without real weights: random models with a planted acceptance rate.

    python benchmarks/planted_acceptance.py --size 134M
    python benchmarks/planted_acceptance.py --size 1.2B --dtype bfloat16 --acceptance 0.7

It measures COST, NOT ACCEPTANCE. The weights are random. What the layers from the exit on add to the residual stream
is scaled down (o_proj and down_proj) until 1 - TV between exit and full model is what was asked for: so drafts are
accepted by arrangement, and what is left to see is what rounds cost. What the layers before the exit add is scaled up,
since with a tied head a token would else be followed by itself. Texts mean nothing. They are sampled, at a temperature
at which random logits are about as peaked as a trained model's: greedily such models fall into loops. Look-ups are left
out: there is nothing to look up. The measuring is that of `selfspec bench`.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import transformers
from kept import RESULTS
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from selfspec.cli.terminal import StepBar, progress_bar
from selfspec.draft import EarlyExit
from selfspec.measure.acceptance import teacher_forced
from selfspec.model.registry import find_adapter
from selfspec.runtime.named import RuntimeName
from selfspec.tools.bench.arms import ArmSpec
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.report import write_report
from selfspec.tools.bench.results import ResultsFile
from selfspec.tools.bench.session import Session

# The shapes of widely used models of about these sizes; embeddings are tied.
SHAPES: dict[str, dict[str, int]] = {
    "2M": {"hidden": 128, "mlp": 384, "layers": 8, "heads": 4, "kv": 2, "vocabulary": 4096},
    "64M": {"hidden": 512, "mlp": 1408, "layers": 16, "heads": 8, "kv": 4, "vocabulary": 32768},
    "134M": {"hidden": 576, "mlp": 1536, "layers": 30, "heads": 9, "kv": 3, "vocabulary": 49152},
    "360M": {"hidden": 960, "mlp": 2560, "layers": 32, "heads": 15, "kv": 5, "vocabulary": 49152},
    "1.2B": {"hidden": 2048, "mlp": 8192, "layers": 16, "heads": 32, "kv": 8, "vocabulary": 128256},
}
_CONTEXT = 8192
# Of the sequences on which acceptance is arranged.
_SEQUENCES, _LENGTH = 3, 96
_LIFT = 20.0
_CLOSE, _MOST_TRIALS = 0.02, 14


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="134M")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--acceptance", type=float, default=0.8, help="1 - TV to be planted; at temperature 0, agreement"
    )
    parser.add_argument("--exit", type=int, help="exit layer; default: a quarter of the depth")
    parser.add_argument("--draft-length", type=int, default=3, help="of the arms with a fixed one")
    parser.add_argument("--temperature", type=float, default=0.1)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[64])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--packed", action="store_true", help="selfspec's arms run packed weights")
    parser.add_argument(
        "--runtime", type=RuntimeName, choices=list(RuntimeName), default=RuntimeName.TRACED, help="of selfspec's arms"
    )
    parser.add_argument("--no-peaks", action="store_true")
    parser.add_argument("--no-assistant", action="store_true", help="without transformers' early exit, which is slow")
    parser.add_argument("--name", default="planted", help="folder of the results")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shape = SHAPES[options.size]
    exit_layer = options.exit or shape["layers"] // 4
    model: Any = random_model(shape)
    model.to(options.device)
    planted = plant(model, exit_layer, options.acceptance, options.temperature)
    model.to(getattr(torch, options.dtype))
    print(f"planted: drafts of exit:{exit_layer} are accepted at a rate of {planted:.2f}")
    file = ResultsFile(RESULTS / options.name)
    prompts = {
        Cell("random", options.temperature, batch, context, options.max_new_tokens): _prompts(
            shape["vocabulary"], options, batch, context
        )
        for batch, context in product(options.batch, options.context)
    }
    own = ArmSpec("plain", packed=options.packed, runtime=options.runtime)
    draft = replace(own, kind="draft", draft=f"exit:{exit_layer}")
    specs = [ArmSpec("generate")]
    if options.device != "cpu":
        specs.append(ArmSpec("static"))
    if not options.no_assistant:
        specs.append(ArmSpec("early-exit", exit_layer=exit_layer, length=options.draft_length))
    specs.append(own)
    if not options.no_assistant:
        specs.append(replace(draft, length=options.draft_length))
    specs.append(draft)
    with tempfile.TemporaryDirectory() as folder, progress_bar("measuring") as progress:
        if not options.no_peaks:
            model.save_pretrained(folder)
        session = Session(
            name=f"random {options.size}, acceptance planted at {options.acceptance:g}",
            place=None if options.no_peaks else folder,
            model=model,
            specs=specs,
            repeats=options.repeats,
            warm_up=options.warm_up,
        )
        session.measure(prompts, file, StepBar(progress))
    write_report(file.cells(), RESULTS / options.name, with_plots=True)
    print((RESULTS / options.name / "report.md").read_text())


def random_model(shape: dict[str, int]) -> PreTrainedModel:
    """A llama of a shape, always the same, in float32 and evaluation mode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    model.eval()
    return model


@torch.no_grad()
def plant(model: PreTrainedModel, exit_layer: int, acceptance: float, temperature: float) -> float:
    """Scale what the layers from the exit on add until its drafts are accepted so often; return how often they are."""
    adapter, drafter = find_adapter(model), EarlyExit(exit_layer)
    tokens = torch.Generator().manual_seed(1)
    texts = [torch.randint(model.config.vocab_size, (1, _LENGTH), generator=tokens) for _ in range(_SEQUENCES)]
    texts = [text.to(model.device) for text in texts]
    layers = adapter.decoder_layers(model)
    for weight in _projections(layers[:exit_layer]):
        weight.mul_(_LIFT)
    scaled = _projections(layers[exit_layer:])
    # Bisection in the logarithm: at a hundred the layers decide, at a thousandth they hardly do.
    low, high, scale, agreed = 1e-3, 1e2, 1.0, 0.0
    for _ in range(_MOST_TRIALS):
        wanted = (low * high) ** 0.5
        for weight in scaled:
            weight.mul_(wanted / scale)
        scale = wanted
        measured = teacher_forced(model, adapter, {"exit": drafter}, texts, [temperature] if temperature else [])
        agreed = measured["exit"].alpha(temperature).value
        if abs(agreed - acceptance) <= _CLOSE:
            break
        low, high = (scale, high) if agreed > acceptance else (low, scale)
    return agreed


def _projections(layers: Any) -> list[torch.Tensor]:
    """The weights through which layers add to the residual stream."""
    return [projection.weight for layer in layers for projection in (layer.self_attn.o_proj, layer.mlp.down_proj)]


def _prompts(vocabulary: int, options: Any, batch: int, context: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(2)
    calls = max(options.prompts // batch, 1)
    return [torch.randint(vocabulary, (batch, context), generator=drawn).to(options.device) for _ in range(calls)]


if __name__ == "__main__":
    main()

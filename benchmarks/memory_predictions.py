"""Predict speeds of models that do not fit, by the plan of `selfspec.load` and stated bandwidths; measure nothing.

    python benchmarks/memory_predictions.py

Prints the tables of docs/memory.md. Models are made from their configurations on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from selfspec.errors import UnsupportedOptionError
from selfspec.model.registry import without_weights
from selfspec.placement.plan import Bandwidth, Memory, parse_bytes, plan_memory
from selfspec.placement.skeleton import Skeleton
from selfspec.placement.stored import StoredTensor, StoredWeight, WeightFiles
from selfspec.placement.survey import Survey, streamable_layers
from selfspec.placement.weight_source import FromDisk

BUDGETS = ("6 GiB", "8 GiB", "12 GiB", "24 GiB")
CONTEXT = 4096


@dataclass(frozen=True)
class Machine:
    """Bandwidths of a kind of machine, and the bytes of a budget that a process takes before a model is loaded."""

    bandwidth: Bandwidth
    process: int


MACHINES = {
    "a CPU with 40 GB/s of memory and a disk of 3.5 GB/s": Machine(Bandwidth(memory=40e9, stream=3.5e9), 400 * 2**20),
    "a GPU with 500 GB/s of memory and 25 GB/s from the host": Machine(Bandwidth(memory=500e9, stream=25e9), 0),
}


def models() -> dict[str, PreTrainedConfig]:
    """Configurations with the shapes of common models, by name."""
    llama = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    qwen = {"vocab_size": 152_064, "num_key_value_heads": 8, "hidden_size": 5120, "num_attention_heads": 40}
    return {
        "3B, of Llama 3.2": LlamaConfig(
            hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
            tie_word_embeddings=True, **llama,
        ),
        "8B, of Llama 3.1": LlamaConfig(
            hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32, **llama
        ),
        "14B, of Qwen 2.5": Qwen2Config(intermediate_size=13_824, num_hidden_layers=48, **qwen),
        "32B, of Qwen 2.5": Qwen2Config(intermediate_size=27_648, num_hidden_layers=64, **qwen),
    }  # fmt: skip


def memory_of(config: PreTrainedConfig, process: int) -> Memory:
    """Estimate the memory of a checkpoint in bfloat16 on a CPU, where the process takes `process` bytes without it."""
    config.dtype = torch.bfloat16
    model = without_weights(config)
    weights = model.named_parameters(remove_duplicate=False)
    tensors = {name: StoredTensor(Path(), 0, tuple(weight.shape), weight.dtype) for name, weight in weights}
    stored = {name: StoredWeight.dense(tensor) for name, tensor in tensors.items()}
    made = Skeleton(model, {}, stored)
    survey = Survey(made, torch.bfloat16, WeightFiles(), streamable_layers(made, {}), process, CONTEXT, FromDisk())
    return survey.memory


def table(machine: Machine) -> str:
    """Return predictions for a machine, as Markdown: a row for each model, a column for each budget."""
    lines = ["| bfloat16 | " + " | ".join(BUDGETS) + " |", "|---" * (1 + len(BUDGETS)) + "|"]
    for name, config in models().items():
        memory = memory_of(config, machine.process)
        weights = (memory.kept + sum(memory.layers)) / 1e9
        cells = [_cell(memory, parse_bytes("memory", budget), machine.bandwidth) for budget in BUDGETS]
        lines.append(f"| {name}, {weights:.1f} GB | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(memory: Memory, budget: int, bandwidth: Bandwidth) -> str:
    depth = len(memory.layers) - 1
    try:
        plan = plan_memory(memory, budget, bandwidth, ("int8", "int4"))
    except UnsupportedOptionError as error:
        least = str(error).partition("at least ")[2].partition(" (")[0]
        try:
            plain = plan_memory(memory, budget, bandwidth, ())
        except UnsupportedOptionError as still:
            return "from " + str(still).partition("at least ")[2].partition(" (")[0]
        return f"{plain.resident} of {depth} layers, no drafts: {plain.plain:.2f}; drafts from {least}"
    if plan.drafting is None:
        return f"all stays: {plan.plain:.1f}"
    return f"{plan.resident} of {depth} layers, {plan.format}: {plan.plain:.2f}, **{plan.drafting:.1f}**"


if __name__ == "__main__":
    for name, machine in MACHINES.items():
        print(f"{name}\n\n{table(machine)}\n")

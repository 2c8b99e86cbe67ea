"""`selfspec inspect`: the parts of a model, what drafts in fewer bits take, and what one from each exit reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from selfspec.cli.options import Budget, Model, Output, prepare_process
from selfspec.cli.outcome import print_json
from selfspec.cli.terminal import console, figures_table
from selfspec.measure.embedded import model_place

if TYPE_CHECKING:
    from rich.table import Table

    from selfspec.model.summary import LayerSummary, ModelSummary, Weights
    from selfspec.placement.planned import PlannedCheckpoint


def inspect(model: Model, budget: Budget, output: Output = "text") -> None:
    """Describe a model by its parts, without loading its weights or running it.

    With --memory, also how it would be loaded within a budget, and how fast it would decode: by the bandwidths of disk
    and memory, or of host and GPU, measured here.

    The draft cost ratio c is what a draft step reads over what a target step reads, head included.
    """
    from selfspec.environment import versions
    from selfspec.model.checkpoint import find_device, read_config
    from selfspec.model.summary import describe_config
    from selfspec.placement.planned import plan_checkpoint
    from selfspec.placement.weight_source import source_for

    prepare_process(threads=None)
    summary = describe_config(read_config(model_place(model)))
    planned = None
    if budget.memory is not None:
        source = source_for(find_device("auto"))
        planned = plan_checkpoint(
            model_place(model), budget.memory, None, True, budget.context, source, budget.kv_cache
        )
    if output == "json":
        found = {"checkpoint": model, **summary.to_dict(), "versions": versions()}
        if planned is not None:
            found["plan"] = {
                "device": str(planned.survey.source.device),
                "memory": asdict(planned.survey.memory),
                "context": planned.survey.context,
                "cache": planned.survey.cache,
                **asdict(planned.plan),
            }
        print_json(found)
        return
    exits = figures_table(
        "Draft cost of each exit, by weights read (head included)", ["draft"], ["bytes a step", "cost ratio c"]
    )
    for choice in summary.exits:
        exits.add_row(f"exit:{choice.layer}", f"{choice.bytes_read:,}", f"{choice.cost_ratio:.3f}")
    exits.add_section()
    exits.add_row("target", f"{summary.target_bytes_read:,}", "1.000")
    console().print(_overview(model, summary), "", _parts(summary), "", _substitutes(summary), "", exits, sep="\n")
    if planned is not None:
        console().print("", _plan(planned, budget), sep="\n")


def _overview(name: str, summary: ModelSummary) -> Table:
    from rich.table import Table

    cache = summary.cache
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("checkpoint", name)
    table.add_row("model", f"{summary.model} ({summary.model_type}), {summary.dtype}")
    table.add_row(
        "shape",
        f"{len(summary.layers)} layers, width {summary.width}, vocabulary {summary.vocabulary}, "
        f"context {summary.context or 'unlimited'}",
    )
    pairs = {(part.attribute, part.module) for layer in summary.layers for part in (layer.attention, layer.mlp)}
    table.add_row("sublayers", "; ".join(f"{name}: {module}" for name, module in sorted(pairs) if name))
    windows = f", {cache.sliding_layers} layers with a sliding window, kept in full" if cache.sliding_layers else ""
    table.add_row(
        "KV cache",
        f"{cache.bytes_per_token:,} bytes a token ({cache.heads} heads of {cache.head_dim} a layer){windows}",
    )
    if cache.recurrent_layers:
        table.add_row("states", f"{cache.recurrent_layers} layers, copied at each token of a round")
    return table


def _parts(summary: ModelSummary) -> Table:
    table = figures_table("Weights", ["part"], ["parameters", "bytes"])

    def add(part: str, weights: Weights) -> None:
        table.add_row(part, f"{weights.parameters:,}", f"{weights.bytes:,}")

    add("embedding", summary.embedding)
    for numbers, layer in _equal_layers(summary.layers):
        window = f", window {layer.window}" if layer.window else ""
        add(f"layer {numbers}, each: attention{window}", layer.attention.weights)
        add(f"layer {numbers}, each: MLP", layer.mlp.weights)
        add(f"layer {numbers}, each: norms", layer.norms)
    add("final norm", summary.final_norm)
    add("head, tied to the embedding" if summary.tied else "head", summary.head)
    table.add_section()
    add("total, tied weights once" if summary.tied else "total", summary.total)
    return table


def _substitutes(summary: ModelSummary) -> Table:
    table = figures_table("Drafting in fewer bits, beside the weights", ["draft"], ["bytes", "of the weights"])
    for fewer in summary.substitutes:
        table.add_row(f"int{fewer.bits}", f"{fewer.bytes:,}", f"{fewer.share:.1%}")
    return table


def _plan(planned: PlannedCheckpoint, budget: Budget) -> Table:
    from selfspec.placement.byte_size import shown_bytes

    plan, memory = planned.plan, planned.survey.memory
    layers = len(memory.layers) - 1
    device = planned.survey.source.device
    table = figures_table(
        f"Within {budget.memory} on {device}, for {planned.survey.context:,} tokens of context", ["part"], ["plan"]
    )
    table.add_row("layers that stay exact in memory", f"{min(plan.resident, layers)} of {layers}")
    where = "the disk" if device.type == "cpu" else "the host"
    table.add_row("streamed, each pass", f"{shown_bytes(plan.streamed)} from {where}" if plan.streamed else "nothing")
    if plan.bits is not None:
        table.add_row("rounded copies, for drafts", f"{plan.bits} bits")
    kept = {"exact": "", "host": ", the rest on the host", "int8": ", in 8 bits: not lossless"}[planned.survey.cache]
    table.add_row("keys and values", shown_bytes(memory.cache) + kept)
    if memory.process:
        table.add_row("the process itself", shown_bytes(memory.process))
    table.add_row("total", shown_bytes(plan.total))
    table.add_row("plain decoding, predicted", f"{plan.plain:.2f} tokens/s")
    if plan.drafting is not None:
        table.add_row("with drafts, predicted", f"{plan.drafting:.2f} tokens/s, {plan.draft_length} drafted a round")
    return table


def _equal_layers(layers: Sequence[LayerSummary]) -> Iterator[tuple[str, LayerSummary]]:
    """Runs of equal layers, named by their numbers: deep models have few kinds."""
    for layer, run in groupby(enumerate(layers), key=lambda numbered: numbered[1]):
        numbers = [number for number, _ in run]
        yield (f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"), layer

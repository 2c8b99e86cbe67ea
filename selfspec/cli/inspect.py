"""`selfspec inspect`: the parts of a model, what drafts in fewer bits take, and what one from each exit reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from selfspec.cli.options import MemoryOptions, Model, Output, prepare_process
from selfspec.cli.terminal import console, facts_table, figures_table
from selfspec.measure.embedded import model_place

if TYPE_CHECKING:
    from selfspec.draft.heads.mtp import HeldModules
    from selfspec.model.summary import ModelSummary, Weights
    from selfspec.placement.planned import CheckpointSummary, PlannedCheckpoint


def inspect(model: Model, budget: MemoryOptions, output: Output = "text") -> CheckpointSummary:
    """Describe a model by its parts, without loading its weights or running it.

    With --memory, also how it would be loaded within a budget, and how fast it would decode: by the bandwidths of disk
    and memory, or of host and GPU, measured here.

    The draft cost ratio c is what a draft step reads over what a target step reads, head included.
    """
    from selfspec.draft.heads.mtp import held_modules
    from selfspec.model.checkpoint import find_device, read_config
    from selfspec.model.summary import describe_config
    from selfspec.placement.planned import CheckpointSummary, plan_checkpoint
    from selfspec.placement.weight_source import source_for

    prepare_process(threads=None)
    config = read_config(model_place(model))
    summary, modules = describe_config(config), held_modules(model_place(model), config)
    planned = None
    if budget.memory is not None:
        source = source_for(find_device("auto"))
        planned = plan_checkpoint(model_place(model), budget.memory, None, True, budget.context, source)
    if output == "text":
        _print(model, summary, modules, planned, budget)
    plan = None if planned is None else planned.to_dict()
    return CheckpointSummary(**vars(summary), checkpoint=model, mtp=modules, plan=plan)


def _print(
    model: str,
    summary: ModelSummary,
    modules: HeldModules | None,
    planned: PlannedCheckpoint | None,
    budget: MemoryOptions,
) -> None:
    exits = [(f"exit:{each.layer}", f"{each.bytes_read:,}", f"{each.cost_ratio:.3f}") for each in summary.exits]
    target = ("target", f"{summary.target_bytes_read:,}", "1.000")
    fewer = [(f"int{each.bits}", f"{each.bytes:,}", f"{each.share:.1%}") for each in summary.substitutes]
    parts = ((part, f"{weights.parameters:,}", f"{weights.bytes:,}") for part, weights in _parts(summary))
    total = "total, tied weights once" if summary.tied else "total"
    whole = (total, f"{summary.total.parameters:,}", f"{summary.total.bytes:,}")
    tables = [
        facts_table(_overview(model, summary) | ({} if modules is None else {"MTP modules": str(modules)})),
        figures_table("Weights", ["part"], ["parameters", "bytes"], [*parts, (), whole]),
        figures_table("Drafting in fewer bits, beside the weights", ["draft"], ["bytes", "of the weights"], fewer),
        figures_table(
            "Draft cost of each exit, by weights read (head included)",
            ["draft"],
            ["bytes a step", "cost ratio c"],
            [*exits, (), target],
        ),
    ]
    if planned is not None:
        survey = planned.survey
        title = f"Within {budget.memory} on {survey.source.device}, for {survey.context:,} tokens of context"
        tables.append(figures_table(title, ["part"], ["plan"], _plan(planned)))
    for number, table in enumerate(tables):
        console().print(*[""] * (number > 0), table, sep="\n")


def _overview(name: str, summary: ModelSummary) -> dict[str, str]:
    cache, context = summary.cache, summary.context or "unlimited"
    pairs = {(part.attribute, part.module) for layer in summary.layers for part in (layer.attention, layer.mlp)}
    windows = f", {cache.sliding_layers} layers with a sliding window, kept in full" if cache.sliding_layers else ""
    keys = f"{cache.bytes_per_token:,} bytes a token ({cache.heads} heads of {cache.head_dim} a layer){windows}"
    states = {"states": f"{cache.recurrent_layers} layers, copied at each token of a round"}
    return {
        "checkpoint": name,
        "model": f"{summary.model} ({summary.model_type}), {summary.dtype}",
        "shape": f"{len(summary.layers)} layers, width {summary.width}, vocabulary {summary.vocabulary}, "
        f"context {context}",
        "sublayers": "; ".join(f"{name}: {module}" for name, module in sorted(pairs) if name),
        "KV cache": keys,
        **(states if cache.recurrent_layers else {}),
    }


def _parts(summary: ModelSummary) -> Iterator[tuple[str, Weights]]:
    """Yield what each part weighs; runs of equal layers are one, named by their numbers: deep models have few kinds."""
    yield "embedding", summary.embedding
    if summary.encoder.parameters:
        yield "encoder", summary.encoder
    for layer, run in groupby(enumerate(summary.layers), key=lambda numbered: numbered[1]):
        numbers = [number for number, _ in run]
        named = f"layer {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"layer {numbers[0]}"
        window = f", window {layer.window}" if layer.window else ""
        yield f"{named}, each: attention{window}", layer.attention.weights
        yield f"{named}, each: MLP", layer.mlp.weights
        yield f"{named}, each: norms", layer.norms
    yield "final norm", summary.final_norm
    yield "head, tied to the embedding" if summary.tied else "head", summary.head


def _plan(planned: PlannedCheckpoint) -> Iterator[tuple[str, str]]:
    from selfspec.placement.byte_size import shown_bytes

    plan, memory = planned.plan, planned.survey.memory
    layers = len(memory.layers) - 1
    where = "the disk" if planned.survey.source.device.type == "cpu" else "the host"
    yield "layers that stay exact in memory", f"{min(plan.resident, layers)} of {layers}"
    yield "streamed, each pass", f"{shown_bytes(plan.streamed)} from {where}" if plan.streamed else "nothing"
    if plan.bits is not None:
        yield "rounded copies, for drafts", f"{plan.bits} bits"
    kept = ", the rest on the host" if planned.survey.cache == "host" else ""
    yield "keys and values", shown_bytes(memory.cache) + kept
    if memory.process:
        yield "the process itself", shown_bytes(memory.process)
    if memory.draft:
        yield "the draft's own weights, keys and values", shown_bytes(memory.draft)
    yield "total", shown_bytes(plan.total)
    yield "plain decoding, predicted", f"{plan.plain:.2f} tokens/s"
    if plan.drafting is not None:
        yield "with drafts, predicted", f"{plan.drafting:.2f} tokens/s, {plan.draft_length} drafted a round"

"""`selfspec MODEL`, the same as `selfspec inspect MODEL`: what a checkpoint can do here, and what it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from selfspec.cli.options import MemoryOptions, Model, Output, WeightFormat, prepare_process
from selfspec.cli.terminal import console, facts_table, figures_table
from selfspec.measure.embedded import model_place

if TYPE_CHECKING:
    from selfspec.placement.place import PlannedCheckpoint
    from selfspec.tools.prospects import CheckpointSummary, Gain


def inspect(
    model: Model, budget: MemoryOptions, weights: WeightFormat = None, output: Output = "text"
) -> CheckpointSummary:
    """Say what a checkpoint can do here: whether it fits, what drafts, what that gains, which command is next.

    The same as selfspec MODEL. Weights are read only where a profile of selfspec calibrate may be of them.

    With --memory, also how it would be loaded within a budget, and how fast it would decode: by the bandwidths of disk
    and memory, or of host and GPU, measured here; what --weights packs is packed for it first. The JSON also has what
    each part weighs, and what draft steps in fewer bits and from exits read.
    """
    place = model_place(model)
    with Console(stderr=True).status("Looking at the checkpoint"):
        from selfspec.measure.summary import describe
        from selfspec.model.checkpoint import read_config
        from selfspec.model.registry import mtp_layout
        from selfspec.model.sizes import context_of
        from selfspec.placement.packed import device_of, format_of_weights
        from selfspec.placement.place import plan_checkpoint
        from selfspec.placement.weight_source import source_for
        from selfspec.placement.whole import survey_whole
        from selfspec.tools.prospects import CheckpointSummary, counted_tokens, prospects

        prepare_process(threads=None)
        config, format = read_config(place), format_of_weights(place, weights)
        source = source_for(device_of(format, None))
        tokens = counted_tokens(context_of(config.get_text_config(decoder=True)))
        surveyed = survey_whole(place, None, tokens, source, format)
        summary = describe(surveyed.skeleton.model)
        here = prospects(model, place, surveyed, summary, format)
        planned = None
        if budget.memory is not None:
            planned = plan_checkpoint(place, budget.memory, None, True, budget.context, source, weights=format)
    plan, layout = None if planned is None else planned.to_dict(), mtp_layout(config)
    modules = None if layout is None else layout.promised(config.get_text_config(decoder=True)) or None
    found = CheckpointSummary(**vars(summary), checkpoint=model, here=here, mtp=modules, plan=plan)
    if output == "text":
        console().print(facts_table(_overview(found, tokens)), soft_wrap=True)
        if planned is not None:
            known = planned.survey
            title = f"Within {budget.memory} on {known.source.device}, for {known.context:,} tokens of context"
            console().print("", figures_table(title, ["part"], ["plan"], _plan(planned)), sep="\n")
    return found


def _overview(found: CheckpointSummary, tokens: int) -> dict[str, str]:
    from selfspec.placement.plan import shown_bytes

    cache, context, here = found.cache, found.context or "unlimited", found.here
    pairs = {(part.attribute, part.module) for layer in found.layers for part in (layer.attention, layer.mlp)}
    windows = f", {cache.sliding_layers} layers with a sliding window, kept in full" if cache.sliding_layers else ""
    keys = f"{cache.bytes_per_token:,} bytes a token ({cache.heads} heads of {cache.head_dim} a layer){windows}"
    states = {"states": f"{cache.recurrent_layers} layers, copied at each token of a round"}
    there = "" if here.memory is None else f", {shown_bytes(here.memory)} on {here.device}"
    return {
        "checkpoint": found.checkpoint,
        "model": f"{found.model} ({found.model_type}), {found.total.parameters:,} parameters in {found.dtype}",
        "shape": f"{len(found.layers)} layers, width {found.width}, vocabulary {found.vocabulary}, context {context}",
        "sublayers": "; ".join(f"{name}: {module}" for name, module in sorted(pairs) if name),
        "KV cache": keys,
        **(states if cache.recurrent_layers else {}),
        "memory": f"{shown_bytes(found.total.bytes)} of weights{there}: {'fits' if here.fits else 'does not fit'}",
        "at its peak": f"{shown_bytes(sum(here.account.values()))} with {tokens:,} tokens: "
        + ", ".join(f"{shown_bytes(size)} {what}" for what, size in here.account.items()),
        **({} if here.packed is None else {here.weights or "planes": _in_fewer(found, here.packed)}),
        **({} if here.unread is None else {"quantised": f"as its library loads it: no kernel reads {here.unread}"}),
        **({} if found.mtp is None else {"MTP modules": f"{found.mtp} by its config: --draft mtp"}),
        "auto drafts": here.doubt or _gains(found),
        "next": "\n".join(here.commands),
    }


def _in_fewer(found: CheckpointSummary, size: int) -> str:
    from selfspec.placement.plan import shown_bytes

    if found.here.weights is not None:
        bits = 8 * size / found.total.parameters
        return f"all of this is for weights in {found.here.weights}, the same bits in {bits:.1f} for each"
    fewer = found.total.bytes / size
    return f"{shown_bytes(size)} with --weights planes, the same bits: a token reads {fewer:.2f} times fewer"


def _gains(found: CheckpointSummary) -> str:
    from selfspec.draft.registry import PLAIN
    from selfspec.kernels import native

    here = found.here
    if here.profile is None:
        if here.greedy.draft == PLAIN:
            return "nothing: no gain is sure by the weights that drafts read; selfspec calibrate measures"
        built = "" if native.available() else f" with the CPU kernels, which do not run here ({native.absence()})"
        times = f"about {here.greedy.speedup:.1f} times plain decoding{built}"
        measures = (
            "; calibrate measures" if any(each.startswith("selfspec calibrate ") for each in here.commands) else ""
        )
        return f"with {here.greedy.draft}: {times}, by the weights it reads{measures}"

    def gain(each: Gain) -> str:
        return "nothing" if each.draft == PLAIN else f"with {each.draft}, {each.speedup:.1f} times plain decoding"

    return f"greedily {gain(here.greedy)}; sampling {gain(here.sampled)}; measured here"


def _plan(planned: PlannedCheckpoint) -> Iterator[tuple[str, str]]:
    from selfspec.formats.format import formats
    from selfspec.placement.plan import shown_bytes

    plan = planned.plan
    layers = len(plan.memory.layers) - 1
    where = "the disk" if planned.survey.source.device.type == "cpu" else "the host"
    yield "layers that stay exact in memory", f"{min(plan.resident, layers)} of {layers}"
    if plan.partly:
        yield "layers of which a part stays, and drafts", f"{min(plan.partly, layers - plan.resident)} of {layers}"
    yield "streamed, each pass", f"{shown_bytes(plan.streamed)} from {where}" if plan.streamed else "nothing"
    if plan.format is not None and formats()[plan.format].copies:
        yield "rounded copies, for drafts", f"{formats()[plan.format].bits} bits"
    yield "memory", f"{shown_bytes(plan.total)}: {plan.told}"
    if planned.survey.cache == "host":
        yield "keys and values", "on the host"
    yield "plain decoding, predicted", f"{plan.plain:.2f} tokens/s"
    if plan.drafting is not None:
        yield "with drafts, predicted", f"{plan.drafting:.2f} tokens/s, {plan.draft_length} drafted a round"

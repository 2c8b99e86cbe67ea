"""An anatomy as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, Group
from rich.table import Table

from selfspec.model.summary import ExitSummary, LayerSummary, ModelSummary, Weights


def print_anatomy(name: str, anatomy: ModelSummary) -> None:
    """Print the tables on stdout."""
    Console(highlight=False, markup=False).print(
        Group(_summary(name, anatomy), "", _parts(anatomy), "", _exits(anatomy)), soft_wrap=False
    )


def _summary(name: str, anatomy: ModelSummary) -> Table:
    cache = anatomy.cache
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("checkpoint", name)
    table.add_row("model", f"{anatomy.model} ({anatomy.model_type}), {anatomy.dtype}")
    table.add_row(
        "shape",
        f"{len(anatomy.layers)} layers, width {anatomy.width}, vocabulary {anatomy.vocabulary}, "
        f"context {anatomy.context or 'unlimited'}",
    )
    pairs = {(part.attribute, part.module) for layer in anatomy.layers for part in (layer.attention, layer.mlp)}
    table.add_row("sublayers", "; ".join(f"{name}: {module}" for name, module in sorted(pairs) if name))
    windows = f", {cache.sliding_layers} layers with a sliding window, kept in full" if cache.sliding_layers else ""
    table.add_row(
        "KV cache",
        f"{cache.bytes_per_token:,} bytes a token ({cache.heads} heads of {cache.head_dim} a layer){windows}",
    )
    if cache.recurrent_layers:
        table.add_row("states", f"{cache.recurrent_layers} layers, copied at each token of a round")
    return table


def _parts(anatomy: ModelSummary) -> Table:
    table = Table(title="Weights", title_justify="left")
    table.add_column("part")
    for column in ("parameters", "bytes"):
        table.add_column(column, justify="right")
    _add_weights(table, "embedding", anatomy.embedding)
    for numbers, layer in _equal_layers(anatomy.layers):
        window = f", window {layer.window}" if layer.window else ""
        _add_weights(table, f"layer {numbers}, each: attention{window}", layer.attention.weights)
        _add_weights(table, f"layer {numbers}, each: MLP", layer.mlp.weights)
        _add_weights(table, f"layer {numbers}, each: norms", layer.norms)
    _add_weights(table, "final norm", anatomy.final_norm)
    _add_weights(table, "head, tied to the embedding" if anatomy.tied else "head", anatomy.head)
    table.add_section()
    _add_weights(table, "total, tied weights once" if anatomy.tied else "total", anatomy.total)
    return table


def print_exits(title: str, exits: tuple[ExitSummary, ...]) -> None:
    """Print a table of exits on stdout."""
    Console(highlight=False, markup=False).print("", _exit_rows(title, exits), sep="\n")


def _exit_rows(title: str, exits: tuple[ExitSummary, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("draft")
    table.add_column("bytes a step", justify="right")
    table.add_column("cost ratio c", justify="right")
    for choice in exits:
        table.add_row(f"exit:{choice.layer}", f"{choice.bytes_read:,}", f"{choice.cost_ratio:.3f}")
    return table


def _exits(anatomy: ModelSummary) -> Table:
    table = _exit_rows("Draft cost of each exit, by weights read (head included)", anatomy.exits)
    table.add_section()
    table.add_row("target", f"{anatomy.target_bytes_read:,}", "1.000")
    return table


def _equal_layers(layers: tuple[LayerSummary, ...]) -> Iterator[tuple[str, LayerSummary]]:
    """Runs of equal layers, named by their numbers: deep models have few kinds."""
    for layer, run in groupby(enumerate(layers), key=lambda numbered: numbered[1]):
        numbers = [number for number, _ in run]
        yield (f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"), layer


def _add_weights(table: Table, part: str, weights: Weights) -> None:
    table.add_row(part, f"{weights.parameters:,}", f"{weights.bytes:,}")

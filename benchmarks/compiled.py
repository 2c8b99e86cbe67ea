"""Passes of a round compiled (`selfspec.Compiled`), beside the traced programs that selfspec runs by default.

    python benchmarks/compiled.py --threads 2

Passes are timed in turns. What compiling takes is timed with torch's caches switched off. It needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._inductor.config
from kept import RESULTS
from rich.progress import track
from timed import seconds_of, spread

from selfspec.cache.shared_cache import SharedCache
from selfspec.environment import environment
from selfspec.measure.embedded import checkpoint_folder
from selfspec.model.checkpoint import load_checkpoint
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.registry import find_adapter
from selfspec.runtime import Compiled, Traced
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.pass_function import PassFunction, PassTensors
from selfspec.runtime.recorded import runner_for
from selfspec.runtime.runtime import AnyLength, Function


@dataclass(frozen=True)
class _Noted(AnyLength):
    """Notes every pass that a program is asked of.

    Attributes:
        passes: with what they were run on.
    """

    after: int = 0
    passes: list[tuple[PassFunction, PassTensors]] = field(default_factory=list, compare=False)

    def program(self, function: PassFunction, example: PassTensors) -> Function:
        self.passes.append((function, example))
        return function


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; the embedded one if not given")
    parser.add_argument("--exit", type=int, help="exit layer; default: a third of the depth")
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--context", type=int, default=100, help="tokens in the cache")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="compiled_embedded", help="name of the result files")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch._inductor.config.force_disable_caches = True  # what compiling takes is measured too
    rows = _measured(options)
    settings = vars(options) | {"model": "embedded" if options.model is None else options.model}
    record = {"settings": settings, "environment": environment(torch.device("cpu")), "passes": rows}
    (RESULTS / f"{options.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / f"{options.name}.md").write_text(_table(rows) + "\n")
    print(_table(rows))


@torch.no_grad()
def _measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    model = load_checkpoint(options.model or str(checkpoint_folder()), dtype="float32", device="cpu").model
    adapter = find_adapter(model)
    depth = len(adapter.decoder_layers(model))
    exit_ = Sublayer(options.exit or depth // 3, Part.ATTENTION)
    ids = torch.randint(model.config.vocab_size, (1, options.context), generator=torch.Generator().manual_seed(0))
    noted = _Noted()
    cache = SharedCache(depth, 1, options.context + 64, 16, torch.device("cpu"))
    passes = runner_for(model, adapter, cache, GraphCache(noted))
    cache.reserve(options.context)
    passes.prefill(ids, [options.context])
    cache.commit([options.context])
    named = {f"target, {width} tokens": (LayerPath.full(depth), width) for width in options.widths}
    named[f"draft step, exit {exit_.layer}"] = (LayerPath.up_to(depth, exit_), 1)
    rows = []
    for name, (path, width) in named.items():
        passes.logits(path, ids[:, :width])
        function, example = noted.passes[-1]
        flat = example.flat()
        traced = Traced().program(function, example)
        started = time.perf_counter()
        compiled = Compiled().program(function, example)
        compiled(flat)
        seconds = time.perf_counter() - started
        given, expected = compiled(flat), function(flat)
        assert Compiled().agree(given, expected)
        ways = {
            "stock": partial(function, flat),
            "program": partial(traced, flat),
            "compiled": partial(compiled, flat),
        }
        spent: dict[str, list[float]] = {way: [] for way in ways}
        for _ in track(range(options.repeats), name, transient=True):
            for way, work in ways.items():
                spent[way].append(seconds_of(work))
        difference = float((given[0] - expected[0]).abs().max())
        rows.append({"pass": name, "seconds": spent, "compiling": seconds, "difference": difference})
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| pass | stock modules, ms | program, ms | compiled, ms | compiled, of the program's time | compiling, s "
        "| largest difference of a logit |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        stock, program, compiled = ([1000 * each for each in row["seconds"][way]] for way in row["seconds"])
        ratios = [one / other for one, other in zip(compiled, program, strict=True)]
        cells = " | ".join(map(spread, (stock, program, compiled, ratios)))
        lines.append(f"| {row['pass']} | {cells} | {row['compiling']:.0f} | {row['difference']:.1e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

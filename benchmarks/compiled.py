"""What torch.compile makes of the passes of a round, beside the programs that selfspec runs.

    python benchmarks/compiled.py --threads 2

Each pass is recorded as a graph of operators over a bucket of slots, whose shapes never change, and compiled by
inductor. Passes are timed in turns. Compiled kernels are fused and round differently, so their logits are compared with
the stock modules' up to a bound, not bit by bit. Inductor needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch._inductor.config
from kept import RESULTS
from rich.progress import track
from timed import seconds_of, spread
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from selfspec.adapter import Adapter
from selfspec.cache import SharedCache
from selfspec.checkpoint import load_checkpoint
from selfspec.demo import checkpoint_folder
from selfspec.gate import GatedModel
from selfspec.measure.environment import environment
from selfspec.passes import Passes
from selfspec.path import Part, Path, Sublayer
from selfspec.runtime import Traced
from selfspec.runtime.layer_calls import LayerCall
from selfspec.runtime.programs import Programs
from selfspec.runtime.runtime import Function, Runtime
from selfspec.wrapped import find_adapter

_SLOTS = 64
# Largest difference of a logit that rounding explains here.
_BOUND = 1e-3


class _Noted(Runtime):
    """Programs over a bucket of slots; notes the last one, what it was made of, and what that was run on."""

    def __init__(self, bucket: int) -> None:
        self.made: Function | None = None
        self.function: Function | None = None
        self.example: tuple[Tensor, ...] = ()
        self._bucket = bucket
        self._traced = Traced(after=0)

    @property
    def after(self) -> int:
        return 0

    @property
    def bucket(self) -> int:
        return self._bucket

    def put_calls(self, view: GatedModel, model: nn.Module, adapter: Adapter) -> tuple[LayerCall, ...]:
        return self._traced.put_calls(view, model, adapter)

    def is_tried(self, lengths: Sequence[int]) -> bool:
        return True

    def program(
        self, function: Function, example: tuple[Tensor, ...], layers: Sequence[LayerCall] = (), held: int = 0
    ) -> Function:
        self.function, self.example = function, example
        self.made = self._traced.program(function, example, layers, held)
        return self.made


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
    # selfspec's own programs take any number of slots, and no mask for a single token.
    own, padded = _Noted(1), _Noted(_SLOTS)
    running = []
    for runtime in (own, padded):
        cache = SharedCache(depth, 1, options.context + 64, 16, torch.device("cpu"), bucket=runtime.bucket)
        passes = Passes(model, adapter, cache, Programs(runtime))
        cache.reserve(options.context)
        passes.prefill(ids, [options.context])
        cache.commit([options.context])
        running.append(passes)
    named = {f"target, {width} tokens": (Path.full(depth), width) for width in options.widths}
    named[f"draft step, exit {exit_.layer}"] = (Path.up_to(depth, exit_), 1)
    rows = []
    for name, (path, width) in named.items():
        for passes in running:
            passes.logits(path, ids[:, :width])
        assert own.function is not None
        assert own.made is not None
        assert padded.function is not None
        compiled, seconds = _compiled(padded.function, padded.example)
        difference = float((compiled(padded.example)[0] - own.function(own.example)[0]).abs().max())
        assert difference < _BOUND, difference
        ways = {
            "stock": partial(own.function, own.example),
            "program": partial(own.made, own.example),
            "compiled": partial(compiled, padded.example),
        }
        spent: dict[str, list[float]] = {way: [] for way in ways}
        for _ in track(range(options.repeats), name, transient=True):
            for way, work in ways.items():
                spent[way].append(seconds_of(work))
        rows.append({"pass": name, "seconds": spent, "compiling": seconds, "difference": difference})
    return rows


def _compiled(function: Function, example: tuple[Tensor, ...]) -> tuple[Function, float]:
    """The pass compiled, and how long that took."""
    started = time.perf_counter()
    graph = make_fx(lambda *tensors: function(tensors))(*example)
    compiled = torch.compile(graph, dynamic=False)
    compiled(*example)
    return (lambda tensors: compiled(*tensors)), time.perf_counter() - started


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

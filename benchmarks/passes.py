"""What the passes of a round cost: by the stock modules, by programs, and by their products alone.

    python benchmarks/passes.py --threads 1
    python benchmarks/passes.py --model FOLDER --context 1000

Every pass of a round with an early exit is timed, in turns: the target pass over a block, a draft step, the draft
path's pass over the last draft token, the target pass resumed at the exit. The products alone are the linear layers of
the same path called one after the other: less than that no runtime takes that computes with these kernels. Recording is
the first pass of a kind: by the stock modules, once more watched, recorded, and once by the program; its memory is what
the process holds more after it. The first of them also loads what all need.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from kept import RESULTS
from rich.progress import track
from timed import seconds_of, spread
from torch import Tensor, nn

from selfspec.cache.shared_cache import SharedCache
from selfspec.environment import environment
from selfspec.measure.embedded import checkpoint_folder
from selfspec.model.checkpoint import load_checkpoint
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.registry import find_adapter
from selfspec.placement.resident import resident_bytes
from selfspec.runtime import Traced
from selfspec.runtime.few_rows import for_few_rows
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.recorded import runner_for
from selfspec.runtime.runner import ModelRunner

Run = Callable[[], object]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; the embedded one if not given")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exit", type=int, help="exit layer; default: a third of the depth")
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--context", type=int, default=100, help="tokens in the cache")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="passes_embedded", help="name of the result files")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = _Bench(options)
    names, arms = bench.names, {"stock": bench.stock, "programs": bench.programs, "products": bench.products}
    seconds: dict[tuple[str, str], list[float]] = {(arm, name): [] for arm in arms for name in names}
    for _ in track(range(options.repeats), "measuring"):
        for name in names:
            for arm, runs in arms.items():
                seconds[arm, name].append(seconds_of(runs[name]))
    milliseconds = {key: [1000 * each for each in found] for key, found in seconds.items()}
    rows = [
        _Row(
            name,
            stock=milliseconds["stock", name],
            programs=milliseconds["programs", name],
            products=milliseconds["products", name],
            made=bench.made[name],
        )
        for name in names
    ]
    settings = vars(options) | {"model": "embedded" if options.model is None else options.model}
    record = {"settings": settings, "environment": environment(torch.device("cpu")), "passes": list(map(asdict, rows))}
    (RESULTS / f"{options.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / f"{options.name}.md").write_text(_table(rows) + "\n")
    print(_table(rows))


@dataclass(frozen=True)
class _Made:
    """What it took to record a pass: seconds, and bytes of memory that stayed with it."""

    seconds: float
    resident: int


@dataclass(frozen=True)
class _Row:
    """Milliseconds of one pass, repeat by repeat, and what its program took to make."""

    name: str
    stock: list[float]
    programs: list[float]
    products: list[float]
    made: _Made


class _Bench:
    """The passes of one model by name, each as something to call."""

    def __init__(self, options: argparse.Namespace) -> None:
        model = load_checkpoint(options.model or str(checkpoint_folder()), dtype=options.dtype, device="cpu").model
        adapter = find_adapter(model)
        self._layers = adapter.decoder_layers(model)
        depth = len(self._layers)
        self._head: nn.Linear = model.get_output_embeddings()
        cache = SharedCache(depth, 1, options.context + 64, 16, torch.device("cpu"))
        programs = GraphCache(Traced(after=0))
        kinds = {
            name: runner_for(model, adapter, cache, each) for name, each in (("stock", None), ("programs", programs))
        }
        ids = torch.randint(model.config.vocab_size, (1, options.context), generator=torch.Generator().manual_seed(0))
        full, exit_ = LayerPath.full(depth), Sublayer(options.exit or depth // 3, Part.ATTENTION)
        draft, resumed = LayerPath.up_to(depth, exit_), full.resumed_at(exit_)
        self.stock: dict[str, Run] = {}
        self.programs: dict[str, Run] = {}
        self.products: dict[str, Run] = {}
        self.made: dict[str, _Made] = {}
        with torch.no_grad():
            cache.reserve(options.context)
            kinds["stock"].prefill(ids, [options.context])
            cache.commit([options.context])
        for runs, passes in ((self.stock, kinds["stock"]), (self.programs, kinds["programs"])):
            for width in options.widths:
                self._add(runs, f"target, {width} tokens", partial(_logits, passes, full, ids[:, :width]))
            self._add(runs, f"draft step, exit {exit_.layer}", partial(_logits, passes, draft, ids[:, :1]))
            self._add(runs, "draft path without head", partial(passes.states, draft, ids[:, :1]))
            for width in options.widths[1:]:
                states = ExactStates(torch.zeros(1, width, model.config.hidden_size, dtype=model.dtype))
                self._add(
                    runs,
                    f"target resumed at {exit_.layer}, {width} tokens",
                    partial(_logits, passes, resumed, ids[:, :width], states),
                )
        for width in options.widths:
            self._add_products(f"target, {width} tokens", self._layers, width, head=True)
        self._add_products(f"draft step, exit {exit_.layer}", self._layers[: exit_.layer], 1, head=True)
        self._add_products("draft path without head", self._layers[: exit_.layer], 1, head=False)
        for width in options.widths[1:]:
            name = f"target resumed at {exit_.layer}, {width} tokens"
            self._add_products(name, self._layers[exit_.layer :], width, head=True)
        self.names = list(self.stock)
        # Programs prove themselves over different lengths.
        with torch.no_grad():
            for run in self.stock.values():
                run()
            for name in self.names:
                before, started = resident_bytes() or 0, time.perf_counter()
                self.programs[name]()
                self.made[name] = _Made(time.perf_counter() - started, (resident_bytes() or 0) - before)
            for _ in range(3):
                cache.commit([1])
                for run in self.programs.values():
                    run()
        assert not programs.refusals, programs.refusals

    def _add(self, runs: dict[str, Run], name: str, run: Run) -> None:
        runs[name] = torch.no_grad()(run)

    def _add_products(self, name: str, layers: list[nn.Module], width: int, *, head: bool) -> None:
        linears = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)]
        linears += [self._head] if head else []
        runs = [
            (for_few_rows(linear), torch.randn(width, linear.in_features, dtype=linear.weight.dtype))
            for linear in linears
        ]
        self._add(self.products, name, lambda: [view(states) for view, states in runs])


def _logits(passes: ModelRunner, path: LayerPath, tokens: Tensor, entering: ExactStates | None = None) -> Tensor:
    return passes.logits(path, tokens, entering).logits


def _table(rows: list[_Row]) -> str:
    lines = [
        "| pass | stock modules, ms | programs, ms | products alone, ms | programs, in target passes over 1 token "
        "| recording, s | memory it took, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    unit = rows[0].programs
    for row in rows:
        ratios = [each / one for each, one in zip(row.programs, unit, strict=True)]
        cells = map(spread, (row.stock, row.programs, row.products, ratios))
        made = f"{row.made.seconds:.2f} | {row.made.resident / 2**20:.1f}"
        lines.append(f"| {row.name} | {' | '.join(cells)} | {made} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

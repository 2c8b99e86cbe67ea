"""The public calls of selfspec with what they cannot use: each is refused by a typed error, and none by a raw one."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.studies import profile_of
from selfspec import drafts
from selfspec.accept.relaxed import TopKTolerance, Typical
from selfspec.errors import SelfSpecError
from selfspec.serve.row_request import RowRequest
from selfspec.tools.calibrate.measurements import Measurements
from selfspec.tools.export import export_checkpoint
from selfspec.tools.train.recipe import Course
from selfspec.tools.verify.settings import Settings

NAN, INF = math.nan, math.inf
SHARED = Path(__file__).parent / "models" / "stories260K"


@cache
def _model() -> PreTrainedModel:
    return tiny.llama(dtype=torch.float32)


@dataclass
class Ground:
    model: Any
    spec: Any
    folder: Path


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(_model(), selfspec.wrap(_model(), "recycle", draft_length=3), tmp_path)


Call = Callable[[Ground], object]
# Of numbers that must be whole and positive; of those that are paths; of those that are truth values.
NO_COUNTS: list[Any] = [0, -1, 1.5, "3", "\uff13", True, NAN, None, [3], 2.0]
NO_PATHS: list[Any] = [3, None, b"x", True, 1.5, ["x"], "a\0b", object]
NO_NUMBERS: list[Any] = [NAN, INF, -INF, "0.5", None, True, [0.5], 1j]
NO_DRAFTERS: list[Any] = [None, 3, "exit:2", drafts.EarlyExit, True]
NO_MODELS: list[Any] = [None, 3, "gpt2", torch.nn.Linear(2, 2), drafts.EarlyExit(1), PreTrainedModel]

# Single calls, and calls with each of some values by what is called.
CALLS: dict[str, Call] = {}
GROUPS: dict[str, dict[str, Call]] = {"single calls": CALLS}


def _called(call: Callable[[Ground, Any], object], value: Any, ground: Ground) -> object:
    return call(ground, value)


def _field(name: str, make: Callable[[Ground], Callable[..., object]]) -> Callable[[Ground, Any], object]:
    return lambda ground, value: make(ground)(**{name: value})


def _each(name: str, values: list[Any], call: Callable[[Ground, Any], object], *allowed: Any) -> None:
    for number, value in enumerate(values):
        if not any(value is each for each in allowed):
            GROUPS.setdefault(name, {})[f"{number}: {value!r}"[:60]] = partial(_called, call, value)


# fmt: off
# Wrapping.
_each("wrap model", NO_MODELS, lambda g, v: selfspec.wrap(v))
_each("wrap draft", [3, drafts.EarlyExit, True, b"x", ["exit:2"], 1.5, "auto:\0", "head:" + "9" * 5000],
    lambda g, v: selfspec.wrap(g.model, v))
_each("wrap length", [*NO_COUNTS, "many"], lambda g, v: selfspec.wrap(g.model, "exit:2", draft_length=v), None)
_each("wrap accept", [3, True, b"x", ["token"], "x", 1.5, Typical], lambda g, v: selfspec.wrap(g.model, accept=v))
_each("wrap adapter", [3, 0, "llama", True, selfspec.Adapter], lambda g, v: selfspec.wrap(g.model, adapter=v))
_each("wrap runtime", [3, 0, "eager", True, selfspec.runtime.Eager], lambda g, v: selfspec.wrap(g.model, runtime=v))
_each("drafting", [3, drafts.EarlyExit, True, b"x"], lambda g, v: g.spec.drafting(v))
_each("drafting length", NO_COUNTS, lambda g, v: g.spec.drafting("exit:2", v), None)
_each("plain length", NO_COUNTS, lambda g, v: selfspec.wrap(g.model, draft_length=v), None)
ASKED: dict[str, Any] = {"inputs": tiny.prompt(5), "max_new_tokens": 3}
_each("stream length", NO_COUNTS, lambda g, v: g.spec.stream(**ASKED, draft_length=v), None)
_each("custom_generate length", NO_COUNTS,
    lambda g, v: g.model.generate(**ASKED, custom_generate=g.spec, draft_length=v), None)
_each("to", ["gpu", "cuda:99", 3, 1.5, None, "meta", True, b"cpu", "\uff13"],
    lambda g, v: selfspec.wrap(tiny.llama()).to(v))

# Loading within a budget.
_each("load path", NO_PATHS, lambda g, v: selfspec.load(v, "1GiB"))
_each("load missing", ["nowhere/at/all", "/nowhere"], lambda g, v: selfspec.load(v, "1GiB"))
_each("load empty", [None], lambda g, v: selfspec.load(g.folder, "1GiB"))
_each("load memory",
    [0, -1, 1.5, True, "", "6", "\uff16GiB", "6 GiB or so", b"6GiB", NAN, [6], 1, "1KiB", "9" * 400 + "GiB"],
    lambda g, v: selfspec.load(SHARED, v))
_each("load dtype",
    ["float31", "torch.float32", torch.int8, torch.complex64, torch.bool, torch.float8_e4m3fn, 32, True, float,
     torch.int64], lambda g, v: selfspec.load(SHARED, "1GiB", dtype=v))
_each("load device", ["gpu", "cuda:99", 3, 1.5, "meta", True, b"cpu", ["cpu"]],
    lambda g, v: selfspec.load(SHARED, "1GiB", device=v))
_each("load draft", [3, None, b"int8", 1.5, drafts.EarlyExit, "auto", "auto:profile.json", "x", ["int8"]],
    lambda g, v: selfspec.load(SHARED, "1GiB", draft=v))
_each("load context", [*NO_COUNTS, 2**70], lambda g, v: selfspec.load(SHARED, "1GiB", context=v), None)
_each("load cache", [3, True, "int4", "", b"exact", ["exact"]], lambda g, v: selfspec.load(SHARED, "1GiB", cache=v))

# Saving.
_each("save_pretrained", NO_PATHS, lambda g, v: g.spec.save_pretrained(v))
_each("save_pretrained tokenizer", [3, "gpt2", True, object()],
    lambda g, v: selfspec.wrap(g.model).save_pretrained(g.folder, tokenizer=v))

# Drafters.
_each("EarlyExit", [*NO_COUNTS, torch.tensor(2), tiny.DEPTH, 10**30],
    lambda g, v: selfspec.wrap(g.model, drafts.EarlyExit(v)))
for part in ("attention", "mlp", "layers"):
    _each(
        f"LayerSkip {part}",
        [3, None, "1", [1.5], ["1"], [True], [-1], [99], [1, 1], [None], [[1]], {1: 2}.items(), b"\1", "12",
         [10**30], range(10**12), itertools.count()],
        _field(part, lambda g: lambda **layers: selfspec.wrap(g.model, drafts.LayerSkip(**layers))),
    )
_each("LowPrecision bits", [2, 16, "8", 8.0, True, None, [8]], lambda g, v: drafts.LowPrecision(v))
_each("LowPrecision 8 bits in groups", [64, 128, 256], lambda g, v: drafts.LowPrecision(8, v))
_each("LowPrecision layers", [[], [1, 1], [-1], [99], ["1"], [1.5], [True], 3, "12", [None], {1: 2}.items()],
    lambda g, v: selfspec.wrap(g.model, drafts.LowPrecision(layers=v)))
_each("LowPrecision fewer", NO_COUNTS, lambda g, v: selfspec.wrap(g.model, drafts.LowPrecision(fewer=v)), None)
_each("LowPrecision head", [0, 1, None, "yes", [True]], lambda g, v: drafts.LowPrecision(head=v))
_each("PromptLookup shortest", [*NO_COUNTS, 99], lambda g, v: drafts.PromptLookup(shortest=v))
_each("PromptLookup longest", [*NO_COUNTS, 1, 10**9], lambda g, v: drafts.PromptLookup(longest=v))
_each("Suffixes most_bytes", [-1, 1.5, "3", True, NAN, None, 2**40], lambda g, v: drafts.Suffixes(most_bytes=v))
for name in ("candidates", "longest", "most_bytes"):
    _each(f"Recycling {name}", [*NO_COUNTS, 2**40], _field(name, lambda g: drafts.Recycling))
_each("ReducedVocabulary",
    [None, 3, "123", [], [1, 1], [1.5], ["1"], [True], [-1], [10**6], [2**70], [None], torch.tensor([1, 2]), True,
     object()], lambda g, v: selfspec.wrap(g.model, drafts.ReducedVocabulary(drafts.EarlyExit(2), v)))
_each(
    "ReducedVocabulary of", [*NO_DRAFTERS, drafts.PromptLookup()], lambda g, v: drafts.ReducedVocabulary(v, (1, 2))
)
_each("ReducedVocabulary.from_file", [*NO_PATHS, "nowhere"],
    lambda g, v: drafts.ReducedVocabulary.from_file(drafts.EarlyExit(2), v))
_each("ExitHead.from_pretrained", [*NO_PATHS, "nowhere"], lambda g, v: drafts.ExitHead.from_pretrained(v))
_each("LayerSkip.from_file", [*NO_PATHS, "nowhere"], lambda g, v: drafts.LayerSkip.from_file(v))
_each("Cascade first", [*NO_DRAFTERS, drafts.EarlyExit(1)], lambda g, v: drafts.Cascade(v, drafts.EarlyExit(2)))
_each("Cascade then", NO_DRAFTERS, lambda g, v: drafts.Cascade(drafts.PromptLookup(), v))
CALLS["wrap weights"] = lambda g: selfspec.wrap(tiny.llama().to("meta"))

# Rules, controls, costs, runtimes.
_each("Typical epsilon", [*NO_NUMBERS, -0.1, 1.5], lambda g, v: Typical(epsilon=v))
_each("Typical delta", [*NO_NUMBERS, -0.1], lambda g, v: Typical(delta=v))
_each("TopKTolerance top_k", NO_COUNTS, lambda g, v: TopKTolerance(top_k=v))
_each(
    "TopKTolerance tolerance", [NAN, -INF, "0.5", None, True, [0.5], 1j, -0.1], lambda g, v: TopKTolerance(tolerance=v)
)
_each("FixedLength", NO_COUNTS, lambda g, v: selfspec.FixedLength(v))
_each("FixedLength nodes", [*NO_COUNTS, 1, 2**40], lambda g, v: selfspec.FixedLength(3, v), None)
_each("CostAware", NO_COUNTS, lambda g, v: selfspec.CostAware(v))
_each("CostAware nodes", [*NO_COUNTS, 2**40], lambda g, v: selfspec.CostAware(3, nodes=v), None)
_each("CostAware costs", [3, 0.3, {}, {"draft": 0.3}, "x", selfspec.Costs], lambda g, v: selfspec.CostAware(costs=v))
_each("Costs", [*NO_NUMBERS, -0.1, -1], lambda g, v: selfspec.Costs(v))
for name, below in {"verify": [0.0, -1.0], "widening": [-0.1], "overhead": [], "each_row": [-0.1],
                    "out_of_step": [0.5]}.items():
    _each(f"Costs {name}", [*NO_NUMBERS, *below], _field(name, lambda g: partial(selfspec.Costs, 0.3)))
_each("Costs rows", NO_COUNTS, lambda g, v: selfspec.Costs(0.3, rows=v))
_each(
    "BatchCosts", [(), None, 3, "x", [0.3], (selfspec.Costs,), selfspec.Costs(0.3)], lambda g, v: selfspec.BatchCosts(v)
)
_each("Native", [-1, 1.5, "3", True, None, NAN], lambda g, v: selfspec.runtime.Native(after=v))
_each("CudaGraphs", [-1, 1.5, "3", True, None, NAN], lambda g, v: selfspec.runtime.CudaGraphs(after=v))
_each("CudaGraphs bucket", [1, 0, False, 8.0], lambda g, v: selfspec.runtime.CudaGraphs(0, v))

# Adapters.
_each("Adapter layers", [3, None, True, "model.nothing", "", b"x", "lm_head"],
    lambda g, v: selfspec.wrap(g.model, adapter=selfspec.Adapter(("llama",), layers=v)))
_each("Adapter attention", [3, None, True, "nothing", "", (), (3,)],
    lambda g, v: selfspec.wrap(g.model, adapter=selfspec.Adapter(("llama",), attention=v)))
_each("Adapter mlp", [3, None, True, "nothing", "", (3,)],
    lambda g, v: selfspec.wrap(g.model, adapter=selfspec.Adapter(("llama",), mlp=v)))
_each("Adapter layer_returns", NO_COUNTS,
    lambda g, v: selfspec.wrap(g.model, adapter=selfspec.Adapter(("llama",), layer_returns=v)))
_each("Adapter ragged", [3, None, "x", True],
    lambda g, v: selfspec.wrap(g.model, adapter=selfspec.Adapter(("llama",), ragged=v)))

# Profiles.
_each("Profile.load", [*NO_PATHS, "nowhere"], lambda g, v: selfspec.Profile.load(v))
_each("Profile.save", NO_PATHS, lambda g, v: profile_of(g.model).save(v))

# Serving.
_each("Engine spec", [*NO_MODELS, selfspec.SelfSpeculative], lambda g, v: selfspec.Engine(v))
for name in ("max_rows", "cache_bytes", "prefill_tokens", "max_waiting"):
    _each(
        f"Engine {name}",
        NO_COUNTS,
        _field(name, lambda g: partial(selfspec.Engine, selfspec.wrap(g.model))),
        *([None] if name == "cache_bytes" else []),
    )
CALLS["Engine relaxed"] = lambda g: selfspec.Engine(selfspec.wrap(g.model, accept="relaxed-typical"))


def _running(ground: Ground, call: Callable[[selfspec.Engine], object]) -> object:
    with selfspec.Engine(selfspec.wrap(ground.model)) as engine:
        return call(engine)


def _submitted(ground: Ground, **request: Any) -> object:
    options = {name: request.pop(name) for name in list(request) if name not in RowRequest.__dataclass_fields__}
    asked = {"input_ids": (1, 2), "max_new_tokens": 2, "options": {"do_sample": True, **options}, **request}
    return _running(ground, lambda engine: engine.submit(RowRequest(**asked)))


ROWS: dict[str, list[Any]] = {
    "input_ids": [(), [1, 2], (1,) * 500, None, 3, "12", (1.5,), (True,), (-1,), (99,), ("1",), (2**70,), ((1, 2),),
                  b"\1\2"],
    "max_new_tokens": [*NO_COUNTS, 10**6],
    "options": [None, 3, "x", [], {"stop_strings": ["a"]}, {"max_new_tokens": 3}, {3: 4}],
    "eos_token_id": ["1", [1.5], ["1"], [True], [2**70]],
    "logprobs": [-1, 1.5, "3", True, NAN, 10**6],
    "temperature": [-0.1, 1e-9, NAN, INF, "1", True, [1.0], 1j],
    "top_k": [-1, 1.5, "3", True, NAN],
    "top_p": [-0.1, 1.5, NAN, "0.5", True],
    "min_p": [-0.1, 1.5, NAN, "0.5", True],
    "seed": [1.5, "3", True, 2**64, NAN, [1]],
    "sequence_bias": [3, "x", {(99,): 1.0}, {(-1,): 1.0}, {(1,): NAN}, {1: 1.0}],
    "repetition_penalty": [0.0, -1.0, NAN, INF, "1", True],
    "logits_processor": [3, [3], "x", (None,), (object,)],
}
# What errors of a group say: requests name the field.
SAYS = {f"RowRequest {field}": field for field in ROWS if field != "input_ids"} | {
    "wrap model": "transformers model|a torch module", "wrap draft": "draft|cannot be read",
    "wrap length": "draft length", "wrap accept": "accept|choose one of", "wrap adapter": "adapter",
    "wrap runtime": "runtime",
    "EarlyExit": "exit layer", "LayerSkip attention": "attention|skip set", "LayerSkip mlp": "mlp|skip set",
    "LayerSkip layers": "layers|skip set", "PromptLookup shortest": "longest <= 64",
    "PromptLookup longest": "longest <= 64", "Cascade first": "cascade", "Cascade then": "cascade",
    "Recycling candidates": "1 to 64", "Recycling longest": "1 to 16", "Recycling most_bytes": "8192 to",
    "Suffixes most_bytes": "most_bytes must be an integer from 0 to", "FixedLength nodes": "at least its length, 3",
    "ReducedVocabulary": "must list token ids, at least one and none twice|token [0-9]+",
    "LowPrecision bits": "8 and 4",
    "LowPrecision head": "write True", "LowPrecision fewer": "give an EarlyExit or a LayerSkip",
    "LowPrecision layers": "at least one|list of layer numbers|out of range|layer",
    "CostAware": "draft length",
    "CostAware costs": "costs", "Costs": "draft", "BatchCosts": "costs",
} | {f"Costs {part}": part for part in ("verify", "widening", "overhead", "out_of_step", "rows", "each_row")}
for field, wrong in ROWS.items():
    _each(f"RowRequest {field}", wrong, _field(field, lambda g: partial(_submitted, g)))
_each("submit", [None, 3, {"input_ids": (1,)}, RowRequest], lambda g, v: _running(g, lambda engine: engine.submit(v)))
_each("on_event", [3, "x", True], lambda g, v: _running(g, lambda engine: engine.submit(RowRequest((1, 2), 2), v)))
CALLS["submit to what does not run"] = lambda g: selfspec.Engine(selfspec.wrap(g.model)).submit(RowRequest((1, 2), 2))
_each("stop timeout", ["3", NAN, -1.0, True, [1]], lambda g, v: selfspec.Engine(selfspec.wrap(g.model)).stop(timeout=v))

# Tools.
_each("ablate model", NO_MODELS, lambda g, v: selfspec.ablate(v, tiny.prompt(5)))
_each("ablate prompts",
    [None, 3, "text", [], [3], tiny.prompt(5)[0], tiny.prompt(5).float() + 0.5, torch.full((1, 5), 99),
     torch.full((1, 5), -1), ["a"]], lambda g, v: selfspec.ablate(g.model, v))
_each("ablate tokenizer", [3, "gpt2", True], lambda g, v: selfspec.ablate(g.model, ["a", "b"], tokenizer=v))
_each("ablate to", [3, b"x", True, "a\0b"],
    lambda g, v: selfspec.ablate(g.model, tiny.prompt(5), to=v, drafts=["exit:2"], confirm=0))
STUDIES: dict[str, list[Any]] = {
    "drafts": [3, [], [3], ["x"], "exit:99", None, ["exit:2", "exit:2"]],
    "draft_lengths": ["3", [], [0], [-1], [1.5], ["3"], [True], [2, 2]],
    "temperatures": ["x", [], [-1.0], [NAN], ["1"], [True], [0.0, 0.0]],
    "accept": [3, [], ["x"], [3], ["token", "token"]],
    "max_new_tokens": NO_COUNTS,
    "seed": [True, 2**63],
}
for field, wrong in STUDIES.items():
    _each(f"ablate {field}", wrong, _field(field, lambda g: partial(selfspec.ablate, g.model, tiny.prompt(5))))
for name in ("max_new_tokens", "longest_draft", "batch", "repeats"):
    _each(f"Measurements {name}", NO_COUNTS, _field(name, lambda g: Measurements))
_each("Measurements temperature", [*NO_NUMBERS, 0.0, -0.1], lambda g, v: Measurements(temperature=v))
_each("Measurements nodes", [-1, 1.5, "3", True, None, NAN, 257], lambda g, v: Measurements(nodes=v))
_each("Settings accept", [[], ["x"], ["token", "token"], [3], 3, "token"], lambda g, v: Settings(accept=v))
for name, fewest in {"max_new_tokens": 2, "draft_length": 1, "samples": 100}.items():
    _each(f"Settings {name}", [*NO_COUNTS, fewest - 1], _field(name, lambda g: Settings))
_each("Settings seed", [1.5, "3", None, NAN, [1], -1, 2**63], lambda g, v: Settings(seed=v))
for name in ("steps", "batch", "length", "save_every", "evaluate_every", "accumulate"):
    _each(f"Course {name}", NO_COUNTS, _field(name, lambda g: Course))
for name in ("warmup", "decay"):
    _each(f"Course {name}", [*NO_NUMBERS, -0.1], _field(name, lambda g: Course))
_each("Course learning_rate", [v for v in NO_NUMBERS if v is not None] + [-0.1],  # None: what suits the model's size
    _field("learning_rate", lambda g: Course))
CALLS["Course warmup and decay"] = lambda g: Course(warmup=0.8, decay=0.5)
_each("export to", NO_PATHS, lambda g, v: export_checkpoint(g.model, None, drafts.EarlyExit(2), v))
_each("export drafter", [3, "exit:2", drafts.PromptLookup()],
    lambda g, v: export_checkpoint(g.model, None, v, g.folder / "x"))
_each("export model", NO_MODELS, lambda g, v: export_checkpoint(v, None, drafts.EarlyExit(2), g.folder / "x"))
# fmt: on


def _other_than_refused(call: Call, ground: Ground, says: str) -> str | None:
    """What a call does that should be refused with certain words; None: it is."""
    try:
        call(ground)
    except SelfSpecError as refused:
        said = str(refused)
        return None if said.strip() and re.search(says, said) else f"refused with {said!r}"
    except Exception as error:
        return repr(error)
    return "accepted"


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.filterwarnings("ignore")
def test_what_a_call_cannot_use_is_refused_by_a_typed_error(name: str, ground: Ground) -> None:
    found = {value: _other_than_refused(call, ground, SAYS.get(name, "")) for value, call in GROUPS[name].items()}
    assert {value: what for value, what in found.items() if what} == {}

"""On the stand-in for an accelerator: the model's own text by every draft, one wait a round; and what it catches."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
import torch
from device.kit import Bench, Rows, Stage, main
from device.stages import STAGES
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedModel

import selfspec
from helpers import published_heads, tiny
from helpers.accelerator.device import Accelerator, Counts, present
from helpers.captures import ticking
from helpers.joints import PAIR, THREE, Warp, brief_joint, holm_rejects, network, p_value
from helpers.serving import assert_joining_rows_are_stock, small
from selfspec.decode.generation import Limits
from selfspec.decode.output import Round
from selfspec.device import HostCopy, backend, to_device
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import parse_draft
from selfspec.errors import UnsupportedOptionError
from selfspec.measure.costs import measure_costs
from selfspec.model.checkpoint import find_device
from selfspec.model.registry import find_adapter
from selfspec.placement.plan import Bandwidth
from selfspec.placement.weight_source import FromHost
from selfspec.placement.weight_stream import DeviceCopies
from selfspec.runtime import usual_runtime
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.runner import ModelRunner, RecordedRunner
from selfspec.tools.lab.arms import RUNTIMES, usual_runtime_name
from selfspec.tools.lab.runs import Runs

pytestmark = pytest.mark.accelerator

NEW = 14
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
SAMPLED: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 9,
    "seed": 1,
    "accept": "block",
    "eos_token_id": None,
}
# Sizes that kernels for fewer bits take.
SIZES = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, "vocab_size": 64}
NAMES = ["none", "exit:1", "skip:attn=1", "int8", "int4", "lookup", "recycle", "suffix", "lookup+exit:1"]
TREES = ["exit:1", "recycle", "suffix"]


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with present() as found:
        yield found


def model_on(accelerator: Accelerator, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = tiny.llama(**SIZES, **options).to(accelerator.device)
    return model


def prompts(accelerator: Accelerator, rows: int) -> Tensor:
    """Texts that repeat themselves, so that there is something to look up."""
    return tiny.prompt(4, rows, vocabulary=20).repeat(1, 3).to(accelerator.device)


@dataclass(frozen=True)
class CountedRound:
    committed: Round
    counts: Counts
    calls: int  # of functions of selfspec, in Python


def counted_rounds(accelerator: Accelerator, generation: Iterator[Round]) -> Iterator[CountedRound]:
    """Yield each round after the first with what it launched and waited for."""
    next(generation)
    called = list[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/selfspec/" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    while True:
        called.clear()
        with accelerator.counted() as counts:
            sys.setprofile(note)
            try:
                committed = next(generation, None)
            finally:
                sys.setprofile(None)
        if committed is None:
            return
        yield CountedRound(committed, counts, len(called))


def assert_one_wait(spec: selfspec.SelfSpeculative, accelerator: Accelerator, ids: Tensor, most: int = 1) -> None:
    """Check greedy text against the model's, and how often rounds wait, greedily and sampled."""
    expected = spec.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **GREEDY)
    for options in (GREEDY, SAMPLED):
        generation = spec.stream(ids, torch.ones_like(ids), max_new_tokens=NEW, **options)
        for each in counted_rounds(accelerator, generation):
            assert each.counts.waits <= most, each.counts.waited
        if options is GREEDY:
            assert torch.equal(generation.output().sequences, expected)


def captured(
    model: PreTrainedModel,
    name: str,
    ids: Tensor,
    limits: Limits | None = None,
    length: int | selfspec.FixedLength = 3,
    options: dict[str, Any] = GREEDY,
) -> GraphCache:
    """Check text of passes that are captured, and that later ones all are; give their programs."""
    runtimes = selfspec.runtime.CudaGraphs(after=0, bucket=64), selfspec.runtime.Eager()
    spec, eager = (selfspec.wrap(model, parse_draft(name), draft_length=length, runtime=each) for each in runtimes)
    spec.limits = eager.limits = limits
    spec.programs = GraphCache(spec.runtime, ticking())
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, **options}
    if options["do_sample"] or (limits is not None and limits.cache == "int8"):
        expected = eager.generate(ids, **options).sequences
    else:
        expected = model.generate(ids, **options)
    with pytest.MonkeyPatch.context() as patch:
        for more in range(4):
            if more == 3:
                patch.setattr(RecordedRunner, "_run_stock", lambda *_: pytest.fail("modules ran a pass"))
            assert torch.equal(spec.generate(ids, **options).sequences, expected)
    assert not spec.programs.refusals
    return spec.programs


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("name", "length"),
    [*((name, 3) for name in NAMES), *((name, selfspec.FixedLength(3, nodes=7)) for name in TREES)],
    ids=str,
)
def test_greedy_text_is_the_models_own_and_a_round_waits_once(
    accelerator: Accelerator, name: str, length: int | selfspec.FixedLength, rows: int
) -> None:
    model, draft = model_on(accelerator), parse_draft(name)
    spec = selfspec.wrap(model, draft, draft_length=length, runtime=selfspec.runtime.Eager())
    assert_one_wait(spec, accelerator, prompts(accelerator, rows), most=1)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["exit:1", "int8"])
def test_the_default_control_waits_once_more_a_round(accelerator: Accelerator, name: str, rows: int) -> None:
    # Of drafts so cheap that they are long.
    control = selfspec.CostAware(costs=selfspec.Costs(draft=0.02))
    model, draft = model_on(accelerator), parse_draft(name)
    spec = selfspec.wrap(model, draft, draft_length=control, runtime=selfspec.runtime.Eager())
    assert_one_wait(spec, accelerator, prompts(accelerator, rows), most=2)


def test_substitutes_of_all_layers_are_compared_in_one_wait(accelerator: Accelerator) -> None:
    ids, waits = prompts(accelerator, 1), []
    for layers in (2, 4):
        model = tiny.llama(**(SIZES | {"num_hidden_layers": layers})).to(accelerator.device)
        spec = selfspec.wrap(model, "int8", draft_length=3, runtime=selfspec.runtime.Eager())
        for _ in range(2):
            with accelerator.counted() as counts:
                spec.generate(ids, max_new_tokens=NEW, **GREEDY)
        waits.append(sum("model/substitutes" in each for each in counts.waited))
    # The layers', and the head's.
    assert waits == [2, 2]


@pytest.mark.parametrize("kind", published_heads.FAMILIES)
def test_heads_draft_without_a_wait_of_their_own(accelerator: Accelerator, tmp_path: Path, kind: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.to(accelerator.device)
    ids = prompts(accelerator, 2).clamp(max=19)
    spec = selfspec.wrap(model, draft, draft_length=3, runtime=selfspec.runtime.Eager())
    if kind.startswith("mtp"):
        # Its experts are chosen by values, and whoever chooses them waits.
        options = {"max_new_tokens": NEW, "attention_mask": torch.ones_like(ids), **GREEDY}
        assert torch.equal(spec.generate(ids, **options).sequences, model.generate(ids, **options))
        return
    assert_one_wait(spec, accelerator, ids)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("none", {}),
        ("exit:1", {}),
        ("int8", {}),
        ("exit:1", {"length": selfspec.FixedLength(3, nodes=7)}),
        ("int8", {"options": SAMPLED}),
        ("lookup", {"limits": Limits(256, 64, "int8")}),
    ],
    ids=["plain", "exit", "8 bits", "tree", "sampled", "cache in 8 bits"],
)
def test_all_passes_are_captured_and_give_the_text_of_the_modules(
    accelerator: Accelerator, name: str, options: dict[str, Any]
) -> None:
    assert captured(model_on(accelerator), name, prompts(accelerator, 1), **options).proved


# The most operations of a sampled round outside of graphs, and calls of functions of selfspec, by which the host's time
# is bounded. A draft of seven tokens by single launches took 336 operations.
OPERATIONS, CALLS = {"none": 15, "int8": 50}, {"none": 330, "int8": 950}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_sampled_round_launches_few_operations_outside_of_graphs(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ids, options = prompts(accelerator, 1), SAMPLED | {"max_new_tokens": 24}
    control = selfspec.CostAware(costs=selfspec.Costs(draft=0.02))
    runtime = selfspec.runtime.CudaGraphs(bucket=64)
    spec = selfspec.wrap(model_on(accelerator), parse_draft(name), draft_length=control, runtime=runtime)
    spec.programs = GraphCache(runtime, ticking())
    for _ in range(2):
        sampled = spec.generate(ids, **options).sequences
    rounds = [*counted_rounds(accelerator, spec.stream(ids, **options))]
    longest = max(len(each.committed.rows[0].draft) for each in rounds)
    assert longest == (0 if name == "none" else 7)
    # Shorter drafts came too seldom.
    whole = [each for each in rounds if len(each.committed.rows[0].draft) == longest]
    assert max(each.counts.launches for each in whole) <= OPERATIONS[name]
    # The second round of a text makes what later ones find.
    assert median(each.calls for each in whole) <= CALLS[name]
    # The tokens are those of single steps and of torch's own operations.
    monkeypatch.setattr(RecordedRunner, "chain", lambda *_: None)
    monkeypatch.setattr(RecordedRunner, "repeat", ModelRunner.repeat)
    assert torch.equal(spec.generate(ids, **options).sequences, sampled)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["none", "exit:1"])
def test_keys_on_the_host_are_waited_for_by_nobody_and_read_by_captured_passes(
    accelerator: Accelerator, name: str, rows: int
) -> None:
    model, ids, limits = model_on(accelerator), prompts(accelerator, rows), Limits(256, 64, "host")
    spec = selfspec.wrap(model, parse_draft(name), draft_length=3, runtime=selfspec.runtime.Eager())
    spec.limits = limits
    # Where a row has ended, another moves to its place.
    assert_one_wait(spec, accelerator, ids, most=rows)
    assert all(kind.kept == "host" for kind in captured(model, name, ids, limits).proved)


class Copies(DeviceCopies):
    """Answers what a budget asks of a device: how much memory it has; nothing is streamed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def device_bytes(self) -> int:
        return 2**50


def test_what_fits_a_budget_is_captured_as_without_one(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FromHost(Copies(accelerator.device))
    monkeypatch.setattr(source, "bandwidth", lambda *_: Bandwidth(1e9, 1e8))
    monkeypatch.setattr("selfspec.api.source_for", lambda _: source)
    model, ids = tiny.llama(**SIZES), prompts(accelerator, 1)
    model.save_pretrained(tmp_path)
    spec = selfspec.load(tmp_path, 2**30, context=64, device=accelerator.device, draft="exit:1")
    assert spec.runtime == selfspec.wrap(model.to(accelerator.device)).runtime == usual_runtime([accelerator.device])
    assert RUNTIMES[usual_runtime_name(accelerator.device)] is type(spec.runtime) is selfspec.runtime.CudaGraphs
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, **GREEDY)
    assert torch.equal(spec.generate(ids, max_new_tokens=48, **GREEDY).sequences, expected)
    assert not spec.programs.refusals
    assert spec.programs.proved


@pytest.mark.parametrize("name", ["exit:1", "recycle"])
def test_where_memory_runs_out_the_model_is_as_it_was_and_the_next_call_is_right(
    accelerator: Accelerator, name: str
) -> None:
    model, ids = model_on(accelerator), prompts(accelerator, 2)
    spec = selfspec.wrap(model, parse_draft(name), draft_length=3, runtime=selfspec.runtime.Eager())
    options: dict[str, Any] = {"max_new_tokens": 5, **GREEDY}
    # Until nothing more is learnt from this text, so that every call asks for as much.
    for _ in range(3):
        with accelerator.counted() as counts:
            expected = spec.generate(ids, **options).sequences.tolist()
    state = {key: value.data_ptr() for key, value in model.state_dict().items()}
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    every = max(counts.allocations // 12, 1)
    for number in count(1, every):
        if number > counts.allocations:
            break
        before = accelerator.allocated
        with accelerator.counted():
            accelerator.fails_at = number
            with pytest.raises(torch.OutOfMemoryError):
                spec.generate(ids, **options)
            accelerator.fails_at = None
            gc.collect()
        assert accelerator.allocated == before
        assert {key: value.data_ptr() for key, value in model.state_dict().items()} == state
        assert [module.__dict__.get("forward") for module in model.modules()] == forwards
    assert spec.generate(ids, **options).sequences.tolist() == expected


# Joined by others, and drawn from the joint.


def test_rows_that_join_and_leave_are_what_they_are_alone(accelerator: Accelerator) -> None:
    spec = selfspec.wrap(small().to(accelerator.device), "recycle", draft_length=2, runtime=selfspec.runtime.Eager())
    assert_joining_rows_are_stock(spec, [(1, 2, 3), (4, 5), (6, 7, 8, 9)])


def test_sampled_text_follows_the_joint(accelerator: Accelerator) -> None:
    warp, on_host = Warp(temperature=0.8), network()
    joint = brief_joint(on_host, warp)
    ids = torch.tensor([PAIR] * 1500).to(accelerator.device)
    options: dict[str, Any] = {
        "max_new_tokens": THREE,
        "eos_token_id": None,
        "pad_token_id": 0,
        **warp.options,
    }
    found = {}
    for rule, length in (("token", selfspec.FixedLength(2, nodes=4)), ("block", 2), ("coupled", 2)):
        model, runtime = network().to(accelerator.device), selfspec.runtime.Eager()
        spec = selfspec.wrap(model, "exit:1", draft_length=length, accept=rule, runtime=runtime)
        drawn = spec.generate(ids, torch.ones_like(ids), seed=1, **options).sequences[:, len(PAIR) :]
        found[rule] = p_value(map(tuple, drawn.tolist()), joint)
    assert holm_rejects(found, 0.01) == []


# The stand-in catches what a device would punish: each planted bug is seen.

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda found: found[0].item(),
    "tolist": lambda found: found.tolist(),
    "bool": lambda found: bool(found[0] > 0),
    "nonzero": lambda found: found.nonzero(),
    "chosen by a mask": lambda found: found[found > 0],
    "written by a mask": lambda found: found.index_put_((found > 0,), torch.tensor(0.0)),
    "copied into": lambda found: torch.empty(4).copy_(found),
    "made from numbers": lambda found: torch.tensor([1], device=found.device),
    "chosen by places of the host": lambda found: found[torch.tensor([0, 1])],
    "copied from memory that is not locked": lambda found: torch.zeros(4).to(found.device, non_blocking=True),
}
MIXES: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda found: found + torch.ones(4),
    "mask": lambda found: found.masked_fill(torch.ones(4, dtype=torch.bool), 0.0),
    "rows": lambda found: found.index_select(0, torch.tensor([0])),
    "embedding": lambda found: embedding(torch.tensor([0]), found[:, None]),
    "one after the other": lambda found: torch.cat([found, torch.ones(4)]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_who_reads_waits(accelerator: Accelerator, read: Callable[[Tensor], Any]) -> None:
    found = torch.ones(4, device=accelerator.device)
    assert accelerator.counts.waits == 0
    read(found)
    assert accelerator.counts.waits >= 1


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_the_hosts_tensors_do_not_mix_with_the_devices(accelerator: Accelerator, mix: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(4, device=accelerator.device))


def test_what_was_copied_without_waiting_is_nonsense_until_somebody_waits(accelerator: Accelerator) -> None:
    found = torch.arange(4, device=accelerator.device)
    late, values = found.to("cpu", non_blocking=True), found.double().to("cpu", non_blocking=True)
    assert late.tolist() != [0, 1, 2, 3]
    assert values.isnan().all()
    backend(accelerator.device).current_stream().synchronize()
    assert late.tolist() == values.tolist() == [0, 1, 2, 3]


def test_what_was_asked_for_before_somebody_waited_is_there_without_another_wait(accelerator: Accelerator) -> None:
    found = torch.arange(3, device=accelerator.device)
    early, late = HostCopy(found), found + 1
    late.tolist()
    with accelerator.counted() as counts:
        assert early.read().tolist() == [0, 1, 2]
    assert counts.waits == 0
    with accelerator.counted() as counts:
        assert HostCopy(late).read().tolist() == [1, 2, 3]
    assert counts.waits == 1


def test_memory_that_a_copy_still_reads_is_not_changed(accelerator: Accelerator) -> None:
    source = torch.zeros(4, pin_memory=True)
    found = source.to(accelerator.device, non_blocking=True)
    source.fill_(1.0)
    with pytest.raises(AssertionError, match="still to read"):
        found.tolist()


def test_memory_is_counted_and_runs_out_where_it_is_told_to(accelerator: Accelerator) -> None:
    before = accelerator.allocated
    found = torch.zeros(100, device=accelerator.device)
    view = found[10:]
    del found
    assert accelerator.allocated - before == 400
    del view
    assert accelerator.allocated == before
    accelerator.fails_at = accelerator.counts.allocations + 2
    kept = [torch.zeros(1, device=accelerator.device)]
    with pytest.raises(torch.OutOfMemoryError):
        kept.append(torch.zeros(1, device=accelerator.device))
    accelerator.capacity = accelerator.allocated + 3
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1, device=accelerator.device)


class _Captured:
    def __init__(self, accelerator: Accelerator, launch: Callable[[Tensor], Tensor], given: Tensor) -> None:
        module = backend(accelerator.device)
        self.graph = module.CUDAGraph()
        with module.stream(module.Stream()):
            self.graph.capture_begin(pool=module.graph_pool_handle())
            try:
                self.output = launch(given)
            finally:
                self.graph.capture_end()


def test_a_graph_computes_from_what_lies_at_its_addresses(accelerator: Accelerator) -> None:
    given = torch.ones(3, device=accelerator.device)
    captured = _Captured(accelerator, lambda found: found.add_(1) * 2, given)
    assert given.tolist() == [1.0] * 3
    assert captured.output.isnan().all()
    given.copy_(torch.tensor([5.0, 6.0, 7.0]))
    captured.graph.replay()
    assert captured.output.tolist() == [12.0, 14.0, 16.0]
    assert given.tolist() == [6.0, 7.0, 8.0]


@pytest.mark.parametrize(
    "launch",
    [
        lambda found: found * found.sum().item(),
        lambda found: found[found > 0],
        lambda found: found + torch.tensor([1.0, 2.0, 3.0], device=found.device),
        lambda found: found + to_device([1.0, 2.0, 3.0], found.device),
    ],
    ids=["a value", "a mask", "numbers", "numbers in locked memory"],
)
def test_a_capture_refuses_what_a_graph_cannot_repeat(
    accelerator: Accelerator, launch: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        _Captured(accelerator, launch, torch.ones(3, device=accelerator.device))


def test_once_it_is_gone_no_device_of_a_number_is_found() -> None:
    with present():
        pass
    with pytest.raises(UnsupportedOptionError, match="not available here"):
        find_device(3)


def test_what_rounds_cost_is_measured_there_by_graphs(accelerator: Accelerator) -> None:
    model = model_on(accelerator)
    base = selfspec.wrap(model, runtime=selfspec.runtime.CudaGraphs(after=0))
    draft = parse_draft("exit:1")
    assert isinstance(draft, LayerPathDrafter)
    how: dict[str, Any] = {"widths": (1, 4), "context": 16, "repeats": 1, "lengths": (3,), "base": base}
    costs = measure_costs(model, find_adapter(model), [draft], **how)
    assert costs.draft["exit:1"].value > 0
    assert {*costs.verify["none"]} == {1, 4}
    assert base.programs.proved


# The kit for a device, from stage to stage: of each a case or two, in miniature.

STORIES = str(Path(__file__).resolve().parents[1] / "models" / "stories260K")
# All others take minutes here.
CHOSEN = {
    "first": ["graphs, exit"],
    "pieces": ["products, 8 bits", "products, 4 bits", "attention of blocks", "attention over new lengths"],
    "waits": ["graphs, exit:2, 3 tokens, greedy"],
}


def chosen(stage: str, bench: Bench) -> dict[str, Callable[[], Rows]]:
    cases = STAGES[stage].cases(bench)
    return {name: cases[name] for name in CHOSEN[stage]}


@pytest.mark.usefixtures("verbosity_as_before")
def test_the_kit_runs_from_stage_to_stage(accelerator: Accelerator, tmp_path: Path) -> None:
    stages = {name: Stage(STAGES[name].about, 1, partial(chosen, name)) for name in CHOSEN}
    words = ["--device", str(accelerator.device), "--miniature", "--model", STORIES, "--to", str(tmp_path)]
    assert main(stages, words) == 0
    rows = Runs(tmp_path).measured("device")
    for stage, names in CHOSEN.items():
        assert list(dict.fromkeys(row["case"] for row in rows if row["stage"] == stage)) == names
    # It lacks what is CUDA's alone, and no case as a whole.
    assert {row["device"] for row in rows} == {"stand-in"}
    assert not any("error" in row for row in rows)
    assert "FAILED" not in (tmp_path / "summary.md").read_text()

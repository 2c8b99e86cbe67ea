"""CUDA graphs: capture the kernels of a pass once and launch them together, without Python or single launches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor, nn

from selfspec.cache.cursors import BUCKET, MOST_GRAPHS, WIDEST_ROUND
from selfspec.device import backend, has_graphs, on_host
from selfspec.errors import UnsupportedOptionError
from selfspec.kernels.trial import runs_triton
from selfspec.model.gated_view import ExactStates
from selfspec.process import ProcessLock
from selfspec.runtime.few_rows import for_noting
from selfspec.runtime.model_state import run_watched
from selfspec.runtime.pass_function import PassFunction, PassKind, PassTensors
from selfspec.runtime.request import Chain, ChainStep, Choice, Draws, Races
from selfspec.runtime.runtime import (
    LATER,
    RECORDING,
    TRIALS,
    Function,
    OtherSizesError,
    RecordingError,
    Runtime,
    close,
    equal,
)

_LOG = logging.getLogger(__name__)

Launch = Callable[[], tuple[Tensor, ...]]
"""Run a pass over tensors at fixed addresses, and return its outputs."""


@dataclass(frozen=True)
class CudaGraphs(Runtime):
    """Runs passes as CUDA graphs, for models on a CUDA device.

    A graph repeats kernels on the memory it was captured on. Tokens, positions and states are copied to its inputs;
    keys and values are read from the cache itself, so a graph is valid while the cache keeps its address, and the slots
    of the last text stay in memory for the next one, until the wrapper is unwrapped or rows are others. Passes read a
    multiple of `bucket` slots and mask those past a row's end, so one graph serves many lengths, and a short text does
    not attend over all slots. Where Triton runs, patterns of operations are joined to one kernel each. A graph is used
    only after it has given what it captured bit for bit, and the modules' result up to rounding.

    Attributes:
        after: number of passes of a kind that run without a graph first.
        bucket: the number of visible slots is a multiple of this.
    """

    after: int = 2
    bucket: int = BUCKET
    _recorders: dict[torch.device, Recorder] = field(init=False, default_factory=dict, compare=False, repr=False)
    # A few tokens take a device as long as one token, and each width would need its own graphs.
    widths = (1, WIDEST_ROUND // 2, WIDEST_ROUND)
    captures = True

    def __post_init__(self) -> None:
        for name, value, least in (("after", self.after, 0), ("bucket", self.bucket, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UnsupportedOptionError(f"{name} must be an integer of at least {least}, got {value!r}")

    def check(self, device: torch.device) -> None:
        if not has_graphs(device):
            raise UnsupportedOptionError(
                f"CudaGraphs runs models on a CUDA device, and this one is on {device}; move it there, or leave the "
                "runtime out"
            )

    def is_tried(self, lengths: Sequence[int]) -> bool:
        return len(lengths) >= TRIALS

    def takes(self, example: PassTensors) -> bool:
        # An encoder's output is large, and has another address in each generation.
        return example.source is None

    def prepared(self, model: nn.Module) -> nn.Module:
        return for_noting(model) if any(runs_triton(each.device) for each in model.parameters()) else model

    def agree(self, kind: PassKind, given: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
        # A capture gave the bits of what it captured: of modules, or of kernels that join what modules launch.
        return close(given, expected)

    def program(self, function: Function, example: PassTensors) -> Function:
        tensors, device = example.flat(), example.tokens.device
        # An operation that waits for the device would make a capture fail half-way.
        expected = run_watched(lambda: function(tensors))
        if isinstance(function, PassFunction) and runs_triton(device) and function.dtype in _FUSED:
            # What a pass copies from the host, and leaves for it, is not noted.
            function = function if function.kind.kept == "host" else _fused(function, tensors, expected)
        return _Graphs(function, len(example.slots.buffers), self._recorder(device))

    def repeated(self, function: Function, device: torch.device) -> Function:
        return _Graphs(function, 0, self._recorder(device), self._recorder(device).places)

    def chain(self, program: Function, first: PassTensors, draws: Draws | Races) -> Chain | None:
        # What steps copy from the host changes from step to step.
        moves = any(on_host(each.device) for each in first.slots.buffers)
        if isinstance(draws, Draws) or moves:
            return None
        assert isinstance(program, _Graphs)
        return program.chain(first, draws)

    def of_one_model(self) -> CudaGraphs:
        return replace(self)

    def _recorder(self, device: torch.device) -> Recorder:
        if device not in self._recorders:
            self._recorders[device] = self.recorder(device)
        return self._recorders[device]

    def recorder(self, device: torch.device) -> Recorder:
        """Make a recorder of launches on a device."""
        return Recorder(device)


# Dtypes whose passes are joined to few launches.
_FUSED = (torch.float32, torch.float16, torch.bfloat16)


def _fused(function: PassFunction, tensors: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> Function:
    """Return a pass in few launches if it gives the expected; else the pass as it is, and a warning says why."""
    # Triton is not installed everywhere.
    from selfspec.runtime.fused import FusedPass

    fused = FusedPass(function)
    try:
        failure = None if close(fused(tensors), expected) else "gave something else than the stock modules"
    except torch.OutOfMemoryError:
        raise
    # Operations that cannot be noted, compilers and drivers raise many types of errors.
    except Exception as error:
        failure = f"failed: {error}"
    if failure is None:
        return fused
    _LOG.warning("a pass in few launches %s; its modules are captured as they are", failure)
    return function


class Recorder:
    """Captures the passes of one model, which share a stream, and memory for intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, backend(device)
        self._lock = ProcessLock()
        self.places = SharedPlaces()
        with self._backend.device(device):
            self._pool = self._backend.graph_pool_handle()
            self._stream = self._backend.Stream()
            self._done = self._backend.Event()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Order launches after all earlier work, on any stream: they write to the same memory."""
        with self._lock, self._backend.device(self._device):
            current = self._backend.current_stream()
            current.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(current)

    def warmed(self, launch: Launch) -> tuple[Tensor, ...]:
        """Launch once on the capturing stream, so that kernels do their set-up before the capture."""
        current = self._backend.current_stream()
        self._stream.wait_stream(current)
        with self._backend.stream(self._stream):
            outputs = launch()
        current.wait_stream(self._stream)
        # The outputs were made on the other stream and are read on this one. Wait for this stream alone: while another
        # thread captures, no thread may wait for the whole device.
        current.synchronize()
        return outputs

    def record(self, launch: Launch) -> Recording:
        """Capture the launches; nothing runs before the first replay."""
        graph = self._backend.CUDAGraph()
        with self._backend.stream(self._stream):
            # "thread_local" lets other threads work meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = launch()
            finally:
                graph.capture_end()
        return Recording(graph.replay, outputs)


@dataclass(frozen=True)
class Recording:
    """A captured graph: `replay` launches its kernels, which read `inputs` and write to `outputs`."""

    replay: Callable[[], None]
    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...] = ()

    def read(self, tensors: tuple[Tensor, ...]) -> None:
        for static, tensor in zip(self.inputs, tensors, strict=True):
            static.copy_(tensor)

    def run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.read(tensors)
        self.replay()
        # The next replay writes to the same memory.
        return tuple(output.clone() for output in self.outputs)


class SharedPlaces:
    """Lets graphs that run one after the other have their inputs in the same memory."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, torch.dtype], Tensor] = {}

    def of(self, number: int, tensor: Tensor) -> Tensor:
        """Return a copy of the input of some number."""
        key, size = (number, tensor.dtype), tensor.numel()
        if key not in self._places or self._places[key].numel() < size:
            # Powers of two, so that inputs that grow by a token each leave few places behind.
            self._places[key] = tensor.new_empty(1 << (size - 1).bit_length() if size else 0)
        return self._places[key][:size].view(tensor.shape).copy_(tensor)


def _stepping(function: Function, races: Races) -> Function:
    """Return a draft step over its inputs and memory, which overwrites the inputs by those of the next step."""
    draw, is_drawn = races.drawn, races.race is not None

    def step(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        lots, tokens, slots, positions, *rest = tensors
        logits, *states = function((tokens, slots, positions, *rest))
        drawn = draw(logits, (lots,) if is_drawn else ())
        tokens.copy_(drawn.token)
        slots.add_(1)
        positions.add_(1)
        return (*(() if drawn.q is None else (drawn.q,)), drawn.token, drawn.confidences, *states)

    return step


class _Graphs:
    """Holds the graphs of one kind of pass; it is called like the pass, whose last `held` tensors stay in place."""

    def __init__(self, function: Function, held: int, recorder: Recorder, places: SharedPlaces | None = None) -> None:
        self._function = function
        self._places = places
        self._held = held
        self._recorder = recorder
        self._graphs: dict[object, Recording] = {}
        self._lock = ProcessLock()
        # By how tokens are chosen; where that failed, the number of chains after which it is tried again.
        self._chains: dict[Choice, _Graphs | float] = {}

    def __call__(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with self._lock, self._recorder.turn():
            return self._graph(tensors).run(tensors[: len(tensors) - self._held])

    def _graph(self, tensors: tuple[Tensor, ...]) -> Recording:
        inputs, memory = tensors[: len(tensors) - self._held], tensors[len(tensors) - self._held :]
        # Other addresses, shapes or numbers of slots need another graph.
        key = (*(tensor.shape for tensor in inputs), *((tensor.data_ptr(), tensor.shape) for tensor in memory))
        graph = self._graphs.pop(key, None) or self._recorded(inputs, memory)
        self._graphs[key] = graph
        if len(self._graphs) > MOST_GRAPHS:
            # Drop the least recently used.
            del self._graphs[next(iter(self._graphs))]
        return graph

    def chain(self, first: PassTensors, races: Races) -> Chain | None:
        """Take draft steps by graphs of a pass and the draw after it, which leaves what the next step reads."""
        steps, rows = self._chains.pop(races.choice, 0), first.tokens.shape[0]
        if not isinstance(steps, _Graphs):
            if steps > 0:
                self._chains[races.choice] = steps - 1
                return None
            steps = _Graphs(_stepping(self._function, races), self._held, self._recorder)
        self._chains[races.choice] = steps
        if len(self._chains) > MOST_GRAPHS:
            del self._chains[next(iter(self._chains))]
        device, vocabulary = first.tokens.device, 0 if races.race is None else races.vocabulary
        tensors = (torch.empty(rows, 1, vocabulary, device=device), *first.flat())
        if races.race is not None:
            races.race(0, tensors[0])
        try:
            with steps._lock, self._recorder.turn():
                graph = steps._graph(tensors)
        except (RuntimeError, OtherSizesError) as error:
            self._chains[races.choice] = LATER if isinstance(error, torch.OutOfMemoryError) else math.inf
            _LOG.warning("draft steps could not be captured with their draws: %s", error)
            return None
        probs = None if races.race is None else torch.empty(rows, races.steps, vocabulary, device=device)
        return Chain(probs, steps._steps(graph, tensors[: len(tensors) - self._held], races, probs))

    def _steps(
        self, graph: Recording, inputs: tuple[Tensor, ...], races: Races, probs: Tensor | None
    ) -> Generator[ChainStep, None, None]:
        # Between its steps nobody else may write to the graph's inputs.
        with self._lock:
            for step in range(races.steps):
                if step and races.race is not None:
                    races.race(step, graph.inputs[0])
                with self._recorder.turn():
                    if not step:
                        graph.read(inputs)
                    graph.replay()
                    outputs = iter(graph.outputs)
                    if probs is not None:
                        probs[:, step : step + 1].copy_(next(outputs))
                    token, confidences, *others = (output.clone() for output in outputs)
                states = None
                if races.leaves is not None:
                    states = ExactStates(others[0], dict(zip(races.leaves, others[1:], strict=True)))
                yield ChainStep(token, confidences, states)

    def _recorded(self, inputs: tuple[Tensor, ...], memory: tuple[Tensor, ...]) -> Recording:
        # Slots on the host stay in place, too.
        if len({tensor.device for tensor in (*inputs, *memory) if not on_host(tensor.device)}) > 1:
            raise RecordingError("the model is on several devices, and a graph covers one")
        # Later tensors may be made in inference mode or not.
        with torch.inference_mode(False):
            if self._places is None:
                static = tuple(tensor.clone() for tensor in inputs)
            else:
                static = tuple(map(self._places.of, count(), inputs))

        def launch() -> tuple[Tensor, ...]:
            return self._function((*static, *memory))

        try:
            with RECORDING:
                expected = self._recorder.warmed(launch)
                graph = replace(self._recorder.record(launch), inputs=static)
        except (OtherSizesError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise RecordingError(f"capturing it failed: {error}") from error
        if not equal(graph.run(inputs), expected):
            raise RecordingError("its graph gave other bits than its modules")
        return graph

"""Judge draft paths on given text without generating: every token is read as a draft step reads it, layer by layer.

Given the committed tokens, whether each was drafted and accepted is a separate chance: min(1, q/p) under rejection
sampling token by token, 0 or 1 greedily. So the expected counts of a generation follow exactly from a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from selfspec.architecture import Adapter, takes
from selfspec.compat import cache_argument
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.drafter import Drafter
from selfspec.errors import UnsupportedModelError, UnsupportedOptionError
from selfspec.measure.estimate import Estimate
from selfspec.measure.stock import Continuation
from selfspec.model.early_head import DraftHead
from selfspec.model.gated_view import ExactStates, FeatureTap, GatedModel, Point
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers
from selfspec.model.substitutes import Substitutes
from selfspec.model.view import hidden_states
from selfspec.runtime.pass_function import model_inputs
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

Parts = frozenset[Part]
"""Sublayers of one layer that a path runs."""

WHOLE: Parts = frozenset(Part)
NOTHING: Parts = frozenset()

# How far logits of the whole network may be off when they are computed as a draft step's: rounding, and no more.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 1.0, torch.float16: 0.25}


class Readout:
    """Reads what a stock model's exits would say, with gradients; the model is not changed."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        self._layers = adapter.decoder_layers(model)
        self.depth = len(self._layers)
        first = Sublayer(0, Part.ATTENTION)
        # No layer runs, and states given at the first come out at the norm and the head.
        self._head = GatedModel(model, adapter, LayerPath.up_to(self.depth, first).resumed_at(first))

    @contextmanager
    def recorded(self, exits: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Yield the states at each exit, `[batch, tokens, hidden]`, filled in as passes run inside the `with` block."""
        states: dict[int, Tensor] = {}

        def record(exit_layer: int, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[exit_layer] = hidden_states(args, kwargs)

        with ExitStack() as hooks:
            for each in exits:
                hooks.enter_context(
                    self._layers[each].register_forward_pre_hook(partial(record, each), with_kwargs=True)
                )
            yield states

    def logits(self, states: Tensor) -> Tensor:
        """Apply the model's norm and head to states `[batch, tokens, hidden]`; return `[batch, tokens, vocab]`."""
        tokens = torch.zeros(states.shape[-3:-1], dtype=torch.long, device=states.device)
        self._head.enter(ExactStates(states))
        logits: Tensor = self._head.module(input_ids=tokens, use_cache=False).logits
        self._head.enter(None)
        return logits


def parts_run(path: LayerPath) -> tuple[Parts, ...]:
    """Return the parts of each layer that a path runs, first to last."""
    return tuple(frozenset(part for part in Part if path.runs(Sublayer(layer, part))) for layer in range(path.depth))


class LayerViews:
    """Views of a model's single layers, each made once, and its norm and head. The model is neither changed nor copied.

    Raises:
        UnsupportedModelError: tokens of this architecture cannot be read apart from each other.
    """

    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        if adapter.recurrent or adapter.publishes is not None:
            raise UnsupportedModelError(
                f"acceptance of skip sets cannot be estimated for {type(model).__name__}: its layers keep states or "
                "share keys and values; measure it by generation"
            )
        self.model = model
        self.adapter = adapter
        self.readout = Readout(model, adapter)
        self.depth = self.readout.depth
        self.base = adapter.base(model)
        self.takes_positions = takes(model, "position_ids")
        self._layers: dict[tuple[int, Parts], GatedModel] = {}

    def layer(self, index: int, parts: Parts) -> GatedModel:
        """Return a view that runs some parts of one layer, passes through all others, and keeps the last states."""
        if (index, parts) not in self._layers:
            runs = {Sublayer(index, part) for part in parts}
            first = Sublayer(index, Part.ATTENTION)
            left_out = [each for each in sublayers(self.depth) if each >= first and each not in runs]
            gated = GatedModel(self.model, self.adapter, LayerPath.without(self.depth, left_out).resumed_at(first))
            gated.tap(self.adapter, self.base, ("last",))
            self._layers[index, parts] = gated
        return self._layers[index, parts]


class TeacherForcedText:
    """A text, what the full model computes of it, and what single layers would compute of it in a draft.

    Args:
        views: of the model.
        ids: texts of one length, `[texts, tokens]`.
        first: the first token that is drafted; all before it is prompt. At least 1.
        reach: positions of a draft that are counted one by one, at least 1.

    Attributes:
        states: inputs of each layer, and the last output, `[texts, tokens, hidden]`.
        logits: the full model's, of every drafted token, `[texts, drafted tokens, vocab]`.
        passes: layers run so far besides those of the full model, times tokens.
    """

    @torch.no_grad()
    def __init__(self, views: LayerViews, ids: Tensor, first: int, reach: int = 1) -> None:
        self._views = views
        self._ids = ids
        self.first = first
        self.reach = reach
        self.passes = 0
        length = ids.shape[1]
        # It keeps what the first pass writes; later passes see that and their own tokens.
        self._context = Cache(layers=[_ContextLayer() for _ in range(views.depth)])
        self._masks: Any = None
        points: tuple[Point, ...] = (*range(views.depth), "last")
        whole = FeatureTap(views.model, views.adapter, views.base, points)
        self.logits: Tensor = whole.module(**self._inputs(ids)).logits[:, first - 1 : -1]
        taken = whole.take()
        self.states = [taken[point] for point in points]
        if self.states[0].ndim != 3:
            raise UnsupportedModelError(
                f"acceptance of skip sets cannot be estimated for {type(views.model).__name__}: it keeps several "
                "streams of states; measure it by generation"
            )
        config = views.model.config.get_text_config(decoder=True)
        self._masks = draft_masks(config, length, reach, self.states[0].dtype, ids.device)

    def _inputs(self, ids: Tensor, copies: int = 1) -> dict[str, Any]:
        positions = torch.arange(self._ids.shape[1], device=ids.device).repeat(copies)[None]
        inputs = model_inputs(ids, positions if self._views.takes_positions else None, self._masks)
        return {**inputs, cache_argument(self._views.model): self._context}

    @property
    def drafted(self) -> int:
        """Number of drafted tokens of each text."""
        return self._ids.shape[1] - self.first

    def exact(self, layer: int) -> Tensor:
        """Return the input of a layer where all before it ran, `[texts, reach * tokens, hidden]`."""
        return torch.cat([self.states[layer]] * self.reach, -2)

    @torch.no_grad()
    def run(self, layer: int, parts: Parts, hidden: Tensor) -> Tensor:
        """Run some parts of a layer on states of draft steps, `[times * texts, reach * tokens, hidden]`."""
        if not parts:
            return hidden
        view, times = self._views.layer(layer, parts), hidden.shape[-3] // self._ids.shape[0]
        view.enter(ExactStates(hidden))
        base = view.module.get_submodule(self._views.base)
        base(**self._inputs(self._ids.repeat(times, self.reach), self.reach))
        view.leave()
        self.passes += hidden.shape[-2] * times * self._ids.shape[0]
        return view.features()["last"]

    @torch.no_grad()
    def read(self, hidden: Tensor, head: DraftHead | None = None) -> Tensor:
        """Return the logits of every drafted token, from states of draft steps, `[texts, reach * tokens, hidden]`.

        They are `[reach, texts, drafted tokens, vocab]`, -inf at tokens the head cannot draft. In copy k the first k of
        the drafted tokens mean nothing.
        """
        copies = hidden.unflatten(-2, (self.reach, -1))[..., self.first - 1 : -1, :].flatten(-4, -3)
        reading = head or DraftHead()
        logits = reading.alone(self._views.readout.logits(reading.adapted(copies)))
        apart: Tensor = logits.unflatten(0, (-1, self.reach)).transpose(0, 1)
        return apart

    def check(self) -> None:
        """Refuse an architecture whose whole network, read as a draft, does not say what the model says."""
        hidden = self.exact(0)
        for layer in range(self._views.depth):
            hidden = self.run(layer, WHOLE, hidden)
        said = self.read(hidden)
        off = max(
            (said[copy, :, copy:] - self.logits[:, copy:]).abs().max().item()
            for copy in range(min(self.reach, self.drafted))
        )
        if not off <= _ROUNDING.get(said.dtype, 1e-2) * max(1.0, self.logits.abs().max().item()):
            raise UnsupportedModelError(
                f"acceptance of skip sets cannot be estimated for {type(self._views.model).__name__}: read as a draft, "
                f"the whole network is off by {off:.3g}; measure it by generation"
            )


class _ContextLayer(DynamicLayer):
    is_initialized: bool

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values, `[batch, heads, tokens, head_dim]`: the text's for each row, then the pass's."""
        if not self.is_initialized:
            self.keys, self.values = key_states, value_states
            self.is_initialized = True
            return key_states, value_states
        times = key_states.shape[0] // self.keys.shape[0]
        return (
            torch.cat([self.keys.repeat(times, 1, 1, 1), key_states], 2),
            torch.cat([self.values.repeat(times, 1, 1, 1), value_states], 2),
        )

    def get_seq_length(self) -> int:
        """Return 0: nothing counts on from the text."""
        return 0


def draft_masks(config: PreTrainedConfig, length: int, reach: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the `attention_mask` that a stock model takes for a pass over `reach` copies of a text, side by side.

    A draft step attends to what the target left for the committed tokens, and to what the draft itself left for the
    tokens it has read since. So in copy k every token is the k-th that its draft reads: it sees the exact keys and
    values of all but the last k tokens, and for these the keys and values of the copies before it.

    Returns:
        A 4-D mask in the form of the model's attention kernel, `[1, 1, reach * length, (1 + reach) * length]`, or a
        dict of one for each layer type, None for types that are not known here.
    """

    def mask(pattern: Callable[..., Tensor]) -> Tensor:
        def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            copy, here = query // length, query % length
            # Key copy -1 is the exact context.
            key_copy, there = key // length - 1, key % length
            exact = (key_copy < 0) & (there < here - copy)
            own = (key_copy >= 0) & (there <= here) & (here - there == copy - key_copy)
            return pattern(row, head, here, there) & (exact | own)

        made: Tensor = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
            batch_size=1,
            q_length=reach * length,
            kv_length=(1 + reach) * length,
            mask_function=allowed,
            allow_is_causal_skip=False,
            dtype=dtype,
            device=device,
        )
        return made

    window = getattr(config, "sliding_window", None)
    patterns: dict[str, Callable[..., Tensor]] = {"full_attention": causal_mask_function}
    if window is not None:
        patterns["sliding_attention"] = sliding_window_causal_mask_function(window)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return mask(patterns.get("sliding_attention", causal_mask_function))
    return {kind: mask(patterns[kind]) if kind in patterns else None for kind in dict.fromkeys(layer_types)}


# Tokens of one pass, copies included; tokens of a text that a draft over copies of the cache reads at a time, exactly:
# more than a draft has.
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class TeacherForcedFigures:
    """One draft over one text. All tensors are `[reach, tokens]`: token n as the k-th of its draft.

    Attributes:
        agreed: whether draft and target have the same likeliest token.
        overlap: 1 - TV(p, q), the chance that rejection sampling accepts a token drawn there.
        chance: min(1, q / p) at the text's own token x: the chance that x, being what was committed, had been drafted
            and accepted. Greedily all three are `agreed`.
    """

    agreed: Tensor
    overlap: Tensor
    chance: Tensor

    def of_text(self, row: int, tokens: int) -> TeacherForcedFigures:
        """Take one text out of figures of several, `[reach, texts, tokens]`, as far as its own tokens go."""
        return TeacherForcedFigures(*(getattr(self, each.name)[:, row, :tokens].cpu() for each in fields(self)))


@dataclass(frozen=True)
class DraftPath:
    """A draft path, from tokens, and the head that reads its last states; fewer bits are an UnsupportedOptionError."""

    path: LayerPath
    head: DraftHead | None = None

    def __post_init__(self) -> None:
        if self.path.format is not None:
            raise UnsupportedOptionError(
                "drafts in fewer bits cannot be teacher-forced; leave them out, or measure them with selfspec bench"
            )


def teacher_forced_figures(
    views: LayerViews,
    texts: Sequence[Continuation],
    paths: Sequence[DraftPath],
    reach: int = 1,
    temperature: float = 0.0,
) -> list[list[TeacherForcedFigures]]:
    """Judge draft paths by teacher forcing, on texts that the model wrote itself at `temperature`; 0: greedily.

    Positions of a draft are counted one by one up to `reach`; further ones count as the last.

    Returns:
        For each path the figures of each text.

    Raises:
        UnsupportedModelError: this architecture cannot be read so.
    """
    found: list[dict[int, TeacherForcedFigures]] = [{} for _ in paths]
    for turn, numbers in enumerate(_read_together(texts, reach)):
        some = [texts[number] for number in numbers]
        # What is to the right of a text changes nothing of it.
        ids = pad_sequence([each.ids[0] for each in some], batch_first=True)
        first = some[0].prompt
        text = TeacherForcedText(views, ids, first, reach)
        if not turn:
            text.check()
        judge = _Judge(text.logits, ids[:, first:], temperature)
        for path, logits in readings(text, paths):
            figures = judge.figures(logits)
            for row, (number, each) in enumerate(zip(numbers, some, strict=True)):
                found[path][number] = figures.of_text(row, each.ids.shape[1] - first)
    return [[each[number] for number in range(len(texts))] for each in found]


def is_judged_by_teacher_forcing(drafter: Drafter, adapter: Adapter, depth: int) -> bool:
    """Return whether one reading of a text can judge many such drafts: those of exact layers that keep no states."""
    if adapter.recurrent or adapter.publishes is not None:
        return False
    exact = isinstance(drafter, LayerPathDrafter) and drafter.runs_exact_layers(depth)
    return exact and type(drafter).begin is LayerPathDrafter.begin


@torch.no_grad()
def first_steps(
    model: PreTrainedModel,
    adapter: Adapter,
    drafters: Mapping[str, LayerPathDrafter],
    texts: Sequence[Continuation],
    temperature: float = 0.0,
) -> dict[str, list[TeacherForcedFigures]]:
    """Judge the first step of drafts along any paths, by name, on texts; 0 compares the likeliest tokens.

    Exact layers are read together. Each other path, as in fewer bits, and each of a model that cannot be read so, takes
    a pass over each text, whose keys and values are the draft's own: in a generation they are the target's. Drafters of
    one precision share their substitutes. A DraftConfigError says which draft does not fit the model.
    """
    depth, substitutes = len(adapter.decoder_layers(model)), Substitutes.of(model)
    for each in drafters.values():
        each.check(depth)
        each.check_model(model, adapter)
    found: dict[str, list[TeacherForcedFigures]] = {}
    exact = [name for name, each in drafters.items() if is_judged_by_teacher_forcing(each, adapter, depth)]
    paths = [DraftPath(drafters[name].path(depth), drafters[name].head) for name in exact]
    if paths:
        with suppress(UnsupportedModelError):
            views = LayerViews(model, adapter)
            found = dict(zip(exact, teacher_forced_figures(views, texts, paths, 1, temperature), strict=True))
    apart = {name: each for name, each in drafters.items() if name not in found}
    found |= {name: [] for name in apart}
    for text in texts if apart else ():
        ids, first = text.ids.to(model.device), text.prompt
        # The logits at a position are those of the token after it.
        logits = model(input_ids=ids, use_cache=False).logits[:, first - 1 : -1]
        judge = _Judge(logits, ids[:, first:], temperature)
        for name, each in apart.items():
            said = draft_step_logits(model, adapter, each, ids, substitutes)[:, first - 1 : -1]
            found[name].append(judge.figures(said[None]).of_text(0, ids.shape[1] - first))
    return {name: found[name] for name in drafters}


def acceptance_rate(figures: Sequence[TeacherForcedFigures]) -> Estimate:
    """Estimate the acceptance rate of the first token of drafts over texts: the mean of 1 - TV(p, q), or agreement."""
    overlaps = [each.overlap[0] for each in figures]
    return Estimate.of_mean([float(each.sum()) for each in overlaps], [len(each) for each in overlaps])


def draft_step_logits(
    model: PreTrainedModel,
    adapter: Adapter,
    drafter: LayerPathDrafter,
    ids: Tensor,
    substitutes: Substitutes | None = None,
) -> Tensor:
    """Return the logits of draft steps at all positions of a text, `[1, tokens, vocab]`."""
    length = ids.shape[1]
    cache = adapter.shared_cache(model, 1, length, 0)
    cache.cursors.reserve(length)
    runner = ModelRunner(model, adapter, cache, substitutes)
    return runner.run(PassRequest(drafter.path(runner.depth), ids, head=drafter.head)).logits


def _read_together(texts: Sequence[Continuation], reach: int) -> Iterator[list[int]]:
    """Split texts into what one pass reads: prompts of one length, and no more tokens than fit."""
    ordered = sorted(range(len(texts)), key=lambda number: texts[number].prompt)
    for _, alike in groupby(ordered, lambda number: texts[number].prompt):
        numbers = list(alike)
        longest = max(texts[number].ids.shape[1] for number in numbers)
        rows = max(1, _MOST_TOKENS // (reach * longest))
        yield from (numbers[start : start + rows] for start in range(0, len(numbers), rows))


def readings(text: TeacherForcedText, paths: Sequence[DraftPath]) -> Iterator[tuple[int, Tensor]]:
    """Read a text along many draft paths, in an order that shares the most work.

    Layers before a path's first missing sublayer are the full model's own, and are not run at all. Paths that continue
    alike after that share every layer up to where they part.

    Yields:
        The number of a path, and its logits of every drafted token as `TeacherForcedText.read` gives them.
    """
    ways = [parts_run(each.path) for each in paths]

    def visit(numbers: list[int], layer: int, hidden: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Continue from states that enter a layer; None: they are exact so far."""
        if layer == len(ways[numbers[0]]):
            last = text.exact(layer) if hidden is None else hidden
            # An exit head reads behind the last layer that runs; nothing after that changed the states.
            yield from ((number, text.read(last, paths[number].head)) for number in numbers)
            return
        for parts, group in groupby(numbers, key=lambda number: ways[number][layer]):
            states = None
            if hidden is not None or parts != WHOLE:
                states = text.run(layer, parts, text.exact(layer) if hidden is None else hidden)
            yield from visit(list(group), layer + 1, states)

    yield from visit(sorted(range(len(paths)), key=lambda number: [*map(sorted, ways[number])]), 0, None)


class _Judge:
    """Compares drafts with the target's logits, `[texts, tokens, vocab]`, on some texts, `[texts, tokens]`."""

    def __init__(self, logits: Tensor, tokens: Tensor, temperature: float) -> None:
        self._likeliest = logits.argmax(-1)
        self._temperature = temperature
        self._tokens = tokens[..., None]
        self._p = (logits.float() / temperature).softmax(-1) if temperature else None

    def figures(self, logits: Tensor) -> TeacherForcedFigures:
        """Compare a draft's logits, `[reach, texts, tokens, vocab]`: the figures of all texts at once."""
        agreed = (logits.argmax(-1) == self._likeliest).float()
        if self._p is None:
            return TeacherForcedFigures(agreed, agreed, agreed)
        q = (logits.float() / self._temperature).softmax(-1)
        overlap = torch.stack([torch.minimum(self._p, each).sum(-1) for each in q])
        p_there = self._p.gather(-1, self._tokens)[..., 0]
        q_there = torch.stack([each.gather(-1, self._tokens)[..., 0] for each in q])
        return TeacherForcedFigures(agreed, overlap, (q_there / p_there).clamp(max=1.0))


@dataclass(frozen=True)
class ExpectedRounds:
    """Expected counts of a generation: draft tokens judged and accepted by depth, and rounds; and its tokens."""

    judged: list[float]
    accepted: list[float]
    rounds: float
    tokens: int


def expected_rounds(figures: TeacherForcedFigures, draft_length: int) -> ExpectedRounds:
    """Replay a text in rounds of up to `draft_length` tokens, at least 1, and sum up the chances."""
    judged, accepted = [0.0] * draft_length, [0.0] * draft_length
    chance, credit = figures.chance.tolist(), figures.overlap.tolist()
    tokens = len(chance[0])
    begins = [1.0] + [0.0] * tokens
    for start in range(tokens):
        # Of what is still wanted one token is the target's own, as in the loop.
        length, alive = min(draft_length, tokens - start - 1), begins[start]
        for position in range(length):
            copy, place = min(position, len(chance) - 1), start + position
            judged[position] += alive
            accepted[position] += alive * credit[copy][place]
            begins[place + 1] += alive * (1 - chance[copy][place])
            alive *= chance[copy][place]
        begins[start + length + 1] += alive
    return ExpectedRounds(judged, accepted, sum(begins[:tokens]), tokens)

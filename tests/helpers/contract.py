"""What every architecture must do, as checks on one tiny model: each compares with the stock model, without gates.

The references know nothing of gates, views or caches: they are one pass of the stock model over all tokens without a
cache, in which forward hooks take out what the path leaves out, for the tokens of the block alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import selfspec
from helpers.reference import Bench
from helpers.snapshot import Snapshot
from selfspec.architecture import Adapter
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.decode.output import GenerateOutput
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.errors import DraftConfigError, UnsupportedModelError
from selfspec.model.layer_path import LayerPath, Part, Sublayer, sublayers
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner

PAST = 9  # longer than the sliding windows
BLOCK = 4
BATCH = 2
NEW = 10
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""How far logits may be apart by dtype; in fp64 too, many models make scores, rotary tables or norms in fp32."""


@dataclass(frozen=True)
class Subject:
    model: PreTrainedModel
    adapter: Adapter
    tolerance: float
    first: int = 3
    vocabulary: int = 50

    @property
    def depth(self) -> int:
        return len(self.adapter.decoder_layers(self.model))

    @property
    def batch(self) -> int:
        return 1 if self.adapter.ragged == "none" else BATCH

    @property
    def pads(self) -> bool:
        """Whether `generate` takes rows of different lengths."""
        return self.batch > 1

    def cache(self, rows: int) -> SharedCache:
        return self.adapter.shared_cache(self.model, rows, limit=PAST + BLOCK + 1, slack=BLOCK)

    def generated(self, spec: selfspec.SelfSpeculative, prompts: Tensor, mask: Tensor | None) -> GenerateOutput:
        """Greedy text of a wrapper, `NEW` tokens of each row."""
        return spec.generate(prompts, mask, max_new_tokens=NEW, do_sample=False)

    def plain(self, prompts: Tensor, lengths: Iterable[int]) -> list[list[int]]:
        """Greedy text of the model, of each row alone: the last tokens of its prompt, and `NEW` more.

        Eager attention makes NaN of padded rows in `transformers` itself.
        """
        return [
            self.model.generate(row[None, -length:], max_new_tokens=NEW, do_sample=False)[0].tolist()
            for row, length in zip(prompts, lengths, strict=True)
        ]

    def tokens(self, length: int, batch: int, seed: int = 0) -> Tensor:
        """Random text, `[batch, length]`."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.first, self.vocabulary, (batch, length), generator=generator)

    @cached_property
    def text(self) -> Tensor:
        """A prefix and a block, `[batch, PAST + BLOCK]`."""
        return self.tokens(PAST + BLOCK, self.batch)

    @cached_property
    def stock(self) -> Tensor:
        return self.reference([])

    @torch.no_grad()
    def reference(self, skipped: Iterable[Sublayer]) -> Tensor:
        """Logits over the block of the stock model whose block goes without some sublayers."""
        left_out = set(skipped)
        handles = []
        for index, layer in enumerate(self.adapter.decoder_layers(self.model)):
            attention, mlp = Sublayer(index, Part.ATTENTION), Sublayer(index, Part.MLP)
            if {attention, mlp} <= left_out:
                handles.append(_replace(layer, "input"))
                continue
            if attention in left_out:
                names = self.adapter.modules_of(layer, Part.ATTENTION)
                handles += [_replace(layer.get_submodule(name), self.adapter.without_attention) for name in names]
            if mlp in left_out:
                names = self.adapter.modules_of(layer, Part.MLP)
                handles += [_replace(layer.get_submodule(name), self.adapter.without_mlp) for name in names]
        try:
            logits = self.stock_logits(self.text)[:, PAST:]
        finally:
            for handle in handles:
                handle.remove()
        return logits

    @torch.no_grad()
    def stock_logits(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Logits of the stock model, without a cache and with the position ids that its `generate` gives it.

        Where rows have more than their text, that of the first is number `first`.
        """
        named = inspect.signature(type(self.model).forward).parameters
        positions = {"position_ids": torch.arange(tokens.shape[1])[None]} if "position_ids" in named else {}
        logits: Tensor = self.model(tokens, use_cache=False, **positions).logits
        return logits

    def equal(self, found: Tensor, wanted: Tensor) -> None:
        """Fail where logits are further apart than rounding explains."""
        torch.testing.assert_close(found, wanted, rtol=self.tolerance, atol=self.tolerance)


def _replace(module: nn.Module, by: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        values = output if isinstance(output, tuple) else (output,)
        stream = args[-1] if by == "residual" else args[0] if args else kwargs["hidden_states"]
        kept = values[0].clone()
        if by != "zeros" and stream.shape != kept.shape:
            return None  # Within a sublayer of several modules: the last of them gives what counts.
        # Some models flatten the tokens of all rows before their MLP; others have several streams, before the batch.
        blocks = kept if kept.ndim > 2 else kept.view(-1, PAST + BLOCK, kept.shape[-1])
        blocks[..., PAST:, :] = 0 if by == "zeros" else stream[..., PAST:, :]
        return (kept, *values[1:]) if isinstance(output, tuple) else kept

    return module.register_forward_hook(hook, with_kwargs=True)


def bench_of(subject: Subject) -> Bench:
    return Bench(subject.model, subject.adapter, subject.cache(subject.batch), subject.text, PAST)


def block(subject: Subject) -> None:
    """A pass over several tokens on top of a prefill."""
    bench = bench_of(subject)
    subject.equal(bench.logits(bench.full), subject.stock)


def step(subject: Subject) -> None:
    """Passes over one token each."""
    bench = bench_of(subject)
    subject.equal(bench.steps(bench.full)[0], subject.stock)


def rollback(subject: Subject) -> None:
    """Nothing is left of passes over a block that is then read again with other tokens."""
    bench = bench_of(subject)
    bench.logits(bench.full, subject.tokens(BLOCK, subject.batch, seed=1))
    with torch.no_grad():
        bench.runner.run(PassRequest(bench.full, subject.tokens(1, subject.batch, seed=2), first=BLOCK - 1))
    subject.equal(bench.logits(bench.full), subject.stock)


def _path(subject: Subject, path: LayerPath) -> None:
    wanted = subject.reference(path.skipped)
    assert (wanted - subject.stock).abs().max() > 100 * subject.tolerance, "the reference cannot fail"
    bench = bench_of(subject)
    subject.equal(bench.logits(path), wanted)
    logits, states = bench.steps(path)
    subject.equal(logits, wanted)
    if path.resume_point is not None:
        assert states is not None
        subject.equal(bench.logits(bench.full.resumed_at(path.resume_point), entering=states), subject.stock)
        bench.cache.commit([BLOCK - 1] * subject.batch)
        last = subject.text[:, -1:]
        subject.equal(bench.logits(bench.full, last), subject.stock[:, -1:])


def exits(subject: Subject) -> None:
    for layer in range(1, subject.depth):
        _path(subject, LayerPath.up_to(subject.depth, Sublayer(layer, Part.ATTENTION)))


def skip_attention(subject: Subject) -> None:
    for layer in range(subject.depth):
        _path(subject, LayerPath.without(subject.depth, [Sublayer(layer, Part.ATTENTION)]))


def skip_mlp(subject: Subject) -> None:
    for index, layer in enumerate(subject.adapter.decoder_layers(subject.model)):
        if subject.adapter.modules_of(layer, Part.MLP):
            _path(subject, LayerPath.without(subject.depth, [Sublayer(index, Part.MLP)]))


def skip_layers(subject: Subject) -> None:
    """Whole layers left out, first and last included, and resuming the full pass there."""
    every = sublayers(subject.depth)
    for layers in ({0}, {1}, {subject.depth - 1}, {0, subject.depth - 1}):
        _path(subject, LayerPath.without(subject.depth, [sublayer for sublayer in every if sublayer.layer in layers]))


def stream(subject: Subject) -> None:
    """A layer without its two sublayers still carries the residual stream: what is declared to stand for them is it."""
    alike = []

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        alike.append(torch.cosine_similarity(before, after, -1)[..., PAST:].min().item())

    layers = subject.adapter.decoder_layers(subject.model)
    # Its reference leaves out both sublayers of a layer one by one, not the layer.
    handles = [layer.register_forward_hook(compare, with_kwargs=True) for layer in layers]
    handles += [
        _replace(layer.get_submodule(name), by)
        for layer in layers
        for name, by in (
            *((name, subject.adapter.without_attention) for name in subject.adapter.modules_of(layer, Part.ATTENTION)),
            *((name, subject.adapter.without_mlp) for name in subject.adapter.modules_of(layer, Part.MLP)),
        )
    ]
    try:
        with torch.no_grad():
            subject.stock_logits(subject.text)
    finally:
        for handle in handles:
            handle.remove()
    # Not 1: some layers norm, scale or add to the stream besides.
    assert min(alike) > 0.5, alike


def ragged(subject: Subject) -> None:
    """Rows of different lengths, prefilled together: each gives what it gives alone."""
    lengths = (PAST, PAST - 4)
    rows = subject.tokens(PAST + BLOCK, 2)
    bench = subject.cache(2)
    passes = ModelRunner(subject.model, subject.adapter, bench)
    full = LayerPath.full(subject.depth)
    with torch.no_grad():
        passes.run(PassRequest(full, rows[:, :PAST], headless=True))
        bench.commit(lengths)
        blocks = torch.stack([row[length : length + BLOCK] for row, length in zip(rows, lengths, strict=True)])
        found = passes.run(PassRequest(full, blocks)).logits
        tokens = enumerate(blocks.split(1, 1))
        stepped = [passes.run(PassRequest(full, token, first=column - 1)).logits for column, token in tokens]
        for row, length in enumerate(lengths):
            alone = subject.stock_logits(rows[row : row + 1, : length + BLOCK], row)[:, length:]
            subject.equal(found[row : row + 1], alone)
            subject.equal(torch.cat(stepped, 1)[row : row + 1], alone)


def tree(subject: Subject) -> None:
    """A tree, read in two runs of nodes, and after one of its paths was committed the next token; or a refusal."""
    bench, branches = bench_of(subject), Tree((-1, -1, 1))
    bench.cache.open(branches)
    tokens = bench.block
    with torch.no_grad():
        try:
            first = bench.runner.run(PassRequest(bench.full, tokens[:, :2])).logits
        except UnsupportedModelError:
            return
        found = torch.cat([first, bench.runner.run(PassRequest(bench.full, tokens[:, 2:], first=1)).logits], 1)
        for places in ([0, 1], [0, 2, 3]):
            wanted = subject.stock_logits(torch.cat([bench.prefix, tokens[:, places]], 1))
            subject.equal(found[:, places], wanted[:, PAST:])
        bench.cache.commit_paths([(-1, 1, 2)] * subject.batch)
        more = subject.tokens(1, subject.batch, seed=3)
        wanted = subject.stock_logits(torch.cat([bench.prefix, tokens[:, [0, 2, 3]], more], 1))
        subject.equal(bench.logits(bench.full, more), wanted[:, -1:])


def greedy(subject: Subject) -> None:
    """Greedy text is the stock model's own, for several drafts and prompts, and nothing of the model changes."""
    # Some models exchange modules of theirs in their first pass over a short text, or keep what positions begin with.
    subject.plain(subject.tokens(PAST, 1, 0), [PAST])
    before = Snapshot(subject.model)
    last = subject.depth - 1
    has_mlp = bool(subject.adapter.modules_of(subject.adapter.decoder_layers(subject.model)[last], Part.MLP))
    drafts: list[selfspec.drafts.Drafter | None] = [
        None,
        selfspec.drafts.EarlyExit(1),
        selfspec.drafts.EarlyExit(last),
        selfspec.drafts.LayerSkip(layers=[0]),
        selfspec.drafts.LayerSkip(attention=[1], mlp=[last] if has_mlp else []),
    ]
    chains = [(draft, selfspec.FixedLength(3)) for draft in drafts]
    trees = [(drafts[place], selfspec.FixedLength(3, nodes=7)) for place in (1, -1)] if _reads_trees(subject) else []
    mask = torch.ones(subject.batch, PAST, dtype=torch.long)
    if subject.pads:
        mask[1, :4] = 0
    asked = [subject.tokens(PAST, subject.batch, seed) for seed in range(2)]
    texts = [subject.plain(prompts, mask.sum(1).tolist()) for prompts in asked]
    for number, (draft, length) in enumerate([*chains, *trees]):
        prompts, wanted = asked[number % 2], texts[number % 2]
        spec = selfspec.wrap(subject.model, draft, draft_length=length, adapter=subject.adapter)
        out = subject.generated(spec, prompts, mask)
        for row, text in enumerate(wanted):
            assert out.sequences[row, -len(text) :].tolist() == text, f"{draft}, {length}, row {row}"
        assert spec.unwrap() is subject.model
    before.assert_same(subject.model)


def _reads_trees(subject: Subject) -> bool:
    with suppress(UnsupportedModelError):
        subject.adapter.check_trees(subject.model)
        return True
    return False


def has_substitutes(subject: Subject) -> bool:
    """Whether drafts in 8 bits are possible: some layer has substitutes."""
    with suppress(DraftConfigError):
        selfspec.drafts.LowPrecision().check_model(subject.model, subject.adapter)
        return True
    return False


def fewer_bits(subject: Subject) -> None:
    """Draft steps in fewer bits leave nothing behind: the full pass resumes from them, and greedy text is the stock's.

    A model none of whose layers has substitutes refuses such drafts.
    """
    last = subject.depth - 1
    if not has_substitutes(subject):
        return
    drafts: list[LayerPathDrafter] = [
        selfspec.drafts.LowPrecision(),
        selfspec.drafts.LowPrecision(8, layers=[last], head=False),
        selfspec.drafts.LowPrecision(8, fewer=selfspec.drafts.EarlyExit(last)),
    ]
    for draft in drafts:
        _in_fewer_bits(subject, draft.path(subject.depth))
    prompts = subject.tokens(PAST, subject.batch)
    wanted = subject.plain(prompts, [PAST] * subject.batch)
    for drafter in (*drafts, selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(shortest=1), drafts[0])):
        spec = selfspec.wrap(subject.model, drafter, draft_length=3, adapter=subject.adapter)
        out = subject.generated(spec, prompts, None)
        assert out.stats.drafted, drafter
        assert out.sequences.tolist() == wanted, drafter


def _in_fewer_bits(subject: Subject, path: LayerPath) -> None:
    wanted = subject.reference(path.skipped)
    bench = bench_of(subject)
    logits, states = bench.steps(path)
    # Not of every token: a mixture may send one to another expert.
    alike = torch.cosine_similarity(logits, wanted, -1).mean()
    assert not torch.equal(logits, wanted)
    assert alike > 0.9, alike
    if path.resume_point is None:
        subject.equal(bench.logits(bench.full), subject.stock)
    else:
        assert states is not None
        subject.equal(bench.logits(bench.full.resumed_at(path.resume_point), entering=states), subject.stock)
    bench.cache.commit([BLOCK - 1] * subject.batch)
    subject.equal(bench.logits(bench.full, subject.text[:, -1:]), subject.stock[:, -1:])


CHECKS: dict[str, Callable[[Subject], None]] = {
    "block": block,
    "step": step,
    "rollback": rollback,
    "exits": exits,
    "attention skip": skip_attention,
    "MLP skip": skip_mlp,
    "layer skip": skip_layers,
    "residual stream": stream,
    "ragged batch": ragged,
    "tree": tree,
    "greedy": greedy,
    "fewer bits": fewer_bits,
}
"""Every check by the name that the table of architectures uses for what it holds to."""

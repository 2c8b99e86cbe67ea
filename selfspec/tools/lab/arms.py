"""The arms: ways to decode with one model, each named, so that another process can make it again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import CompileConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from selfspec.accept import find_rule
from selfspec.api import SelfSpeculative, wrap
from selfspec.control import Control, CostAware, FixedLength
from selfspec.control.profile import Profile
from selfspec.decode.output import Stats
from selfspec.device import Timer, has_graphs
from selfspec.draft import Drafter
from selfspec.errors import PromptError
from selfspec.measure.checkpoint import Checkpoint
from selfspec.measure.prompts import PromptWriter, Workload, check_context
from selfspec.measure.stock import bare, end_tokens, random_state_kept, until_end
from selfspec.runtime import BatchInvariant, CudaGraphs, Eager, Native, Runtime, usual_runtime
from selfspec.serve.chat.template import ChatTemplate
from selfspec.tools.lab.drafts import Given, content

RUNTIMES: dict[str, type[Runtime]] = {
    "eager": Eager,
    "native": Native,
    "graphs": CudaGraphs,
    "batch-invariant": BatchInvariant,
}
"""Runtimes by name."""


def usual_runtime_name(device: torch.device) -> str:
    """Return the name of the runtime for a device where nobody names one, as `wrap` and `load` take it."""
    usual = type(usual_runtime([device]))
    return next(name for name, kind in RUNTIMES.items() if kind is usual)


def runtime_named(name: str, after: int | None = None) -> Runtime:
    """Make a runtime; `after` None: its default number of passes of a kind before a program is made."""
    kind = RUNTIMES[name]
    return kind(after=after) if after is not None and issubclass(kind, Native | CudaGraphs) else kind()


@dataclass(frozen=True)
class Cell:
    """One combination of conditions, in which all arms are measured in turns; temperature 0 decodes greedily.

    Prompts have `context` tokens, and nothing then ends a text sooner, so that all arms do the same work. Without it
    prompts are whole, by the chat template if `chat`, and texts end where the model ends them.
    """

    workload: str
    temperature: float
    batch: int
    context: int | None
    max_new_tokens: int
    chat: bool = False

    @property
    def decoding(self) -> str:
        """How tokens are chosen, in words."""
        return f"temperature {self.temperature:g}" if self.sampled else "greedy"

    @property
    def sampled(self) -> bool:
        return self.temperature > 0

    @property
    def options(self) -> dict[str, Any]:
        """Return the keywords of `generate`, the same for every arm."""
        sampling = {"temperature": self.temperature, "top_k": 0} if self.sampled else {}
        endless = {} if self.context is None else {"eos_token_id": None}
        return {
            "do_sample": self.sampled,
            "max_new_tokens": self.max_new_tokens,
            "pad_token_id": 0,
            **endless,
            **sampling,
        }


@dataclass(frozen=True)
class Prompts:
    """Prompts of one call, left-padded, `[batch, tokens]` on the model's device; the mask is 1 where there is text."""

    ids: Tensor
    mask: Tensor

    @classmethod
    def of_one_length(cls, ids: Tensor) -> Prompts:
        """Take prompts without padding."""
        return cls(ids, torch.ones_like(ids))

    @classmethod
    def padded(cls, prompts: Sequence[Tensor]) -> Prompts:
        """Pad prompts of any lengths, `[1, tokens]` each."""
        rows = [prompt[0] for prompt in prompts]
        ids, mask = (
            pad_sequence(part, batch_first=True, padding_side="left")
            for part in (rows, [torch.ones_like(row) for row in rows])
        )
        return cls(ids, mask)

    @property
    def rows(self) -> list[list[int]]:
        """Prompts without their padding."""
        return [row[at.bool()].tolist() for row, at in zip(self.ids, self.mask, strict=True)]


def prompt_writer(checkpoint: Checkpoint, chat: bool, answer: int) -> PromptWriter:
    """Make what writes prompts, as text or by the checkpoint's chat template; raise a PromptError if it has none."""
    if not chat:
        return PromptWriter(checkpoint, answer)
    if not checkpoint.tokenizer.chat_template:
        raise PromptError("the checkpoint has no chat template to write prompts by; leave out --chat")
    return PromptWriter(checkpoint, answer, ChatTemplate(checkpoint.tokenizer).prompt)


def with_prompts(
    cells: Sequence[Cell], workloads: Mapping[str, Workload], number: int, checkpoint: Checkpoint
) -> dict[Cell, list[Prompts]]:
    """Return cells with the prompts of each call; `number` of each workload. They must fit the model's context."""
    model, made = checkpoint.model, dict[Cell, list[Prompts]]()
    writers = {
        key: prompt_writer(checkpoint, *key)
        for key in dict.fromkeys((cell.chat, cell.max_new_tokens) for cell in cells)
    }
    for cell in cells:
        workload = workloads[cell.workload]
        if cell.context is None:
            prompts = workload.whole_prompts(writers[cell.chat, cell.max_new_tokens], max(number, cell.batch))
            calls = batched(prompts, cell.batch)
        else:
            made_alike = workload.prompts(checkpoint.tokenizer, number, cell.batch, cell.context)
            calls = [*map(Prompts.of_one_length, made_alike)]
        check_context(model, [call.ids for call in calls], cell.max_new_tokens)
        made[cell] = [Prompts(call.ids.to(model.device), call.mask.to(model.device)) for call in calls]
    return made


def batched(prompts: Sequence[Tensor], rows: int, texts: int = 1) -> list[Prompts]:
    """Return prompts, `[1, tokens]` each, in batches of `rows`, all together at least `texts`.

    Where prompts do not fill the last batch they come again, each a token shorter than before: rows that are the same
    would stay in step, as those of a real batch do not.
    """
    made = []
    for start in range(0, max(len(prompts), texts), rows):
        places = (divmod(row, len(prompts)) for row in range(start, start + rows))
        made.append(Prompts.padded([prompts[at][:, : max(1, prompts[at].shape[1] - times)] for times, at in places]))
    return made


ArmKind = Literal["generate", "static", "lookup", "plain", "draft", "other"]
"""Kinds of arms: `model.generate`, alone and with its own speed-ups; selfspec, without a draft and with one; others."""

# Tokens that `model.generate` looks up at a time, as its documentation has it.
_LOOK_UP_TOKENS = 10


@dataclass(frozen=True)
class ArmSpec:
    """Names an arm.

    Attributes:
        draft: of selfspec's drafting arms, by name.
        length: tokens drafted each round, of a tree levels; None: as the arm itself decides.
        nodes: the most tokens of a draft, siblings included; None: drafts are chains.
        content: digest of the draft and the rule, beyond their names; the arm finds it out.
    """

    kind: ArmKind
    draft: str | None = None
    length: int | None = None
    nodes: int | None = None
    accept: str | None = None
    runtime: str = "native"
    lossless: bool = True
    content: str = ""

    @property
    def name(self) -> str:
        """The arm's name in reports."""
        length = "" if self.length is None else f", length {self.length}"
        nodes = "" if self.nodes is None else f", {self.nodes} nodes"
        rule = "" if self.accept is None else f", {self.accept}"
        how = "" if self.runtime == "native" else f", {self.runtime}"
        names: dict[ArmKind, str] = {
            "generate": "model.generate",
            "static": "model.generate, static cache, compiled",
            "lookup": "model.generate, prompt look-up",
            "plain": f"selfspec plain{how}",
            "draft": f"selfspec {self.draft}{length}{nodes}{rule}{how}",
            "other": self.draft or "",
        }
        return names[self.kind]

    @property
    def own(self) -> bool:
        """True if the arm is selfspec's."""
        return self.kind in ("plain", "draft")


@dataclass(frozen=True)
class Call:
    """One call and its times, in seconds; `rows` are the new tokens of each row.

    Attributes:
        seconds: of the whole call, prefill included.
        first_seconds: until the first tokens were there: prefill, and the step or round after it.
        first_tokens: new tokens of all rows by then.
        passes: target passes, prefill not counted; of speculative arms that is rounds.
        rounds: of selfspec's arms, the number of rounds of each shape: the tokens drafted for each row, 0 in a plain
            round, and the draft steps, 0 in a look-up.
        seed: of its draws.
    """

    rows: list[list[int]]
    seconds: float
    first_seconds: float
    first_tokens: int
    passes: int
    stats: Stats | None = None
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    seed: int = 0

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.rows))

    @property
    def seconds_a_token(self) -> float:
        """Seconds of a token behind the first ones; of a call that has no others, of all."""
        further = self.tokens - self.first_tokens
        return (self.seconds - self.first_seconds) / further if further > 0 else self.seconds / self.tokens


class Stopwatch(Timer):
    """Runs from when it is made."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(time.perf_counter, device)
        self._started = self.now()

    def read(self) -> float:
        return self.now() - self._started


def control_of(draft_length: int | None, nodes: int | None) -> Control:
    """Return the control for a draft length, nodes, both, or neither, which is the default control."""
    if draft_length is not None:
        return FixedLength(draft_length, nodes)
    return CostAware(nodes=nodes)


class Arm(Protocol):
    """A way to decode, named by its spec."""

    spec: ArmSpec

    def decode(self, prompts: Prompts, cell: Cell, seed: int) -> Call:
        """Decode prompts under the conditions of a cell."""


@dataclass
class OwnArm:
    """Decodes by a wrapped model; without a draft by plain decoding."""

    spec: ArmSpec
    wrapped: SelfSpeculative

    @classmethod
    def named(cls, spec: ArmSpec, model: PreTrainedModel, given: Given) -> OwnArm:
        """Wrap a stock model as a spec says."""
        runtime = runtime_named(spec.runtime)
        # A profile has its own control.
        own_control = spec.length is None and spec.nodes is None
        control = None if own_control else control_of(spec.length, spec.nodes)
        draft = None if spec.draft is None else given.drafts.get(spec.draft, spec.draft)
        rule = None if spec.accept is None else given.rules.get(spec.accept, spec.accept)
        wrapped = wrap(bare(model), draft, draft_length=control, accept=rule, runtime=runtime)
        if draft is not None:
            spec = replace(spec, content=content(wrapped.draft, None if rule is None else find_rule(rule)))
        return cls(spec, wrapped)

    def drafter(self, cell: Cell) -> Drafter | None:
        """Return the drafter under the conditions of a cell."""
        draft = self.wrapped.draft
        if isinstance(draft, Profile):
            return draft.choose_draft(greedy=not cell.sampled).in_batch(cell.batch).draft
        return draft

    def decode(self, prompts: Prompts, cell: Cell, seed: int) -> Call:
        watch = Stopwatch(self.wrapped.model.device)
        # A prompt comes again in every turn, and would be drafted from what was written the last time.
        self.wrapped.forget()
        generation = self.wrapped.stream(prompts.ids, prompts.mask, seed=seed, **cell.options)
        rounds = [next(generation)]
        first_seconds = watch.read()
        rounds += generation
        output = generation.output()
        seconds = watch.read()
        new = output.sequences[:, prompts.ids.shape[1] :].tolist()
        rows = [row[:length] for row, length in zip(new, output.lengths, strict=True)]
        first_tokens = sum(len(row.tokens) for row in rounds[0].rows)
        shapes = Counter((max(len(row.draft) for row in each.rows), each.steps) for each in rounds)
        return Call(rows, seconds, first_seconds, first_tokens, len(rounds), generation.stats, shapes, seed)


class StockArm:
    """Decodes by `model.generate`, of a copy of the model, so that what the arm sets reaches no other."""

    def __init__(self, spec: ArmSpec, model: PreTrainedModel) -> None:
        self.spec, self._model = spec, bare(model)

    def decode(self, prompts: Prompts, cell: Cell, seed: int) -> Call:
        device = self._model.device
        with random_state_kept():
            torch.manual_seed(seed)
            watch = Stopwatch(device)
            seen = _FirstToken(watch, prompts.ids)
            sequences = self._model.generate(
                prompts.ids,
                attention_mask=prompts.mask,
                stopping_criteria=StoppingCriteriaList([seen]),
                **cell.options,
                **self._help(),
            )
            seconds = watch.read()
        ends = end_tokens(self._model) if cell.context is None else ()
        rows = [until_end(row, ends) for row in sequences[:, prompts.ids.shape[1] :].tolist()]
        return Call(rows, seconds, seen.seconds, seen.tokens, seen.calls, seed=seed)

    def _help(self) -> dict[str, Any]:
        if self.spec.kind == "lookup":
            return {"prompt_lookup_num_tokens": _LOOK_UP_TOKENS}
        if self.spec.kind != "static":
            return {}
        compiling = CompileConfig() if has_graphs(self._model.device) else CompileConfig(mode="default")
        compiling._compile_all_devices = True
        return {"cache_implementation": "static", "compile_config": compiling}


def make_arm(spec: ArmSpec, model: PreTrainedModel, given: Given | None = None) -> Arm:
    """Make the arm that a spec names, of a stock model."""
    return OwnArm.named(spec, model, given or Given()) if spec.own else StockArm(spec, model)


class _FirstToken(StoppingCriteria):
    """Never stops; notes when the first new tokens came, their number, and how often it was asked."""

    def __init__(self, watch: Stopwatch, prompts: Tensor) -> None:
        self._watch, self._prompts = watch, prompts
        self._goes_on = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
        self.seconds, self.tokens, self.calls = 0.0, 0, 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            self.seconds, self.tokens = self._watch.read(), input_ids.numel() - self._prompts.numel()
        return self._goes_on

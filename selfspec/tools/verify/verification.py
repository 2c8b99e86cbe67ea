"""Runs all checks, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from selfspec.accept import TokenLevel, find_rule
from selfspec.accept.tree_paths import at_parents
from selfspec.api import SelfSpeculative, wrap
from selfspec.architecture import Adapter
from selfspec.decode.noise import Noise
from selfspec.draft import Draft, Drafter, EarlyExit, LayerSkip
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.registry import draft_name
from selfspec.errors import DraftConfigError, PromptError
from selfspec.measure.rounding import Bound, largest_difference, tie_gap, widths_of
from selfspec.measure.stock import Reference, bare, read_reference, stepwise_logits
from selfspec.measure.watch import Watch
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import find_adapter
from selfspec.tools.lab.arms import Prompts, runtime_named
from selfspec.tools.verify.fit import check_fits, choose_places, sampled_texts
from selfspec.tools.verify.report import Check, Comparison, DraftReport, VerifyReport
from selfspec.tools.verify.settings import Settings


def default_drafts(depth: int) -> tuple[Drafter, ...]:
    """Return one draft of each kind of path, for a network of `depth` layers; equal paths once.

    They exit at half of the depth and before the last layer, and skip one layer, the attention of one, the MLP of one.
    """
    spread: list[LayerPathDrafter] = [EarlyExit(layer) for layer in (depth // 2, depth - 1) if layer >= 1]
    if depth > 1:
        spread.append(LayerSkip(layers=[depth // 2]))
    spread += [LayerSkip(attention=[depth // 3]), LayerSkip(mlp=[2 * depth // 3])]
    chosen: dict[LayerPath, Drafter] = {}
    for drafter in spread:
        chosen.setdefault(drafter.path(depth), drafter)
    return tuple(chosen.values())


def verify(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    drafts: Sequence[Drafter] | None = None,
    settings: Settings | None = None,
    *,
    adapter: Adapter | None = None,
    watch: Watch | None = None,
) -> VerifyReport:
    """Verify on a model, in its dtype and on its device, that selfspec's output is the model's own.

    Greedy texts are compared with `model.generate`'s token by token, and read through selfspec's own passes, logits and
    all. Coupled samples are compared with plain decoding's. Other samples are tested against the model's own
    distribution. Rounding of the model's logits is measured, and excuses only what it explains. Plain decoding in
    selfspec's loop is verified first.

    The model, of a supported architecture or of the adapter's, is not changed. Of its generation defaults only the
    tokens that end a text count. Prompts are token ids, each `[1, prompt]`, on the model's device. Without `drafts` a
    spread is chosen from the depth.

    Raises:
        UnsupportedModelError, DraftConfigError, PromptError: before any forward pass.
        NonFiniteLogitsError: logits became NaN or infinite.
    """
    chosen, progress = settings or Settings(), watch or Watch()
    found = adapter or find_adapter(model)
    depth = len(found.decoder_layers(model))
    stock = bare(model)
    runtime = None if chosen.runtime is None else runtime_named(chosen.runtime)
    tested: dict[str, SelfSpeculative] = {}
    for drafter in (None, *(default_drafts(depth) if drafts is None else drafts)):
        name = draft_name(drafter)
        if name in tested:
            raise DraftConfigError(f"draft {name} is named more than once; name each draft once")
        tested[name] = wrap(stock, drafter, draft_length=chosen.draft_length, adapter=found, runtime=runtime)
    _check(tested, prompts, chosen)

    coupled, fits = len(chosen.coupled_rules), (len(tested) - 1) * len(chosen.sampled_rules)
    progress.begin(len(prompts) * (1 + len(tested)) + coupled * len(tested) + 1 + fits + coupled)
    reports = {name: DraftReport(name) for name in tested}
    bound = Bound(widths_of(chosen.draft_length))
    texts = []
    for number, prompt in enumerate(prompts):
        where = f"prompt {number + 1} of {len(prompts)}"
        progress.step(f"greedy, {where}: the model itself")
        reference = read_reference(stock, prompt, chosen.max_new_tokens)
        texts.append((*prompt[0].tolist(), *reference.tokens))
        bound.measure(stock, reference)
        plain: _Decoded | None = None
        for name, spec in tested.items():
            progress.step(f"greedy, {where}: {name}")
            decoded = _check_greedy(spec, reference, number, chosen, reports[name])
            if plain is None:
                plain = decoded
            else:
                _check_beside_plain(stock, reference.prompt, plain, decoded, number, reports[name])
    _check_coupled(stock, prompts, tested, reports, chosen, progress)
    progress.step("looking for places to sample at")
    places = choose_places(stock, texts, chosen.samples)
    for fit in check_fits(tested, places, bound, chosen, progress):
        reports[fit.draft].fits.append(fit)
    return VerifyReport(
        model=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        depth=depth,
        prompts=len(prompts),
        settings=chosen,
        bound=bound,
        drafts=tuple(reports.values()),
    )


@dataclass(frozen=True)
class _Decoded:
    """Greedy texts of a wrapper by lossless rule, and its logits of the reference text, `[new tokens, vocab]`."""

    texts: Mapping[str, list[int]]
    logits: Tensor


def _check_greedy(
    spec: SelfSpeculative, reference: Reference, number: int, settings: Settings, report: DraftReport
) -> _Decoded:
    """Decode the prompt of a reference text greedily, then read the text itself, and compare both with it."""
    prompt, expected = reference.prompt, reference.tokens
    # All of it is text, whatever the padding token.
    mask = torch.ones_like(prompt)

    def compare(comparison: Comparison, found: list[int]) -> None:
        comparison.add(number, expected, found, lambda at: tie_gap(reference.logits[at], expected[at], found[at]))

    texts: dict[str, list[int]] = {}
    # Without drafts there is nothing that a rule could judge.
    for rule in settings.greedy_rules if spec.draft is not None else settings.greedy_rules[:1]:
        output = spec.generate(prompt, mask, max_new_tokens=settings.max_new_tokens, do_sample=False, accept=rule)
        texts[rule] = output.sequences[0, prompt.shape[1] :].tolist()
        compare(report.compared(Check.FREE_RUNNING, rule), texts[rule])
        report.texts.setdefault(number, []).append(output.stats)
    logits = forced_logits(spec, prompt, expected)
    off = largest_difference(logits, reference.logits.float()).max().item()
    report.logits_off = max(report.logits_off, off)
    compare(report.compared(Check.TEACHER_FORCED), logits.argmax(-1).tolist())
    return _Decoded({rule: text for rule, text in texts.items() if find_rule(rule).lossless}, logits)


def forced_logits(spec: SelfSpeculative, prompt: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the logits of each new token of a text, `[new tokens, vocab]`, by passes that verify drafts of it.

    Drafts are made to propose the text, pass by pass as in any generation, and all of them are accepted. A drafter that
    does not choose its tokens by logits proposes what it would have proposed.
    """
    output = spec.generate(
        prompt,
        torch.ones_like(prompt),
        max_new_tokens=len(tokens),
        do_sample=False,
        accept=_Dictated(),
        logits_processor=LogitsProcessorList([_Dictation([*prompt[0].tolist(), *tokens])]),
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert output.logits is not None
    return torch.cat(output.logits)


class _Dictation(LogitsProcessor):
    """Leaves one token at each place: that of a text, which is given with its prompt."""

    # selfspec then asks it about draft tokens, too.
    stateless = True

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        dictated = torch.full_like(scores, -torch.inf)
        dictated[:, self._text[input_ids.shape[1]]] = 0.0
        return dictated


class _Dictated(TokenLevel):
    """Commits the token of a one-hot p, so that no rule under test has a hand in it."""

    def accept_probs(self, draft: Draft, p: Tensor, logits: Tensor) -> Tensor:
        return at_parents(p, draft.tree).gather(-1, draft.tokens[..., None])[..., 0]

    def recovery_probs(self, draft: Draft, p: Tensor, place: Tensor) -> Tensor:
        return p[torch.arange(p.shape[0], device=p.device), place]


def _check_beside_plain(
    model: PreTrainedModel, prompt: Tensor, plain: _Decoded, drafted: _Decoded, number: int, report: DraftReport
) -> None:
    """Compare a draft's texts and logits of a prompt with those of plain decoding in selfspec's loop."""
    comparison = report.compared(Check.PLAIN)
    report.off_plain = max(report.off_plain, largest_difference(drafted.logits, plain.logits).max().item())
    for own in plain.texts.values():
        for found in drafted.texts.values():
            comparison.add(number, own, found, partial(_gap, model, prompt, own, found))


def _gap(model: PreTrainedModel, prompt: Tensor, own: Sequence[int], found: Sequence[int], index: int) -> float:
    """Return how far the stock model has the tokens of two texts apart, at an index up to which they are equal."""
    logits = stepwise_logits(model, prompt, own[: index + 1])[-1]
    return tie_gap(logits, own[index], found[index])


def _check(tested: Mapping[str, SelfSpeculative], prompts: Sequence[Tensor], settings: Settings) -> None:
    if len(tested) == 1:
        raise DraftConfigError("name at least one draft to verify; plain decoding is verified beside it")
    if not prompts:
        raise PromptError("no prompt: give at least one, each of shape [1, prompt]")
    for prompt in prompts:
        if prompt.ndim != 2 or prompt.shape[0] != 1:
            raise PromptError(f"each prompt must be of shape [1, prompt], got {list(prompt.shape)}")
        # Reads and refuses the request; a generation runs only as it is iterated over.
        plain = next(iter(tested.values()))
        plain.stream(prompt, torch.ones_like(prompt), max_new_tokens=settings.max_new_tokens, do_sample=False)


def _check_coupled(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    tested: Mapping[str, SelfSpeculative],
    reports: Mapping[str, DraftReport],
    settings: Settings,
    watch: Watch,
) -> None:
    """Sample from all prompts in one batch, by plain decoding and every draft; compare by draft and coupling rule."""
    # Of different lengths, so that rows advance by different amounts.
    asked = Prompts.padded(prompts)
    for rule in settings.coupled_rules:
        texts = {}
        for name, spec in tested.items():
            watch.step(f"{rule} sampling: {name}")
            texts[name] = sampled_texts(
                spec, asked.ids, rule, settings.max_new_tokens, seed=settings.seed, mask=asked.mask
            )
        plain, *drafting = texts.items()
        for name, found in drafting:
            comparison = reports[name].compared(Check.COUPLED, rule)
            for row, (own, other) in enumerate(zip(plain[1], found, strict=True)):
                comparison.add(
                    row, own, other, partial(_gap_of_row, model, prompts[row], row, own, other, settings.seed)
                )


def _gap_of_row(
    model: PreTrainedModel, prompt: Tensor, row: int, own: Sequence[int], other: Sequence[int], seed: int, index: int
) -> float:
    """Return what a logit of the stock model would have to rise by for the row's noise to choose the other token."""
    logits = stepwise_logits(model, prompt, own[: index + 1])[-1].double()
    position = torch.tensor([[prompt.shape[1] + index]], device=prompt.device)
    race = logits - Noise(seed, [row], prompt.device).exponentials(position, len(logits))[0, 0].log()
    return abs((race[own[index]] - race[other[index]]).item())

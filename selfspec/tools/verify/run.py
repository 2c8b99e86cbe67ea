"""Runs all checks, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.api import wrap
from selfspec.decode.stats import Stats
from selfspec.draft import Drafter
from selfspec.draft.named import draft_name
from selfspec.errors import DraftConfigError, PromptError
from selfspec.measure.progress import Unwatched, Watch
from selfspec.measure.rounding import RoundingMeter, tie_gap, widths_of
from selfspec.measure.stock import Reference, bare, read_reference
from selfspec.model.adapter import Adapter
from selfspec.model.registry import find_adapter
from selfspec.tools.verify.comparison import Check, ComparedTexts, ForcedTexts
from selfspec.tools.verify.coupled import check_coupled
from selfspec.tools.verify.drafts import DraftUnderTest, default_drafts
from selfspec.tools.verify.fit import check_fits, trials_of
from selfspec.tools.verify.forced import forced_logits
from selfspec.tools.verify.place import choose_places
from selfspec.tools.verify.report import DraftReport, Report
from selfspec.tools.verify.settings import Settings


def verify(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    drafts: Sequence[Drafter] | None = None,
    settings: Settings | None = None,
    *,
    adapter: Adapter | None = None,
    watch: Watch | None = None,
) -> Report:
    """Verify on a model, in its dtype and on its device, that selfspec's output is the model's own.

    Greedy texts are compared with `model.generate`'s token by token, and read through selfspec's own passes, logits
    and all. Coupled samples are compared with plain decoding's. Other samples are tested against the distribution
    that the model gives by itself. What rounding does to the model's logits is measured, and only what it explains is
    excused. Plain decoding in selfspec's loop is verified first of all.

    The model is left as it is. Its generation defaults play no part, but for the tokens that end a text.

    Args:
        model: of a supported architecture, or of the adapter's.
        prompts: token ids, each `[1, prompt]`, on the model's device.
        drafts: what to verify; None: a spread chosen from the depth.
        settings: how much, and how strictly; None: the defaults.
        adapter: where the model keeps its layers, for an architecture selfspec does not know.
        watch: is told of each step.

    Raises:
        UnsupportedModelError, DraftConfigError, PromptError: before any forward pass.
        NonFiniteLogitsError: logits became NaN or infinite.
    """
    chosen, told = settings or Settings(), watch or Unwatched()
    found = adapter or find_adapter(model)
    depth = len(found.decoder_layers(model))
    stock = bare(model)
    tested = [
        DraftUnderTest(
            draft_name(drafter), drafter, wrap(stock, drafter, draft_length=chosen.draft_length, adapter=found)
        )
        for drafter in (None, *(default_drafts(depth) if drafts is None else drafts))
    ]
    _check(tested, prompts, chosen)

    trials = trials_of(tested, chosen)
    told.begin(len(prompts) * (1 + len(tested)) + len(chosen.coupled_rules) * len(tested) + 1 + len(trials))
    reports = {each.name: DraftReport(each.name, ForcedTexts(each.name)) for each in tested}
    meter = RoundingMeter(widths_of(chosen.draft_length))
    texts = []
    for number, prompt in enumerate(prompts):
        where = f"prompt {number + 1} of {len(prompts)}"
        told.step(f"greedy, {where}: the model itself")
        reference = read_reference(stock, prompt, chosen.max_new_tokens)
        texts.append((*prompt[0].tolist(), *reference.tokens))
        meter.measure(stock, reference)
        for each in tested:
            told.step(f"greedy, {where}: {each.name}")
            _check_greedy(each, reference, number, chosen, reports[each.name])
    for name, coupled in check_coupled(stock, prompts, tested, chosen, told).items():
        reports[name].coupled = coupled
    told.step("looking for places to sample at")
    places = choose_places(stock, texts, chosen.samples)
    fits = check_fits(trials, places, chosen, told)
    for report in reports.values():
        report.fits = tuple(each for each in fits if each.draft == report.name)
    return Report(
        model=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        depth=depth,
        prompts=len(prompts),
        settings=chosen,
        bound=meter.bound(),
        drafts=tuple(reports.values()),
    )


def _check_greedy(
    tested: DraftUnderTest, reference: Reference, number: int, settings: Settings, report: DraftReport
) -> None:
    """Decode the prompt of a reference text greedily, then read the text itself, and compare both with it."""
    prompt, expected = reference.prompt, reference.tokens
    # Without drafts there is nothing that a rule could judge.
    for rule in settings.greedy_rules if tested.drafter else settings.greedy_rules[:1]:
        output = tested.spec.generate(prompt, max_new_tokens=settings.max_new_tokens, do_sample=False, accept=rule)
        found: list[int] = output.sequences[0, prompt.shape[1] :].tolist()

        def gap(index: int, found: list[int] = found) -> float:
            return tie_gap(reference.logits[index], expected[index], found[index])

        compared = report.free_running.setdefault(rule, ComparedTexts(Check.FREE_RUNNING, tested.name, rule))
        compared.add(number, expected, found, gap)
        report.stats = Stats.together([report.stats, output.stats])
    logits = forced_logits(
        tested.spec.model, tested.spec.adapter, tested.drafter, settings.draft_length, prompt, expected
    )
    report.forced.add(number, reference, logits)


def _check(tested: Sequence[DraftUnderTest], prompts: Sequence[Tensor], settings: Settings) -> None:
    if len(tested) == 1:
        raise DraftConfigError("name at least one draft to verify; plain decoding is verified beside it")
    names = [each.name for each in tested]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise DraftConfigError(f"draft {min(twice)} is named more than once; name each draft once")
    if not prompts:
        raise PromptError("no prompt: give at least one, each of shape [1, prompt]")
    for prompt in prompts:
        if prompt.ndim != 2 or prompt.shape[0] != 1:
            raise PromptError(f"each prompt must be of shape [1, prompt], got {list(prompt.shape)}")
        # Reads and refuses the request; a generation runs only as it is iterated over.
        tested[0].spec.stream(prompt, max_new_tokens=settings.max_new_tokens, do_sample=False)

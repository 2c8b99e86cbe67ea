"""Runs all checks, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.draft import Drafter
from selfspec.errors import DraftConfigError, PromptError
from selfspec.measure.progress import Unwatched, Watch
from selfspec.measure.stock import bare
from selfspec.model.adapter import Adapter
from selfspec.model.registry import find_adapter
from selfspec.tools.verify import coupled, fit, greedy
from selfspec.tools.verify.drafts import default_drafts
from selfspec.tools.verify.place import choose_places
from selfspec.tools.verify.report import DraftReport, Report
from selfspec.tools.verify.settings import Settings
from selfspec.tools.verify.subject import Subject


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
    drafters = [None, *(default_drafts(depth) if drafts is None else drafts)]
    subjects = [Subject.of(stock, found, drafter, chosen.draft_length) for drafter in drafters]
    _check(subjects, prompts, chosen)

    told.begin(
        greedy.steps(len(prompts), len(subjects))
        + coupled.steps(len(chosen.coupled_rules), len(subjects))
        + 1
        + fit.steps(subjects, chosen)
    )
    of_greedy = greedy.check_greedy(stock, found, prompts, subjects, chosen, told)
    of_coupled = coupled.check_coupled(stock, prompts, subjects, chosen, told)
    told.step("looking for places to sample at")
    places = choose_places(stock, of_greedy.texts, chosen.samples)
    fits = fit.check_fits(subjects, places, chosen, told)
    return Report(
        model=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        depth=depth,
        prompts=len(prompts),
        settings=chosen,
        bound=of_greedy.bound,
        drafts=tuple(
            DraftReport(
                name=subject.name,
                greedy=of_greedy.drafts[subject.name],
                coupled=of_coupled.get(subject.name, {}),
                fits=tuple(each for each in fits if each.draft == subject.name),
            )
            for subject in subjects
        ),
    )


def _check(subjects: Sequence[Subject], prompts: Sequence[Tensor], settings: Settings) -> None:
    if len(subjects) == 1:
        raise DraftConfigError("name at least one draft to verify; plain decoding is verified beside it")
    names = [subject.name for subject in subjects]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise DraftConfigError(f"draft {min(twice)} is named more than once; name each draft once")
    if not prompts:
        raise PromptError("no prompt: give at least one, each of shape [1, prompt]")
    for prompt in prompts:
        if prompt.ndim != 2 or prompt.shape[0] != 1:
            raise PromptError(f"each prompt must be of shape [1, prompt], got {list(prompt.shape)}")
        # Reads and refuses the request; a generation runs only as it is iterated over.
        subjects[0].spec.stream(prompt, max_new_tokens=settings.max_new_tokens, do_sample=False)

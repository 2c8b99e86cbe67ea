"""`selfspec.ablate(model, ...)`: a study of a model in memory, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.arguments import check_module
from selfspec.decode.prompt import checked_ids
from selfspec.errors import PromptError, StudyError
from selfspec.model.registry import check_causal, find_adapter
from selfspec.tools.lab.ablation import work_on
from selfspec.tools.lab.report import require_packages
from selfspec.tools.lab.runs import Runs
from selfspec.tools.lab.studied import StudiedModel
from selfspec.tools.lab.study import Study
from selfspec.values import checked_path, shown

_GIVEN = "given"


def ablate(
    model: PreTrainedModel,
    prompts: Tensor | Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    to: str | Path | None = None,
    **declared: Any,
) -> Any:
    """Study what drafts of a model are worth.

    Args:
        model: the stock causal LM; it is left as it is.
        prompts: what it writes on from, whole: texts, or token ids, `[texts, tokens]`.
        tokenizer: for prompts that are texts.
        to: folder to keep the study in, which the same call continues; None: it is not kept.
        **declared: as in a study file: `drafts`, `draft_lengths`, `temperatures`, `seed`, `max_new_tokens`, `reach`,
            `confirm`, `pricing`.

    Returns:
        A `pandas.DataFrame` with one row for each draft, temperature and draft length.

    Raises:
        StudyError: naming what cannot be.
    """
    require_packages()
    check_module(model)
    check_causal(model)
    place = None if to is None else checked_path("to", to, StudyError)
    try:
        ids = [checked_ids(model, each).to(model.device) for each in _ids(prompts, tokenizer)]
    except PromptError as error:
        raise StudyError(f"prompts cannot be used: {error}") from error
    own = {"models": _GIVEN, "workloads": _GIVEN, "texts": len(ids)}
    for taken in sorted((own.keys() | {"chat", "prompt_tokens"}) & declared.keys()):
        raise StudyError(f"{taken} follows from the model and its prompts; leave it out")
    study = Study.of({**declared, **own})
    studied = StudiedModel(type(model).__name__, model, find_adapter(model), {_GIVEN: ids}, tokenizer)
    import pandas

    return pandas.DataFrame(work_on(study, lambda name: studied, Runs(place)).table)


def _ids(prompts: Tensor | Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> list[Tensor]:
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or not prompts.numel():
            raise StudyError(f"prompts have shape {list(prompts.shape)}, not [texts, tokens]")
        return list(prompts.split(1))
    if tokenizer is not None and not callable(tokenizer):
        raise StudyError(f"tokenizer={shown(tokenizer)} is none; pass the model's own, as AutoTokenizer loads it")
    if tokenizer is None:
        raise StudyError("prompts that are texts need tokenizer=...; or pass token ids, [texts, tokens]")
    if isinstance(prompts, str) or not prompts:
        raise StudyError("prompts must be several texts, or token ids, [texts, tokens]")
    encoded: list[Tensor] = [tokenizer(text, return_tensors="pt").input_ids.long() for text in prompts]
    if not all(each.numel() for each in encoded):
        raise StudyError("a prompt is empty; give it at least one token")
    return encoded

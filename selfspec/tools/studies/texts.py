"""Texts that a model under study writes itself: what its drafts are judged on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from selfspec.measure.forced_figures import Texts
from selfspec.measure.stock import bare
from selfspec.tools.studies.point import Point
from selfspec.tools.studies.subject import Subject, digest


def texts_point(subject: Subject, workload: str, new_tokens: int, temperature: float, seed: int) -> Point:
    """The point of writing them."""
    content = {
        "base": subject.base,
        "dtype": subject.dtype,
        "prompts": digest(subject.prompts[workload]),
        "new_tokens": new_tokens,
        "temperature": temperature,
        # Greedy texts are drawn from nothing.
        "seed": seed if temperature else 0,
    }
    return Point("texts", content, {"model": subject.name, "workload": workload, "seed": seed})


def write_texts(subject: Subject, point: Point) -> dict[str, Any]:
    """Let the stock model continue the prompts of a workload; nothing ends a text early."""
    prompts = subject.prompts[point.place["workload"]]
    temperature = point.content["temperature"]
    # Greedy texts are what exactness is compared with: one by one, as they would be generated.
    parts = prompts.split(1 if not temperature else len(prompts))
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(point.content["seed"])
        ids = torch.cat([_continued(subject, part, point.content["new_tokens"], temperature) for part in parts])
    rows: list[list[int]] = ids.tolist()
    first = prompts.shape[1]
    return {"ids": rows, "first": first, "tokens": [subject.pieces(row, first) for row in rows]}


def texts_of(found: dict[str, Any], temperature: float, device: torch.device) -> Texts:
    """What was written, ready to be drafted."""
    return Texts(torch.tensor(found["ids"], device=device), found["first"], temperature)


def _continued(subject: Subject, prompts: Tensor, new_tokens: int, temperature: float) -> Tensor:
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    length = prompts.shape[1] + new_tokens
    settings = GenerationConfig(max_length=length, eos_token_id=None, pad_token_id=0, **sampled)
    model = bare(subject.model)
    model.generation_config = settings
    ids: Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)
    return ids

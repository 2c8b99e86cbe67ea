"""Ablation studies: what drafts of many kinds are worth on many models and texts, declared, resumable, reported."""

from selfspec.ablate.inline import ablate
from selfspec.ablate.study import Study, read_study

__all__ = ["Study", "ablate", "read_study"]

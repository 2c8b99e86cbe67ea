"""Verification on a model of one's own: drafting changes none of its tokens, and not what it samples from."""

from selfspec.draft.named import draft_name
from selfspec.verify.drafts import default_drafts
from selfspec.verify.prompts import PROMPTS
from selfspec.verify.pruned import draft_logits, pruned_logits
from selfspec.verify.report import Report
from selfspec.verify.run import verify
from selfspec.verify.settings import Settings
from selfspec.verify.verdict import Verdict
from selfspec.watch import Watch

__all__ = [
    "PROMPTS",
    "Report",
    "Settings",
    "Verdict",
    "Watch",
    "default_drafts",
    "draft_logits",
    "draft_name",
    "pruned_logits",
    "verify",
]

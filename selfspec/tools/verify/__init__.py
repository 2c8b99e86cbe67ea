"""Verification on a model of one's own: drafting changes none of its tokens, and not what it samples from."""

from selfspec.draft.named import draft_name
from selfspec.measure.progress import Watch
from selfspec.tools.verify.drafts import default_drafts
from selfspec.tools.verify.pruned import draft_logits, pruned_logits
from selfspec.tools.verify.report import Report, Verdict
from selfspec.tools.verify.run import verify
from selfspec.tools.verify.settings import Settings

__all__ = [
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

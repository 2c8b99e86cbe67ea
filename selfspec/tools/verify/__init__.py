"""Verification on a model of one's own: drafting changes none of its tokens, and not what it samples from."""

from selfspec.tools.verify.pruned import draft_logits, pruned_logits
from selfspec.tools.verify.report import Report
from selfspec.tools.verify.run import default_drafts, verify
from selfspec.tools.verify.settings import Settings

__all__ = ["Report", "Settings", "default_drafts", "draft_logits", "pruned_logits", "verify"]

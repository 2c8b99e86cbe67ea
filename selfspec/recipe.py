"""Save with a model how it drafts, in a file that makes `transformers` follow it.

If it may trust a folder's code, `transformers` copies `custom_generate/generate.py`, that file alone, and runs it in
place of its own `generate`; so the file holds all it needs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from selfspec.accept import Rule, rule_name, rules
from selfspec.control import Control, CostAware, FixedLength
from selfspec.control.profile import Profile
from selfspec.draft import Drafter
from selfspec.draft.registry import draft_name, parse_draft
from selfspec.errors import DraftConfigError, UnsupportedOptionError
from selfspec.files.writing import whole
from selfspec.version import __version__

_PROGRAM = '''"""Makes this model draft for itself: `generate` of transformers, served by selfspec."""

from selfspec.saved import generate_by

RECIPE = {recipe}


def generate(inputs=None, generation_config=None, *, model, **options):
    return generate_by(RECIPE, model, inputs, generation_config, options)
'''


@dataclass(frozen=True)
class Recipe:
    """Names a wrapper's drafter, draft length and acceptance rule, as `selfspec.wrap` takes them."""

    draft: str
    draft_length: int | None
    accept: str | None

    @classmethod
    def of(cls, draft: Drafter | Profile | None, control: Control, rule: Rule | None) -> Recipe:
        """Return a wrapper's recipe. DraftConfigError, UnsupportedOptionError: draft, control or rule has no name."""
        length = control.length if isinstance(control, FixedLength) else None
        if control != (CostAware() if length is None else FixedLength(length)):
            raise DraftConfigError(f"{control!r} cannot be saved; wrap with a draft length, or without one")
        if isinstance(draft, Profile):
            drafts = [draft_name(draft.choose_draft(greedy).draft) for greedy in (True, False)]
            raise DraftConfigError(
                "a calibrated draft cannot be saved with the model: it is bound to this machine; wrap with one of the "
                f"drafts it chose, {' or '.join(drafts)}"
            )
        name = draft_name(draft)
        try:
            named = parse_draft(name)
        except DraftConfigError:
            named = None
        if named != draft:
            raise DraftConfigError(
                f"{name} cannot be saved with the model; wrap with an exit, a skip set or fewer bits"
            )
        accept = None if rule is None else rule_name(rule)
        if rule is not None and accept is None:
            raise UnsupportedOptionError(f"{rule!r} cannot be saved; wrap with one of {', '.join(rules())}")
        return cls(name, length, accept)

    def save(self, folder: Path) -> None:
        """Write `custom_generate/` into a saved model's folder."""
        target = folder / "custom_generate"
        program = _PROGRAM.format(recipe=asdict(self))
        for name, text in (("generate.py", program), ("requirements.txt", f"selfspec>={__version__}\n")):
            with whole(target / name) as draft:
                draft.write_text(text, encoding="utf-8")

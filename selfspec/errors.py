"""Define the typed errors of selfspec; every message says what is wrong and what to do about it."""

from __future__ import annotations

from typing import Any


class SelfSpecError(Exception):
    """Base of every error selfspec raises on purpose."""


class UnsupportedModelError(SelfSpecError, ValueError):
    """The model cannot be gated: unknown architecture, unknown attention kernel, or not a decoder-only model."""


class DraftConfigError(SelfSpecError, ValueError):
    """The draft does not fit the model: an exit layer, a skip set or a draft length out of range."""


class PromptError(SelfSpecError, ValueError):
    """The prompt or its attention mask cannot be used as given."""


class UnsupportedOptionError(SelfSpecError, ValueError):
    """A generation option is not supported."""


class CheckpointError(SelfSpecError, OSError):
    """A model folder is missing files, truncated or unreadable."""


class CorpusError(SelfSpecError, OSError):
    """A text to train on is missing, unreadable, or too short."""


class TrainingError(SelfSpecError, RuntimeError):
    """Training cannot begin as asked, cannot resume from the files there, or its loss became NaN or infinite."""


class StudyError(SelfSpecError, ValueError):
    """A study file or a study cannot be used as given."""


class StorageError(SelfSpecError, RuntimeError):
    """The place for results cannot be written, is gone, full or damaged; results finished before stay there."""


class ExitHeadError(SelfSpecError, OSError):
    """An exit head is missing files, truncated or foreign, or was trained on another base."""


class HeadError(SelfSpecError, OSError):
    """A published draft head is missing files, damaged, of an unknown layout, or belongs to another base."""


class BenchError(SelfSpecError, OSError):
    """Results of a benchmark are missing or unreadable, or what their plots need is not installed."""


class ProfileError(SelfSpecError, OSError):
    """There is no calibration profile that fits, or it is truncated or foreign."""


class ClosedError(SelfSpecError, RuntimeError):
    """A wrapped model was used after `unwrap`."""


class QueueFullError(SelfSpecError, RuntimeError):
    """The queue of requests is full; this one was not taken."""


class CannotFitError(PromptError):
    """A request can never run: it needs more memory for keys and values than the cache may take."""


class EngineStoppedError(SelfSpecError, RuntimeError):
    """The engine takes no requests: it was not started, is stopped, or stopped before the row had ended."""


class RowError(SelfSpecError, RuntimeError):
    """One row of the running batch ended early; the other rows run on.

    If a logits processor or stopping criterion of the row raised an error, that is the cause (`__cause__`).
    """


class NonFiniteLogitsError(SelfSpecError, ArithmeticError):
    """The target's logits of one or more rows became NaN or infinite.

    These rows ended at the last token committed before that; the other rows ran to their end.

    Attributes:
        output: the `GenerateOutput` that `generate` would have returned.
        rows: the rows that ended early.
    """

    def __init__(self, output: Any, rows: tuple[int, ...]) -> None:
        self.output = output
        self.rows = rows
        kept = ", ".join(f"row {row} after {output.lengths[row]} new tokens" for row in rows)
        super().__init__(
            f"the full model's logits became NaN or infinite: {kept}; those tokens are kept in `.output`. "
            "Check the weights and the dtype: fp16 overflows where bf16 or fp32 do not. Or the logits processors left "
            "no token to choose."
        )

"""What each command prints with `--output json`, declared: schemas are made of this, and tests hold outputs to it.

Nothing of it is needed to run a command.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from selfspec.cli.outcome import SCHEMA_VERSION


class _Shape(BaseModel):
    """An object all of whose fields are declared."""

    model_config = ConfigDict(extra="forbid")


class _Output(_Shape):
    """What every command prints."""

    schema_version: int = Field(
        ge=SCHEMA_VERSION,
        le=SCHEMA_VERSION,
        description="Of this format. Fields may be added within a version; none is removed or changes its meaning.",
    )


class Versions(_Shape):
    """Versions of what ran."""

    selfspec: str
    torch: str
    transformers: str
    python: str


class Failure(_Shape):
    """What ended a command."""

    type: str = Field(description="Name of the error's class: see the reference.")
    message: str = Field(description="One line that names the remedy.")


class Interval(_Shape):
    """An estimate and an interval about it."""

    value: float
    low: float
    high: float
    confidence: float = Field(description="The chance that such an interval holds the true value; 0: unknown.")


class Stats(_Shape):
    """Counts and times of a generation: see `selfspec.Stats`. Rates without data are null."""

    rounds: int
    row_rounds: int
    new_tokens: int
    drafted: int
    judged: int
    accepted: int
    overlap: float
    judged_per_depth: list[int]
    accepted_per_depth: list[int]
    acceptance_rate: float | None
    optimal_acceptance_rate: float | None
    mean_accepted_length: float | None
    cache_bytes: int
    substitute_bytes: int
    draft_bytes: int
    seconds: dict[str, float]


class RoundOfRow(_Shape):
    """A round: with `--show-drafts`."""

    draft: list[int]
    accepted: int
    rejected: list[int]
    tokens: list[int] = Field(description="Committed in this round.")


class Generate(_Output):
    """`selfspec generate`."""

    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[int] = Field(description="The new tokens.")
    sequence: list[int] = Field(description="Prompt and new tokens.")
    text: str = Field(description="The new tokens as text.")
    settings: dict[str, Any] = Field(
        description="What was asked for, defaults included; `sampling.seed` repeats the run."
    )
    lossless: bool
    stats: Stats
    versions: Versions
    rounds: list[RoundOfRow] | None = None
    error: Failure | None = None


class Chat(_Output):
    """`selfspec chat`."""

    messages: list[dict[str, Any]] = Field(description="The conversation, `role` and `content` each.")
    turns: list[dict[str, Any]] = Field(description="Tokens, seconds and acceptance of each answer.")
    settings: dict[str, Any]
    versions: Versions
    error: Failure | None = None


class Serve(_Output):
    """`selfspec serve`, once it takes requests."""

    url: str = Field(description="Of the server; OpenAI's endpoints are below /v1.")
    model: str = Field(description="The name that clients ask for.")
    context: int = Field(description="The most tokens of a prompt and its answer.")
    error: Failure | None = None


class Demo(_Output):
    """`selfspec demo`."""

    settings: dict[str, Any]
    headline: str
    identical: bool = Field(description="Whether every greedy text equals plain decoding's.")
    arms: list[dict[str, Any]] = Field(description="Scores of each way to decode, greedily and sampled.")
    turns: int
    texts: list[dict[str, str]] = Field(description="`prompt` and `text`, the greedy one.")
    seconds: float
    cores: dict[str, Any]
    cpu_kernels: bool
    versions: dict[str, Any]
    error: Failure | None = None


class Inspect(_Output):
    """`selfspec inspect`: bytes are those in memory."""

    checkpoint: str
    model: str = Field(description="The class.")
    model_type: str
    dtype: str
    width: int
    vocabulary: int
    context: int | None
    embedding: dict[str, int] = Field(description="`parameters` and `bytes`, here and below.")
    layers: list[dict[str, Any]]
    final_norm: dict[str, int]
    head: dict[str, int]
    total: dict[str, int]
    tied: bool
    cache: dict[str, int] | None
    substitutes: list[dict[str, Any]] = Field(description="What drafts in 8 and in 4 bits take.")
    target_bytes_read: int = Field(description="By a step of plain decoding.")
    exits: list[dict[str, Any]] = Field(
        description="Of each exit `layer`, `bytes_read` by a draft step and `cost_ratio`, c."
    )
    versions: Versions
    plan: dict[str, Any] | None = Field(
        None, description="With --memory: what would stay, what is streamed, and how fast."
    )
    error: Failure | None = None


class Kernels(_Output):
    """`selfspec kernels`."""

    kernels: str = Field(description="The library that was built.")


class Doctor(_Output):
    """`selfspec doctor`."""

    machine: dict[str, Any]
    packages: dict[str, Any] = Field(
        description="`versions`, those that are `untested` or `newer` than tested, and what extras are `missing`."
    )
    products: dict[str, Any] = Field(description="How fast weights are read, and what four rows cost.")
    findings: list[str] = Field(description="What is slow here and why, with the remedy.")
    commit: str | None
    versions: Versions


class Export(_Output):
    """`selfspec export`."""

    place: str
    draft: str
    layers: list[int]
    folded: bool
    whole_vocabulary: bool
    parameters: int
    share: float = Field(description="Of the model's parameters.")
    size: int = Field(description="Of what was written, in bytes.")
    off: float = Field(
        description="The largest difference of its logits from the draft's, in their standard deviations."
    )


class Quantize(_Output):
    """`selfspec quantize`."""

    file: str
    bytes: int
    share: float = Field(description="Of the bytes of all weights.")
    seconds: float


class Index(_Output):
    """`selfspec index`."""

    file: str
    tokens: int
    bytes: int
    seconds: float


class Calibrate(_Output):
    """`selfspec calibrate`: the profile, and where it is."""

    checkpoint: str
    setting: dict[str, Any] = Field(description="Where the profile holds.")
    greedy: dict[str, Any] = Field(description="What to draft with: `draft`, its lengths and `costs`.")
    sampled: dict[str, Any]
    report: dict[str, Any] = Field(description="All that was measured.")
    profile: str
    seconds: float
    versions: Versions


class Verify(_Output):
    """`selfspec verify`."""

    checkpoint: str
    model: dict[str, Any]
    settings: dict[str, Any]
    bound: dict[str, Any] = Field(description="What rounding explains.")
    drafts: list[dict[str, Any]]
    divergences: list[dict[str, Any]]
    smallest_p_value: float | None
    lossless: bool
    exact: bool
    verdict: str = Field(
        description="`EXACT`, `EXACT WITHIN ROUNDING`, `NOT EXACT`, or of relaxed rules `NOT LOSSLESS`."
    )
    sentence: str
    failures: list[str]
    seconds: float
    versions: Versions


class BenchArm(BaseModel):
    """An arm in a cell. Figures are missing where it was absent or refused."""

    model_config = ConfigDict(extra="allow")

    name: str
    arm: dict[str, Any]
    absence: str | None
    agreement: dict[str, Any] | None
    memory: dict[str, Any] | None
    decoding_tokens_per_second: Interval | None = None
    whole_call_tokens_per_second: Interval | None = None
    first_token_seconds: Interval | None = None
    decoding_against: dict[str, Interval] | None = None
    mean_accepted_length: float | None = None
    acceptance_rate: float | None = None
    acceptance_by_depth: list[float | None] | None = None
    cycle_share: float | None = None


class BenchCell(_Shape):
    """All arms under one set of conditions."""

    cell: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, Any]
    arms: list[BenchArm]


class Quality(_Shape):
    """What the texts of an arm are worth. Lists have one value for each prompt."""

    setup: dict[str, Any]
    arm: dict[str, Any]
    against: str
    lossless: bool
    exact: list[float]
    bleu: list[float]
    rouge_l: list[float]
    nats: list[float]
    tokens: list[int]
    passed: list[float] | None
    absence: str | None
    figures: dict[str, Interval]


class Bench(_Output):
    """`selfspec bench`."""

    cells: list[BenchCell]
    quality: list[Quality] | None = Field(None, description="With --quality.")
    error: Failure | None = None


class Ablate(_Output):
    """`selfspec ablate`. A row of `best` is one of `points.jsonl`."""

    study: dict[str, Any]
    points: int
    failed: list[dict[str, Any]]
    best: list[dict[str, Any]] = Field(description="The most promising draft of each model, text and temperature.")
    files: list[str]
    versions: Versions


class Search(_Output):
    """`selfspec search`."""

    best: dict[str, Any]
    front: list[dict[str, Any]] = Field(description="No set is both cheaper and better than one of these.")
    scores: list[dict[str, Any]]
    file: str
    study: dict[str, Any]
    sublayers: list[int | None] = Field(description="The fewest and the most that sets leave out.")
    evaluations: int
    versions: Versions


class Train(_Output):
    """`selfspec train layerskip`, `plain` and `exit`."""

    source: dict[str, Any]
    base: str = Field(description="Fingerprint of the weights it began with.")
    course: dict[str, Any]
    recipe: dict[str, Any] | None
    before: dict[str, float] = Field(description="Figures on held-out text.")
    after: dict[str, float]
    seconds_of_last_stretch: float
    log: list[dict[str, float]]
    checked: list[dict[str, Any]] | None = Field(
        default=None, description="Of `train layerskip`: each exit, predicted and measured in times plain decoding."
    )
    folder: str
    versions: Versions


class Average(_Output):
    """`selfspec train average`."""

    trained: dict[str, str]
    base: dict[str, str]
    base_share: float
    held_out: str | None
    held_out_blocks: int
    before: dict[str, float]
    after: dict[str, float]
    folder: str
    versions: Versions


class Vocabulary(_Output):
    """`selfspec train vocabulary`."""

    file: str
    size: int
    coverage: float = Field(description="Share of the text's tokens that are kept.")
    versions: Versions


class Failed(_Output):
    """A command that failed before it had results. Some add `error` to the results they have."""

    error: Failure


OUTPUTS: dict[str, type[BaseModel]] = {
    "generate": Generate,
    "chat": Chat,
    "serve": Serve,
    "demo": Demo,
    "inspect": Inspect,
    "kernels": Kernels,
    "doctor": Doctor,
    "export": Export,
    "calibrate": Calibrate,
    "verify": Verify,
    "bench": Bench,
    "quantize": Quantize,
    "index": Index,
    "search": Search,
    "ablate": Ablate,
    "train layerskip": Train,
    "train plain": Train,
    "train exit": Train,
    "train average": Average,
    "train vocabulary": Vocabulary,
}
"""What each command prints, by its words."""


def schema_of(command: str) -> dict[str, Any]:
    """The JSON schema of what a command prints, unless it failed before it had results: see `Failed`."""
    return OUTPUTS[command].model_json_schema()

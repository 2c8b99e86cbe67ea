"""Which arms a benchmark has, and how they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from selfspec.runtime.named import RuntimeName
from selfspec.tools.bench.arm import Arm, ArmKind, ArmSpec
from selfspec.tools.bench.own_arms import OwnArm
from selfspec.tools.bench.stock_arms import StockArm

_OWN = (ArmKind.PLAIN, ArmKind.DRAFT)


def arm_specs(
    kinds: Sequence[ArmKind],
    drafts: Sequence[str],
    draft_length: int | None,
    rules: Sequence[str | None],
    exit_layer: int,
    exit_length: int,
    packed: bool = False,
    runtime: RuntimeName = RuntimeName.TRACED,
) -> list[ArmSpec]:
    """The arms in the order of the report, `model.generate` and selfspec's plain decoding always among them.

    Args:
        kinds: wanted kinds of arms; with `ArmKind.EARLY_EXIT`, selfspec's own draft of the same exit and length
            is there too, to be compared with it.
        drafts: of selfspec's drafting arms.
        draft_length: tokens that these draft each round; None: as many as pay.
        rules: acceptance rules, each draft is there with each of them; None: selfspec's default.
        exit_layer: of transformers' own early exit.
        exit_length: tokens that it drafts each round.
        packed: whether selfspec's own run a model whose weights are packed.
        runtime: how their passes are run.
    """
    specs = [ArmSpec(ArmKind.GENERATE)]
    if ArmKind.STATIC in kinds:
        specs.append(ArmSpec(ArmKind.STATIC))
    if ArmKind.LOOK_UP in kinds:
        specs.append(ArmSpec(ArmKind.LOOK_UP))
    if ArmKind.EARLY_EXIT in kinds:
        specs.append(ArmSpec(ArmKind.EARLY_EXIT, exit_layer=exit_layer, length=exit_length))
    own = [ArmSpec(ArmKind.PLAIN)]
    if ArmKind.EARLY_EXIT in kinds:
        own.append(ArmSpec(ArmKind.DRAFT, draft=f"exit:{exit_layer}", length=exit_length))
    if ArmKind.DRAFT in kinds:
        own += [ArmSpec(ArmKind.DRAFT, draft, length=draft_length, accept=rule) for draft in drafts for rule in rules]
    return list(dict.fromkeys([*specs, *(replace(spec, packed=packed, runtime=runtime) for spec in own)]))


def make_arm(spec: ArmSpec, model: PreTrainedModel) -> Arm:
    """The arm that a spec names.

    Args:
        spec: which.
        model: stock; packed, if the spec says so.

    Raises:
        SelfSpecError: it does not fit the model.
    """
    return OwnArm(spec, model) if spec.kind in _OWN else StockArm(spec, model)

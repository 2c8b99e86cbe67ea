"""The arms of `transformers`: `model.generate`, alone and with each help of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from selfspec.measure.stock import bare
from selfspec.measure.timing import Call, Stopwatch
from selfspec.runtime.compiled import no_compiler
from selfspec.tools.bench.arm import LOOK_UP_TOKENS, Arm, ArmKind, ArmSpec
from selfspec.tools.bench.cell import Cell


class StockArm(Arm):
    """`model.generate`.

    Args:
        spec: which arm it is.
        model: of its own, so that what the arm sets reaches no other.
    """

    def __init__(self, spec: ArmSpec, model: PreTrainedModel) -> None:
        super().__init__(spec)
        self._model = bare(model)

    def absence(self, cell: Cell) -> str | None:
        if self.spec.kind in (ArmKind.LOOK_UP, ArmKind.EARLY_EXIT) and cell.batch > 1:
            return "transformers' assisted generation takes one row at a time"
        if self.spec.kind is ArmKind.STATIC:
            return no_compiler(self._model.device)
        return None

    def decode(self, prompts: Tensor, cell: Cell, seed: int) -> Call:
        device = self._model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            watch = Stopwatch(device)
            seen = _FirstToken(watch, prompts)
            sequences = self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                stopping_criteria=StoppingCriteriaList([seen]),
                **cell.options,
                **self._help(),
            )
            seconds = watch.read()
        rows: list[list[int]] = sequences[:, prompts.shape[1] :].tolist()
        return Call(rows, seconds, seen.seconds, seen.tokens, seen.calls)

    def _help(self) -> dict[str, Any]:
        config = self._model.generation_config
        match self.spec.kind:
            case ArmKind.LOOK_UP:
                return {"prompt_lookup_num_tokens": LOOK_UP_TOKENS}
            case ArmKind.EARLY_EXIT:
                # transformers reads the draft length from the model's own generation config only.
                config.num_assistant_tokens = self.spec.length
                config.num_assistant_tokens_schedule = "constant"
                return {"assistant_early_exit": self.spec.exit_layer}
            case ArmKind.STATIC:
                on_cuda = self._model.device.type == "cuda"
                compiling = CompileConfig() if on_cuda else CompileConfig(mode="default")
                compiling._compile_all_devices = True
                return {"cache_implementation": "static", "compile_config": compiling}
            case _:
                return {}


class _FirstToken(StoppingCriteria):
    """Never stops; notes when the first new tokens came, how many these were, and how often it was asked."""

    def __init__(self, watch: Stopwatch, prompts: Tensor) -> None:
        self._watch = watch
        self._prompt = prompts.shape[1]
        self._goes_on = torch.zeros(prompts.shape[0], dtype=torch.bool, device=prompts.device)
        self.seconds = 0.0
        self.tokens = 0
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            self.seconds = self._watch.read()
            self.tokens = (input_ids.shape[1] - self._prompt) * input_ids.shape[0]
        return self._goes_on

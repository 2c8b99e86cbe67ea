"""Has every arm answer the same prompts, and scores what it said."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.measure.stock import bare, end_tokens
from selfspec.tools.bench.arms import Arm, ArmSpec
from selfspec.tools.bench.cell import Cell
from selfspec.tools.bench.quality.record import QualityRecord, QualitySetup
from selfspec.tools.bench.quality.sandbox import function_of, passes
from selfspec.tools.bench.quality.scores import TextScores, score
from selfspec.tools.bench.quality.tasks import Task, digest

# Added to the number of a prompt: the text that others are held against is drawn anew.
_OTHER_SEED = 2**30


@dataclass(frozen=True)
class Assessment:
    """How texts are made and judged.

    Attributes:
        name: of the model, in reports.
        run_code: whether the tests of prompts are run.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    run_code: bool

    def setup(self, workload: str, temperature: float, max_new_tokens: int, tasks: Sequence[Task]) -> QualitySetup:
        """What results are filed under."""
        return QualitySetup(
            model=self.name,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=self.model.device.type,
            workload=workload,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            tasks=digest(tasks) + ("+code" if self.run_code else ""),
        )

    def assess(
        self,
        arms: Sequence[Arm],
        tasks: Sequence[Task],
        setup: QualitySetup,
        tick: Callable[[], None],
        known: Collection[ArmSpec] = (),
    ) -> Iterator[QualityRecord]:
        """Score every arm but the known ones, one after the other.

        Selfspec's plain decoding is among the arms. `tick` is called before each text.

        Texts are held against the references of the workload if each of the tasks has one, and else against a text by
        plain decoding: the same one where greedy, another sample where sampled. So what plain decoding scores itself
        is what chance explains.
        """
        whole = all(task.reference is not None for task in tasks)
        references = [task.reference or "" for task in tasks]
        if not whole:
            plain = next(arm for arm in arms if arm.spec.kind == "plain")
            references = [self._text(plain, task, setup, _OTHER_SEED + n, tick).text for n, task in enumerate(tasks)]
        against = "references" if whole else "plain decoding"
        for arm in arms:
            if arm.spec not in known:
                yield self._record(arm, tasks, references, against, setup, tick)

    def _record(
        self,
        arm: Arm,
        tasks: Sequence[Task],
        references: Sequence[str],
        against: str,
        setup: QualitySetup,
        tick: Callable[[], None],
    ) -> QualityRecord:
        absence = arm.absence(Cell(setup.workload, setup.temperature, 1, 1, setup.max_new_tokens))
        answers: list[_Answer] = []
        if absence is None:
            try:
                answers = [self._text(arm, task, setup, number, tick) for number, task in enumerate(tasks)]
            except Exception as error:
                # What transformers itself cannot do is a reason not to have the arm, and no more.
                if arm.spec.own or arm.spec.kind == "generate":
                    raise
                absence = f"{type(error).__name__}: {error}".splitlines()[0]
        scores: list[TextScores] = [score(each.text, other) for each, other in zip(answers, references, strict=False)]
        passed = None
        if self.run_code and all(task.test is not None for task in tasks) and answers:
            programs = [
                f"{task.prompt}{function_of(each.text)}\n{task.test}" for task, each in zip(tasks, answers, strict=True)
            ]
            passed = [float(passes(program)) for program in programs]
        return QualityRecord(
            setup,
            arm.spec,
            against,
            arm.spec.lossless,
            exact=[each.exact for each in scores],
            bleu=[each.bleu for each in scores],
            rouge_l=[each.rouge_l for each in scores],
            nats=[each.nats for each in answers],
            tokens=[each.tokens for each in answers],
            passed=passed,
            absence=absence,
        )

    def _text(self, arm: Arm, task: Task, setup: QualitySetup, seed: int, tick: Callable[[], None]) -> _Answer:
        tick()
        ids = task.ids.to(self.model.device)
        cell = Cell(setup.workload, setup.temperature, 1, ids.shape[1], setup.max_new_tokens)
        row = arm.decode(ids, cell, seed).rows[0]
        # Arms decode to their last token; what follows the end of a text is not part of it.
        ends = end_tokens(self.model)
        row = row[: next((place + 1 for place, token in enumerate(row) if token in ends), len(row))]
        text: str = self.tokenizer.decode(row, skip_special_tokens=True)
        return _Answer(text, self._nats(ids, row), len(row))

    @torch.no_grad()
    def _nats(self, prompt: Tensor, row: Sequence[int]) -> float:
        tokens = torch.tensor([row], device=prompt.device)
        logits = bare(self.model)(torch.cat([prompt, tokens], 1)).logits[0, prompt.shape[1] - 1 : -1]
        likelihoods = logits.float().log_softmax(-1).gather(-1, tokens[0, :, None])
        return -float(likelihoods.sum())


@dataclass(frozen=True)
class _Answer:
    text: str
    nats: float
    tokens: int

"""Plain decoding, transformers' own self-speculation and selfspec's, side by side on one checkpoint, interleaved.

    python benchmarks/side_by_side.py                        the embedded checkpoint
    python benchmarks/side_by_side.py --model FOLDER ...     any other

Every arm decodes the same prompts greedily; an arm whose tokens differ from `model.generate`'s is not scored. Times are
wall clock of whole calls, prefill included. Writes a JSON file and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import rich.progress
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from selfspec.checkpoint import load_checkpoint
from selfspec.demo import PROMPTS, checkpoint_folder

RESULTS = Path(__file__).parent / "results"


@dataclass
class Arm:
    """One way to decode.

    Attributes:
        name: what the table calls it.
        run: decodes one prompt; returns its new tokens.
        tokens_per_second: one figure per repeat, over all prompts.
        stats: of selfspec's arms, over all prompts of the last repeat.
        equal: whether every token equals `model.generate`'s.
    """

    name: str
    run: Callable[[Tensor], list[int]]
    tokens_per_second: list[float] = field(default_factory=list)
    stats: list[dict[str, object]] = field(default_factory=list)
    equal: bool = True


def arms(model: PreTrainedModel, exit_layer: int, skip: selfspec.LayerSkip, length: int, new: int) -> list[Arm]:
    """All arms, the reference first."""

    def stock(ids: Tensor) -> list[int]:
        return new_tokens(model.generate(ids, do_sample=False, max_new_tokens=new), ids)

    def stock_early_exit(ids: Tensor) -> list[int]:
        # transformers reads the draft length from the model's own generation config only.
        kept = model.generation_config.num_assistant_tokens, model.generation_config.num_assistant_tokens_schedule
        model.generation_config.num_assistant_tokens = length
        model.generation_config.num_assistant_tokens_schedule = "constant"
        try:
            output = model.generate(ids, do_sample=False, max_new_tokens=new, assistant_early_exit=exit_layer)
        finally:
            model.generation_config.num_assistant_tokens, model.generation_config.num_assistant_tokens_schedule = kept
        return new_tokens(output, ids)

    def own(name: str, draft: selfspec.Drafter | None) -> Arm:
        spec = selfspec.wrap(model, draft, draft_length=length)

        def run(ids: Tensor) -> list[int]:
            output = spec.generate(ids, do_sample=False, max_new_tokens=new)
            arm.stats.append(output.stats.to_dict())
            return new_tokens(output.sequences, ids)

        arm = Arm(name, run)
        return arm

    parts = [
        f"{part} {','.join(map(str, numbers))}"
        for part, numbers in (("attention", skip.attention), ("MLP", skip.mlp), ("layers", skip.layers))
        if numbers
    ]
    return [
        Arm("model.generate", stock),
        Arm(f"model.generate, assistant_early_exit={exit_layer}", stock_early_exit),
        own("selfspec, plain", None),
        own(f"selfspec, exit {exit_layer}", selfspec.EarlyExit(exit_layer)),
        own(f"selfspec, skip {'; '.join(parts)}", skip),
    ]


def new_tokens(sequences: Tensor, prompt: Tensor) -> list[int]:
    """What was generated after a prompt, `[1, prompt]`."""
    tokens: list[int] = sequences[0, prompt.shape[1] :].tolist()
    return tokens


def measure(contestants: list[Arm], prompts: list[Tensor], repeats: int) -> None:
    """Run every arm on every prompt, in turn, `repeats` times after a warm-up."""
    reference: dict[int, list[int]] = {}
    with rich.progress.Progress() as progress:
        task = progress.add_task("measuring", total=(repeats + 1) * len(contestants) * len(prompts))
        for repeat in range(repeats + 1):
            for arm in contestants:
                arm.stats.clear()
                seconds, tokens = 0.0, 0
                for number, ids in enumerate(prompts):
                    started = time.perf_counter()
                    new = arm.run(ids)
                    seconds += time.perf_counter() - started
                    tokens += len(new)
                    arm.equal &= new == reference.setdefault(number, new)
                    progress.advance(task)
                if repeat:
                    arm.tokens_per_second.append(tokens / seconds)


def table(contestants: list[Arm]) -> str:
    """A Markdown table: the speed of each arm, and its ratio to `model.generate` repeat by repeat."""
    lines = [
        "| | tokens/s (median, range) | against model.generate | acceptance rate | mean accepted length |",
        "|---|---|---|---|---|",
    ]
    reference = contestants[0].tokens_per_second
    for arm in contestants:
        if not arm.equal:
            lines.append(f"| {arm.name} | not scored: other tokens | | | |")
            continue
        speeds = arm.tokens_per_second
        ratios = [own / other for own, other in zip(speeds, reference, strict=True)]
        judged = sum(int(str(stats["judged"])) for stats in arm.stats)
        accepted = sum(int(str(stats["accepted"])) for stats in arm.stats)
        new = sum(int(str(stats["new_tokens"])) for stats in arm.stats)
        rounds = sum(int(str(stats["row_rounds"])) for stats in arm.stats)
        lines.append(
            f"| {arm.name} | {statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f}) "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"| {f'{accepted / judged:.2f}' if judged else ''} | {f'{new / rounds:.2f}' if rounds else ''} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="checkpoint folder; the embedded one if not given")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exit", type=int, default=4, help="exit layer")
    parser.add_argument("--skip-attention", type=int, nargs="*", default=[1])
    parser.add_argument("--skip-mlp", type=int, nargs="*", default=[])
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", default="embedded", help="name of the result files")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    loaded = load_checkpoint(options.model or str(checkpoint_folder()), dtype=options.dtype, device="cpu")
    prompts = [loaded.tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    skip = selfspec.LayerSkip(attention=options.skip_attention, mlp=options.skip_mlp)
    contestants = arms(loaded.model, options.exit, skip, options.draft_length, options.max_new_tokens)
    measure(contestants, prompts, options.repeats)

    record = {
        "settings": vars(options) | {"model": Path(options.model).name if options.model else "embedded"},
        "versions": {
            "selfspec": selfspec.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "arms": [
            {key: value for key, value in asdict(arm).items() if key != "run"}
            | {"median": statistics.median(arm.tokens_per_second)}
            for arm in contestants
        ],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"side_by_side_{options.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    text = table(contestants)
    (RESULTS / f"side_by_side_{options.name}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

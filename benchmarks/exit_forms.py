"""Which form an exit head should have: several, trained equally long on the same states of a frozen base.

    python benchmarks/exit_forms.py --model FOLDER --text FILE.jsonl.gz --held-out FILE.jsonl

States at the exit and the full model's distributions are computed once. Each form then learns from them for as many
steps, and alpha = 1 - TV and top-1 agreement are measured on held-out text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from kept import RESULTS
from torch import Tensor, nn

from selfspec.draft.exit_head import ExitAdapter
from selfspec.measure.acceptance import ExitFigures
from selfspec.measure.readout import Readout
from selfspec.model.checkpoint import load_checkpoint
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import all_documents, packed, read_documents, spread


class Attention(nn.Module):
    """Norm and causal self-attention on a residual branch, as in Kangaroo; behind it, if `mlp` > 0, a gated MLP."""

    def __init__(self, hidden: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.heads = heads
        self.inner = nn.Linear(hidden, 3 * hidden, bias=False)
        self.outer = nn.Linear(hidden, hidden, bias=False)
        nn.init.zeros_(self.outer.weight)
        self.mlp: nn.Module = ExitAdapter(hidden, mlp) if mlp else nn.Identity()

    def forward(self, states: Tensor) -> Tensor:
        """Adapt `[batch, tokens, hidden]`."""
        batch, tokens, hidden = states.shape
        parts = (
            self.inner(self.norm(states))
            .view(batch, tokens, 3, self.heads, hidden // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        adapted: Tensor = self.mlp(states + self.outer(mixed.transpose(1, 2).reshape(batch, tokens, hidden)))
        return adapted


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--exit", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=160)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)

    checkpoint = load_checkpoint(options.model, "float32", "cpu")
    model, tokenizer = checkpoint.model.requires_grad_(False), checkpoint.tokenizer
    readout = Readout(model, find_adapter(model))
    text = packed(all_documents([options.text], 0), tokenizer, 256, options.blocks)
    held_out = spread(packed(read_documents(options.held_out), tokenizer, 256), 16)

    def read(blocks: Tensor) -> tuple[Tensor, Tensor]:
        states, logits = [], []
        for ids in blocks.split(8):
            with torch.no_grad(), readout.recorded([options.exit]) as recorded:
                logits.append(model(input_ids=ids, use_cache=False).logits)
            states.append(recorded[options.exit])
        return torch.cat(states), torch.cat(logits)

    hidden = model.config.hidden_size
    forms: dict[str, Callable[[], nn.Module]] = {
        "none (plain exit)": nn.Identity,
        "MLP, rank 32": lambda: ExitAdapter(hidden, 32),
        "MLP, rank 256": lambda: ExitAdapter(hidden, 256),
        "MLP, rank 512": lambda: ExitAdapter(hidden, 512),
        "two MLPs, rank 256": lambda: nn.Sequential(ExitAdapter(hidden, 256), ExitAdapter(hidden, 256)),
        "attention": lambda: Attention(hidden, 4, 0),
        "attention and MLP, rank 256": lambda: Attention(hidden, 4, 256),
    }
    learnt, measured = read(text), read(held_out)
    rows = []
    for name, make in forms.items():
        torch.manual_seed(0)
        form = make()
        started = time.process_time()
        _learn(form, readout, learnt, options.steps)
        figures = ExitFigures()
        with torch.no_grad():
            figures.add(measured[1].flatten(0, 1), readout.logits(form(measured[0])).flatten(0, 1))
        parameters = sum(weight.numel() for weight in form.parameters())
        rows.append({"form": name, "parameters": parameters, "alpha": figures.alpha(), "agreement": figures.agreement})
        print(rows[-1], f"{time.process_time() - started:.0f} s of CPU", flush=True)

    lines = ["| form | parameters | alpha at temperature 1 | top-1 agreement |", "|---|---|---|---|"]
    lines += [f"| {r['form']} | {r['parameters']:,} | {r['alpha']:.3f} | {r['agreement']:.3f} |" for r in rows]
    RESULTS.mkdir(exist_ok=True)
    settings = {"model": Path(options.model).name, **{n: getattr(options, n) for n in ("exit", "blocks", "steps")}}
    (RESULTS / "exit_forms.json").write_text(json.dumps({"settings": settings, "forms": rows}, indent=1) + "\n")
    (RESULTS / "exit_forms.md").write_text("\n".join(lines) + "\n")


def _learn(form: nn.Module, readout: Readout, learnt: tuple[Tensor, Tensor], steps: int) -> None:
    if not list(form.parameters()):
        return
    optimiser = torch.optim.AdamW(form.parameters(), lr=2e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        chosen = torch.arange(4 * step, 4 * step + 4) % learnt[0].shape[0]
        p = learnt[1][chosen].softmax(-1)
        log_q = readout.logits(form(learnt[0][chosen])).log_softmax(-1)
        loss = 1 - (p * log_q).sum(-1).mean() - torch.minimum(p, log_q.exp()).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


if __name__ == "__main__":
    main()

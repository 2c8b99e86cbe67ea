"""What the draws of a round cost: by a generator that the batch shares, as it was, and by a counter, as it is.

    python benchmarks/noise.py

A round draws four draft tokens, judges them and draws the token after them. Timed are these draws alone, given the
distributions: no softmax, no pass. Both ways take turns. `coupled` is the race by noise of the position, also as it
was and as it is; greedy decoding only looks for the likeliest token, and drew numbers to judge by that nobody needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from kept import RESULTS
from rich.progress import track
from timed import seconds_of
from torch import Tensor

from selfspec.decode.noise import Noise, Purpose
from selfspec.environment import environment

_VOCABULARIES = (512, 4096, 49152, 128256)
_ROWS = (1, 4, 16)
_DRAFTED = 4
_SETTINGS = ("greedy", "sampled at 0.8", "coupled")
_SEED = 0


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=41)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    cases = [(vocab, rows, setting) for vocab in _VOCABULARIES for rows in _ROWS for setting in _SETTINGS]
    figures = [_measured(*case, device, options.repeats) for case in track(cases, transient=True)]
    record = {"settings": vars(options), "environment": environment(device), "figures": figures}
    name = "noise" if device.type == "cpu" else f"noise_{device.type}"
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(_table(figures))
    print(_table(figures))


@torch.no_grad()
def _measured(vocab: int, rows: int, setting: str, device: torch.device, repeats: int) -> dict[str, object]:
    torch.manual_seed(_SEED)
    # Logits of a standard deviation of 3 put most of the weight on a few hundred tokens, as those of a model do.
    q = (3 * torch.randn(rows, _DRAFTED, vocab, device=device) / 0.8).softmax(-1)
    p = (3 * torch.randn(rows, _DRAFTED + 1, vocab, device=device) / 0.8).softmax(-1)
    ways: dict[str, Callable[[], object]] = {
        "old": _Old(q, p, setting).round,
        "new": _New(q, p, setting).round,
    }
    # Few rounds in a row, so that both ways meet the same machine; of the slowest, a hash for each token, few repeats.
    rounds = max(1, min(20, 200_000 // (rows * vocab)))
    if setting == "coupled" and rows * vocab > 100_000:
        repeats = 5
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 2):
        for way, run in ways.items():
            spent = seconds_of(lambda: _repeated(run, rounds, device))  # noqa: B023 - called at once
            if repeat > 1:
                seconds[way].append(spent / rounds)
    ratios = [new / old for old, new in zip(seconds["old"], seconds["new"], strict=True)]
    return {
        "vocabulary": vocab,
        "rows": rows,
        "setting": setting,
        "old_microseconds": 1e6 * statistics.median(seconds["old"]),
        "new_microseconds": 1e6 * statistics.median(seconds["new"]),
        "new_over_old": statistics.median(ratios),
    }


def _repeated(run: Callable[[], object], rounds: int, device: torch.device) -> None:
    for _ in range(rounds):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Old:
    """A round's draws by a generator."""

    def __init__(self, q: Tensor, p: Tensor, setting: str) -> None:
        self._q, self._p, self._setting = q, p, setting
        self._generator = torch.Generator(q.device).manual_seed(_SEED)

    def round(self) -> None:
        """Draw the draft, judge it, and draw what follows."""
        q, p = self._q, self._p
        for place in range(_DRAFTED):
            self._token(q[:, place : place + 1], place)
        shape = (q.shape[0], _DRAFTED)
        torch.lt(torch.rand(shape, generator=self._generator, dtype=p.dtype, device=p.device), 0.5)
        if self._setting == "coupled":
            _coupled_by_row_numbers(p, torch.arange(_DRAFTED + 1, device=p.device)[None])
        else:
            self._token(p[:, -1], _DRAFTED)

    def _token(self, weights: Tensor, place: int) -> Tensor:
        if self._setting == "greedy":
            return weights.argmax(-1)
        if self._setting == "coupled":
            return _coupled_by_row_numbers(weights, torch.tensor([[place]], device=weights.device))
        if weights.device.type == "cpu":
            return _drawn_by_inversion(weights, self._generator)
        return _drawn_by_race(weights, self._generator)


class _New:
    """The same draws by a counter."""

    def __init__(self, q: Tensor, p: Tensor, setting: str) -> None:
        self._q, self._p, self._setting = q, p, setting
        self._noise = Noise(_SEED, range(q.shape[0]), q.device)

    def round(self) -> None:
        """Draw the draft, judge it, and draw what follows."""
        q, p, noise = self._q, self._p, self._noise
        noise.begin_round()
        for place in range(_DRAFTED):
            self._token(q[:, place : place + 1], Purpose.DRAFT, place)
        if self._setting == "sampled at 0.8":
            torch.lt(noise.uniform(Purpose.ACCEPT, 0, _DRAFTED), 0.5)
        if self._setting == "coupled":
            noise.choose(p, torch.arange(_DRAFTED + 1, device=p.device)[None])
        else:
            self._token(p[:, -1:], Purpose.RECOVER, 0)

    def _token(self, weights: Tensor, purpose: Purpose, place: int) -> Tensor:
        if self._setting == "greedy":
            return weights.argmax(-1)
        if self._setting == "coupled":
            return self._noise.choose(weights, torch.tensor([[place]], device=weights.device))
        return self._noise.draw(weights, purpose, place)


def _drawn_by_inversion(weights: Tensor, generator: torch.Generator) -> Tensor:
    """How tokens were drawn on a CPU."""
    sums = weights.double().cumsum(-1)
    total = sums[..., -1:]
    places = torch.rand(total.shape, generator=generator, dtype=sums.dtype, device=sums.device) * total
    places = torch.minimum(places, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(sums, places, right=True)[..., 0]
    return found.clamp(max=weights.shape[-1] - 1)


def _drawn_by_race(weights: Tensor, generator: torch.Generator) -> Tensor:
    """How tokens were drawn on a GPU."""
    noise = torch.empty_like(weights).exponential_(generator=generator)
    return (weights / noise.clamp_min_(torch.finfo(noise.dtype).tiny)).argmax(-1)


def _coupled_by_row_numbers(weights: Tensor, positions: Tensor) -> Tensor:
    """How coupled tokens were chosen."""
    golden = -0x61C8864680B583EB
    batch, _, vocab = weights.shape
    key = _mixed(torch.full((batch, 1), _SEED, device=weights.device))
    rows = torch.tensor(range(batch), device=weights.device)
    key = _mixed(key + golden * (rows + 1)[:, None])
    key = _mixed(key + golden * (positions + 1))
    bits = _mixed(key[..., None] + golden * torch.arange(1, vocab + 1, device=weights.device))
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return (weights.double() / -uniform.log()).argmax(-1)


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shifted(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _table(figures: list[dict[str, object]]) -> str:
    lines = [
        f"Draws of a round with {_DRAFTED} draft tokens, in microseconds: medians, that of the ratio over neighbours.",
        "Greedily the old way also drew numbers that nobody needed; coupled, both compute the same for each token.",
        "",
        "| vocabulary | rows | setting | generator of the batch | counter | new over old |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    lines += [
        f"| {figure['vocabulary']} | {figure['rows']} | {figure['setting']} "
        f"| {figure['old_microseconds']:.0f} | {figure['new_microseconds']:.0f} | {figure['new_over_old']:.2f} |"
        for figure in figures
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""How long work will take, and work that fits."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from helpers import tiny
from selfspec.measure.expected_time import Size, TokenTimes, Work, fit

TIMES = TokenTimes(step=0.05, read=0.005)
SIZES = {"tokens": Size(64, 16), "samples": Size(400, 100)}


def work(sizes: Mapping[str, int]) -> Work:
    return Work(steps=10 * sizes["tokens"], read=20 * sizes["samples"])


def test_what_there_is_time_for_stays_as_usual() -> None:
    fitted = fit(SIZES, work, TIMES, minutes=10)
    assert fitted.sizes == {"tokens": 64, "samples": 400}
    assert fitted.shrunk == {}
    assert fitted.seconds == pytest.approx(640 * 0.05 + 8000 * 0.005)
    assert fitted.sentence(10) == "about 1 min expected; a token takes 50 ms here"


def test_sizes_shrink_together_until_the_work_fits() -> None:
    fitted = fit(SIZES, work, TIMES, minutes=0.75)
    assert 16 < fitted.sizes["tokens"] < 64
    assert 100 < fitted.sizes["samples"] < 400
    assert 40 < fitted.seconds <= 45
    said = f"To stay within 0.75 minutes: --tokens {fitted.sizes['tokens']}, --samples {fitted.sizes['samples']}"
    assert said in fitted.sentence(0.75)


def test_the_fewest_are_done_in_any_case() -> None:
    fitted = fit(SIZES, work, TIMES, minutes=0)
    assert fitted.sizes == {"tokens": 16, "samples": 100}
    assert fitted.seconds > 0


def test_what_was_asked_for_does_not_shrink() -> None:
    fitted = fit({}, lambda sizes: Work(steps=10**6), TIMES, minutes=1)
    assert fitted.sizes == fitted.shrunk == {}
    assert "13.9 h expected" in fitted.sentence(1)


def test_tokens_are_timed_alone_and_among_many() -> None:
    model, ticks, widths = tiny.llama(), iter(range(1000)), []
    hook = model.register_forward_pre_hook(
        lambda module, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    times = TokenTimes.measured(model, clock=lambda: next(ticks) / 10)
    hook.remove()
    assert set(widths) == {1, 32}
    # Each reading of the clock is a tenth of a second after the one before; enough is half a second.
    assert times.step == pytest.approx(0.1)
    assert times.read == pytest.approx(0.1 / 32)
    assert widths.count(1) == 4

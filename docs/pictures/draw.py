"""Draws the pictures of docs as SVG files beside this one: `python docs/pictures/draw.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from selfspec.tools.lab.plot import BLACK, BLUE, GREEN, ORANGE, PALE, PURPLE, STYLE, VERMILION
from selfspec.tools.lab.runs import Runs
from selfspec.tools.lab.table import estimate_in, records, summarise

GREY = "#777777"
FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent.parent / "benchmarks" / "results"
_LIGHT = {
    BLUE: "#CCE3F0",
    VERMILION: "#F7DFCC",
    GREEN: "#CCECE3",
    PURPLE: "#F5E4ED",
    GREY: "#EEEEEE",
    ORANGE: "#FAECCC",
}


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A picture in inches, whose axes count tenths of an inch."""
    figure = Figure((width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width * 10), ylim=(0, height * 10))
    axes.axis("off")
    return figure, axes


def _box(axes: Axes, x: float, y: float, w: float, h: float, text: str, colour: str = GREY, size: float = 8) -> None:
    axes.add_patch(
        FancyBboxPatch((x, y), w, h, "round,pad=0,rounding_size=0.4", fc=_LIGHT.get(colour, "white"), ec=colour, lw=1)
    )
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size, linespacing=1.35)


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0, colour: str = GREY
) -> None:
    how = {
        "arrowstyle": "-|>",
        "color": colour,
        "lw": 1.1,
        "connectionstyle": f"arc3,rad={bend}",
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", end, start, arrowprops=how)


def draw_round() -> Figure:
    """One round: what goes in, what the draft says, what the target says, what is committed."""
    figure, axes = _canvas(7.2, 2.9)
    steps = [
        ("propose", "four cheap draft steps", BLUE),
        ("verify", "one pass of the whole\nmodel reads all four", GREEN),
        ("judge", "accept, or draw\nthe token anew", ORANGE),
        ("commit", "four tokens from\none pass", GREY),
    ]
    for number, (name, what, colour) in enumerate(steps):
        x = 2 + 17.6 * number
        _box(axes, x, 17, 14.6, 6.4, f"{name}\n{what}", colour, 7.5)
        if number < 3:
            _arrow(axes, (x + 14.8, 20.2), (x + 17.4, 20.2))
    axes.text(2, 25.6, "text so far:  def find(path):", fontsize=8, family="monospace")
    rows = [
        ("return", "path", ".", "name"),
        ("return", "path", ".", "join"),
        ("yes", "yes", "yes", "no"),
        ("return", "path", ".", "join"),
    ]
    for number, row in enumerate(rows):
        for place, token in enumerate(row):
            last, y = place == 3, 13.4 - 3.2 * place
            colour = BLUE
            if number == 1 or (number == 3 and not last):
                colour = GREEN
            elif number == 2:
                colour = VERMILION if last else GREEN
            elif number == 3:
                colour = ORANGE
            _box(axes, 4.3 + 17.6 * number, y, 10, 2.5, token, colour, 7.5)
    axes.plot([70.2, 70.2, 2.6, 2.6], [17, 1.4, 1.4, 4], color=GREY, lw=1.1)
    _arrow(axes, (2.6, 1.4), (2.6, 16.6))
    axes.text(36, 2.0, "next round", ha="center", fontsize=7, color=GREY)
    return figure


def draw_paths() -> Figure:
    """Which sublayers draft steps of each kind run, and where verification resumes."""
    figure, axes = _canvas(7.2, 3.1)
    exact, rounded, absent = BLUE, GREEN, None
    paths = [
        ("full model", [exact] * 8, None),
        ("exit:4", [exact] * 4 + [absent] * 4, 4),
        ("skip:layers=3,5", [exact, exact, exact, absent, exact, absent, exact, exact], 3),
        ("int8", [rounded] * 8, 0),
        ("int8+exit:6", [rounded] * 6 + [absent] * 2, 0),
        ("lookup", [absent] * 8, None),
    ]
    for line, (name, layers, resume) in enumerate(paths):
        y = 23.4 - 4 * line
        axes.text(1.5, y + 1.2, name, va="center", fontsize=8, family="monospace")
        for number, colour in enumerate(layers):
            x = 16.5 + 5.2 * number
            if colour is None:
                axes.add_patch(
                    FancyBboxPatch(
                        (x, y), 4.4, 2.4, "round,pad=0,rounding_size=0.3", fc="white", ec=PALE, lw=0.8, ls=":"
                    )
                )
            else:
                _box(axes, x, y, 4.4, 2.4, "", colour)
        if name == "lookup":
            axes.add_patch(
                FancyBboxPatch(
                    (58.6, y), 4.4, 2.4, "round,pad=0,rounding_size=0.3", fc="white", ec=PALE, lw=0.8, ls=":"
                )
            )
        else:
            _box(axes, 58.6, y, 4.4, 2.4, "", rounded if name.startswith("int") else exact)
        if resume is not None:
            x = 16.1 + 5.2 * resume
            axes.plot([x, x], [y - 0.5, y + 2.9], color=VERMILION, lw=1.8)
    for number in range(8):
        axes.text(18.7 + 5.2 * number, 27.2, str(number), ha="center", fontsize=7, color=GREY)
    axes.text(16.5, 29, "layer", fontsize=7, color=GREY)
    axes.text(60.8, 27.2, "head", ha="center", fontsize=7, color=GREY)
    keys = [(BLUE, "runs as it is"), (GREEN, "runs in fewer bits")]
    for number, (colour, what) in enumerate(keys):
        _box(axes, 1.5 + 15 * number, 0.4, 2, 1.4, "", colour)
        axes.text(4.2 + 15 * number, 1.1, what, va="center", fontsize=7)
    axes.add_patch(FancyBboxPatch((34.5, 0.4), 2, 1.4, "round,pad=0,rounding_size=0.2", fc="white", ec=PALE, ls=":"))
    axes.text(37.2, 1.1, "left out", va="center", fontsize=7)
    axes.plot([46.5, 46.5], [0.3, 1.9], color=VERMILION, lw=1.8)
    axes.text(47.4, 1.1, "verification resumes here", va="center", fontsize=7)
    return figure


def draw_rule() -> Figure:
    """Rejection sampling: what is accepted of q, and the residual that a rejected token is replaced from."""
    p = np.array([0.42, 0.26, 0.18, 0.09, 0.05])
    q = np.array([0.22, 0.40, 0.10, 0.20, 0.08])
    kept = np.minimum(p, q)
    left = np.maximum(p - q, 0)
    figure = Figure((7.2, 2.3), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, 3, sharey=True)
    at, words = np.arange(5), ["join", "name", "stem", "exists", "open"]
    panels[0].bar(at - 0.2, p, 0.38, color=GREEN, label="p, the model's")
    panels[0].bar(at + 0.2, q, 0.38, color=BLUE, label="q, the draft's")
    panels[0].set_title("1. both give a distribution")
    panels[1].bar(at, q, 0.6, color="white", edgecolor=VERMILION, hatch="////", label="rejected")
    panels[1].bar(at, kept, 0.6, color=BLUE, label="accepted: min(p, q)")
    panels[1].set_title("2. a token drawn from q is accepted\nwith probability min(1, p/q)")
    panels[2].bar(at, kept, 0.6, color=BLUE, label="accepted")
    panels[2].bar(at, left, 0.6, bottom=kept, color=ORANGE, label="residual max(p - q, 0)")
    panels[2].plot(at, p, "_", color=BLACK, ms=14, label="p")
    panels[2].set_title("3. else another is drawn from the\nresidual: together exactly p")
    for panel in panels:
        panel.set_xticks(at, words)
        panel.set_ylim(0, 0.6)
        panel.legend(loc="upper right")
    panels[0].set_ylabel("probability")
    return figure


def draw_tree() -> Figure:
    """A tree of drafts, its block in the cache, and what each node sees."""
    figure, axes = _canvas(7.2, 2.7)
    nodes = {
        -1: (4, 13, "("),
        0: (15, 19, "self"),
        1: (15, 7, "path"),
        2: (26, 22, ","),
        3: (26, 16, ")"),
        4: (26, 7, ":"),
    }
    parents = (-1, -1, 0, 0, 1)
    for node, parent in enumerate(parents):
        (x, y, _), (end, top, _) = nodes[parent], nodes[node]
        _arrow(axes, (x + 6.4, y + 1.2), (end - 0.2, top + 1.2))
    for node, (x, y, token) in nodes.items():
        name = token if node < 0 else f"{node}:  {token}"
        _box(axes, x, y, 6.2, 2.6, name, GREY if node < 0 else BLUE, 8)
    axes.text(4, 10.8, "last committed\ntoken", fontsize=7, color=GREY, va="top")
    axes.text(15, 2.6, "depth 1", fontsize=7, color=GREY)
    axes.text(26, 2.6, "depth 2", fontsize=7, color=GREY)
    sees = {-1: {-1}}
    for node, parent in enumerate(parents):
        sees[node] = sees[parent] | {node}
    labels = ["text", "(", "self", "path", ",", ")", ":"]
    for row, node in enumerate(range(-1, 5)):
        y = 18.2 - 2.8 * row
        axes.text(45.6, y + 1.2, labels[row + 1], ha="right", va="center", fontsize=7.5, family="monospace")
        for column in range(7):
            seen = column == 0 or column - 2 in sees[node]
            colour = (GREY if column == 0 else BLUE) if seen else None
            _box(axes, 46.5 + 3.2 * column, y, 2.7, 2.4, "", colour or PALE) if seen else axes.add_patch(
                FancyBboxPatch(
                    (46.5 + 3.2 * column, y), 2.7, 2.4, "round,pad=0,rounding_size=0.3", fc="white", ec=PALE, lw=0.8
                )
            )
    for column, label in enumerate(labels):
        axes.text(47.9 + 3.2 * column, 21.6, label, ha="center", fontsize=7.5, family="monospace")
    axes.text(40, 24.4, "what each node sees in the pass that verifies all", fontsize=7.5, color=GREY)
    return figure


def draw_formula() -> Figure:
    """The speed-up that the formula promises, over acceptance, for what a draft step and a wide pass cost."""
    figure = Figure((7.2, 2.7), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    alpha = np.linspace(0, 0.99, 100)
    for panel, verify, title in zip(
        panels,
        (1.0, 1.4),
        ("a pass over several tokens costs one step", "a pass over several tokens costs 1.4 steps"),
        strict=True,
    ):
        for cost, colour, dashes in ((0.05, GREEN, "-"), (0.2, BLUE, "--"), (0.4, ORANGE, "-."), (0.7, VERMILION, ":")):
            speeds = [
                (1 - alpha ** (gamma + 1)) / (1 - alpha) / (gamma * cost + (verify if gamma else 1.0))
                for gamma in range(9)
            ]
            panel.plot(alpha, np.max(speeds, 0), color=colour, ls=dashes, label=f"c = {cost:g}")
        panel.axhline(1, color=GREY, lw=0.8)
        panel.set(xlabel="acceptance rate alpha", xlim=(0, 1), ylim=(0.8, 5), title=title)
        panel.grid()
    panels[0].set_ylabel("speed-up at the best draft\nlength up to 8")
    panels[0].legend(loc="upper left", title="a draft step costs")
    return figure


def draw_streaming() -> Figure:
    """Where weights lie under a byte budget, and what a round reads from the disk."""
    figure, axes = _canvas(7.2, 2.5)
    axes.text(2, 22.2, "in memory, within the budget", fontsize=8)
    _box(axes, 2, 16.4, 30, 4.6, "", GREY)
    for number in range(3):
        _box(axes, 3 + 4.1 * number, 17.2, 3.7, 3, str(number), BLUE)
    for number in range(3, 8):
        _box(axes, 15.6 + 2.9 * (number - 3), 17.2, 2.6, 3, str(number), GREEN, 7)
    axes.text(9, 15.1, "layers that stay", ha="center", fontsize=7, color=GREY)
    axes.text(22.9, 15.1, "copies in 4 or 8 bits", ha="center", fontsize=7, color=GREY)
    axes.text(42, 22.2, "on the disk", fontsize=8)
    for number in range(3, 8):
        _box(axes, 42 + 4.1 * (number - 3), 17.2, 3.7, 3, str(number), BLUE)
    axes.text(52, 15.1, "read once for a target pass", ha="center", fontsize=7, color=GREY)
    _arrow(axes, (41.4, 18.7), (32.6, 18.7), colour=VERMILION)
    axes.text(2, 10.4, "without a draft", va="center", fontsize=8)
    axes.text(2, 4.4, "with a draft", va="center", fontsize=8)
    for number in range(4):
        _box(axes, 14 + 13.6 * number, 9.2, 12.6, 2.6, "read, one token", VERMILION, 7)
    for number in range(8):
        _box(axes, 14 + 1.5 * number, 3.2, 1.2, 2.6, "", GREEN)
    _box(axes, 26.2, 3.2, 12.6, 2.6, "read, six tokens", VERMILION, 7)
    for number in range(8):
        _box(axes, 39.6 + 1.5 * number, 3.2, 1.2, 2.6, "", GREEN)
    _box(axes, 51.8, 3.2, 12.6, 2.6, "read, seven tokens", VERMILION, 7)
    axes.text(68.4, 1.0, "time", ha="right", va="center", fontsize=7, color=GREY)
    _arrow(axes, (14, 1.9), (68.4, 1.9))
    return figure


def draw_planes() -> Figure:
    """Where the sixteen bits of a bfloat16 number go."""
    figure, axes = _canvas(7.2, 3.1)
    colours = [VERMILION, *[GREY] * 8, *[BLUE] * 3, *[GREEN] * 4]
    bits = "s" + "e" * 8 + "m" * 7
    for place, (bit, colour) in enumerate(zip(bits, colours, strict=True)):
        _box(axes, 17 + 3.2 * place, 24.6, 2.8, 2.8, bit, colour, 8)
    for first, last, what in ((0, 0, "sign"), (1, 8, "exponent"), (9, 15, "mantissa")):
        middle = 17 + 3.2 * (first + last + 1) / 2 - 0.2
        axes.text(middle, 28.3, what, ha="center", fontsize=7, color=GREY)
    axes.text(2, 26, "bfloat16", va="center", fontsize=8)
    upper = [("s", VERMILION), *[("c", ORANGE)] * 4, *[("m", BLUE)] * 3]
    for place, (bit, colour) in enumerate(upper):
        _box(axes, 17 + 3.2 * place, 11.6, 2.8, 2.8, bit, colour, 8)
    for place in range(4):
        _box(axes, 55.4 + 3.2 * place, 11.6, 2.8, 2.8, "m", GREEN, 8)
    axes.text(2, 13, "in planes", va="center", fontsize=8)
    _box(axes, 24.8, 18, 18.8, 3.4, "code = exponent - base of the row\n1 to 15; 0 for zero", ORANGE, 7)
    _arrow(axes, (18.4, 24.3), (18.4, 14.7), colour=VERMILION)
    _arrow(axes, (32.6, 24.3), (32.6, 21.6))
    _arrow(axes, (27, 17.8), (26, 14.7), bend=0.1, colour=ORANGE)
    _arrow(axes, (50.4, 24.3), (38.6, 14.7), bend=-0.15, colour=BLUE)
    _arrow(axes, (61.6, 24.3), (61.6, 14.7), colour=GREEN)
    axes.text(29.6, 9.7, "upper plane: one byte", ha="center", fontsize=7.5)
    axes.text(29.6, 7.8, "alone, half a step added, it is the draft", ha="center", fontsize=7, color=GREY)
    axes.text(61.6, 9.7, "lower plane: half a byte", ha="center", fontsize=7.5)
    axes.text(61.6, 7.8, "read by target passes alone", ha="center", fontsize=7, color=GREY)
    _box(axes, 17, 2.2, 12, 3, "base", ORANGE, 7.5)
    axes.text(30, 3.7, "one for each row", va="center", fontsize=7, color=GREY)
    _box(axes, 43, 2.2, 12, 3, "place, weight", GREY, 7.5)
    axes.text(56, 3.7, "a list: weights without a code", va="center", fontsize=7, color=GREY)
    axes.text(2, 3.7, "beside them", va="center", fontsize=8)
    return figure


def draw_front() -> Figure:
    """Speed and bytes of weights of ways to decode a checkpoint in bfloat16, as the results have them."""
    table = summarise(Runs(RESULTS / "planes_avx512_bfloat16").measured("generation"))
    speeds = {(row["arm"], row["temperature"]): row for row in records(table)}
    sizes = json.loads((RESULTS / "planes_bits.json").read_text())["models"]["smollm2-bf16"]
    dense, packed = sizes["bytes in bfloat16"] / 1e6, sizes["bytes in planes"] / 1e6
    ways = (
        ("llama.cpp bf16", "llama.cpp, BF16", dense, GREY),
        ("selfspec plain", "selfspec", dense, BLUE),
        ("planes", "selfspec, in planes", packed, GREEN),
        ("planes, lookup+upper", "in planes, draft lookup+upper", packed, GREEN),
    )
    figure = Figure((7.2, 2.5))
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (2.4, 1), "wspace": 0.06})
    for place, (arm, _, size, colour) in enumerate(ways):
        for shift, temperature in ((-0.2, 0.0), (0.2, 0.8)):
            speed = estimate_in(speeds[arm, temperature], "whole_speedup_over_generate")
            assert speed is not None
            error = [[speed.value - speed.low], [speed.high - speed.value]]
            alpha = 0.55 if temperature else 1
            left.barh(place + shift, speed.value, 0.36, color=colour, alpha=alpha, xerr=error, ecolor=BLACK)
        right.barh(place, size, 0.76, color=colour)
        right.text(size - 8, place, f"{size:.0f} MB", ha="right", va="center", fontsize=8, color="white")
    left.axvline(1, color=BLACK, linewidth=0.8, linestyle=":")
    left.set(yticks=range(len(ways)), yticklabels=[shown for _, shown, *_ in ways])
    left.set_xlabel("times as fast as model.generate (dotted)\ndark: greedy; light: temperature 0.8")
    right.set(yticks=[], xlabel="weights", xticks=[])
    for axes in (left, right):
        axes.invert_yaxis()
        axes.tick_params(length=0)
    figure.subplots_adjust(0.26, 0.22, 0.99, 0.98)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "round": draw_round,
    "paths": draw_paths,
    "rule": draw_rule,
    "tree": draw_tree,
    "formula": draw_formula,
    "streaming": draw_streaming,
    "planes": draw_planes,
    "front": draw_front,
}


def main() -> None:
    """Draw them all. The same code gives the same bytes."""
    for name, draw in PICTURES.items():
        # Letters as shapes: readers need no font.
        with rc_context({**STYLE, "svg.hashsalt": "selfspec"}):
            figure = draw()
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Creator": None}, facecolor="white")


if __name__ == "__main__":
    main()

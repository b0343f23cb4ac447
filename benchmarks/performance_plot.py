"""Plot of how far each case that `run.py` measured is from its target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison import Comparison

_GREY = "#7b838c"
"""Color of everything but the data: readable on white and on black, as the background is transparent."""
_MET, _MISSED = "#2f81f7", "#e8710a"


def plot(comparisons: Sequence[Comparison], file: Path) -> None:
    """Plot each case that has a target as a dot with its quartiles: 1 is the target, more is better.

    Args:
        comparisons: cases without a target are left out.
        file: SVG file to write.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    with_target = [each for each in comparisons if each.target is not None]
    names = list(dict.fromkeys(_label(each) for each in with_target))
    look: Any = {"svg.fonttype": "none", "svg.hashsalt": "performance", "font.size": 10, "legend.frameon": False}
    look |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY)
    with pyplot.rc_context(look):
        figure, axes = pyplot.subplots(figsize=(8, 0.9 + 0.42 * len(names)), layout="constrained")
        for line, name in enumerate(names):
            cases = [each for each in with_target if _label(each) == name]
            for position, case in enumerate(cases):
                height = line + 0.6 * ((position + 0.5) / len(cases) - 0.5)
                color = _MET if case.is_met else _MISSED
                axes.plot([_margin(case, case.low), _margin(case, case.high)], [height] * 2, color=color, linewidth=1)
                axes.plot(_margin(case, case.ratio), height, "o", color=color, markersize=3.5)
        axes.axvline(1, color=_GREY, linewidth=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g} ×")
        axes.set_xlabel("times better than the target, medians and quartiles")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _label(comparison: Comparison) -> str:
    peer = f" vs. {comparison.peer_name}" if comparison.peer_name else ""
    return f"{comparison.benchmark}{peer}, {comparison.target}"


def _margin(comparison: Comparison, ratio: float) -> float:
    assert comparison.target is not None
    bound = comparison.target.bound
    return max(ratio, 1e-9) / bound if comparison.target.at_least else bound / max(ratio, 1e-9)

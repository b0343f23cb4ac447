"""Plot of the figures that `soak.py` wrote.

python benchmarks/soak_plot.py soak.json docs/images/soak.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_GREY = "#7b838c"
"""Color of axes and labels: legible on white and on black, since the background is the page's own."""
_MEMORY = {"tree_pss": ("all processes", "#e8710a"), "server_pss": ("the server's own", "#2f81f7")}
_COUNTS = {
    "descriptors": ("descriptors", "#2f81f7"),
    "processes": ("processes below the server", "#e8710a"),
    "threads": ("threads", "#2da44e"),
}


def plot(figures: dict[str, Any], file: Path) -> None:
    """Plot memory and the other counts over the requests: lines during the run, dots where the server was idle.

    Args:
        figures: the output of `soak.py`.
        file: an SVG file.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    look: Any = {"svg.fonttype": "none", "svg.hashsalt": "soak", "font.size": 10, "legend.frameon": False}
    look |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY)
    samples = figures["samples"]
    with pyplot.rc_context(look):
        figure, (memory, counts) = pyplot.subplots(
            2, 1, figsize=(8, 5.2), sharex=True, height_ratios=[3, 2], layout="constrained"
        )
        _lines(memory, samples, _MEMORY, 2**20)
        memory.set_ylabel("memory, MiB")
        _lines(counts, samples, _COUNTS, 1)
        counts.set_ylabel("number")
        counts.set_xlabel("requests")
        counts.xaxis.set_major_formatter("{x:,.0f}")
        warm_up = int(figures["options"]["warm_up"])
        for axes in (memory, counts):
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
            axes.axvline(warm_up, color=_GREY, linestyle=":", linewidth=1)
            axes.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=3)
        last = samples[-1]
        figure.suptitle(
            f"{last['requests']:,} requests, of which {len(figures['failures'])} did not end as they must; "
            f"{last['engine']['sandboxes_started']:,} sandboxes",
            fontsize=10,
        )
        figure.savefig(file, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _lines(axes: Any, samples: list[dict[str, Any]], series: dict[str, tuple[str, str]], unit: int) -> None:
    quiet = [sample for sample in samples if sample["quiet"]]
    for name, (label, color) in series.items():
        for some, look in ((samples, {"linewidth": 0.8, "alpha": 0.6}), (quiet, {"linestyle": "", "marker": "o"})):
            axes.plot(
                [sample["requests"] for sample in some],
                [sample["resources"][name] / unit for sample in some],
                color=color,
                markersize=4,
                label=label if some is quiet else None,
                **look,
            )


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))

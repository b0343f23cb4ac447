"""Renders the chart in `deploy/chart` with Helm, and validates what comes out against Kubernetes' schemas.

Runs in the environment of `tests/peers/helm.sh`. Reads a JSON object with the values to override, and prints the
rendered documents as JSON.

Usage: `render_chart.py CHART VALUES_FILE…`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import kubernetes_validate
import yaml
from helm_python import Chart

KUBERNETES = "1.34"
NOT_IN_KUBERNETES = ("ServiceMonitor",)


def main(chart: str, values_files: list[str]) -> None:
    values: dict[str, object] = {}
    for file in values_files:
        values |= yaml.safe_load(Path(file).read_text())
    values |= json.load(sys.stdin)
    with Chart.load(chart) as loaded:
        files = loaded.render(values=values, name="demo", namespace="llm")
    found = []
    for name, text in files.items():
        for document in [] if name.endswith("NOTES.txt") else yaml.safe_load_all(text):
            if document is not None:
                if document["kind"] not in NOT_IN_KUBERNETES:
                    kubernetes_validate.validate(document, KUBERNETES, strict=True)
                found.append(document)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

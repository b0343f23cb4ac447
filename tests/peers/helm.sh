#!/usr/bin/env bash
# Creates a virtual environment with Helm's library and Kubernetes' schemas, which check the chart in deploy/chart. The
# first run takes a moment and 150 MB; later runs do nothing.
#     tests/peers/helm.sh DIR
set -euo pipefail
dir=$1
packages=(helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 pyyaml==6.0.4)

if [ "$(cat "$dir/installed" 2>/dev/null)" != "${packages[*]}" ]; then
  python3 -m venv "$dir"
  "$dir/bin/python" -m pip install -q "${packages[@]}"
  echo "${packages[*]}" > "$dir/installed"
fi

#!/usr/bin/env bash
# Unpacks the Python part of vLLM's GPU build: newer than the CPU build, and enough for what needs none of its kernels.
# To be put before vLLM's CPU build in PYTHONPATH. The first run downloads 340 MB; later runs do nothing.
#     tests/peers/vllm_python.sh DIR
set -euo pipefail
dir=$1
version=0.33.0

[ -f "$dir/vllm-$version.dist-info/METADATA" ] && exit
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip download -q --no-deps --only-binary=:all: -d "$work" "vllm==$version"
python3 - "$work" "$dir" <<'PY'
import glob, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + "/vllm-*.whl")[0])
for name in wheel.namelist():
    if name.endswith(".py") or ".dist-info/" in name:
        wheel.extract(name, sys.argv[2])
PY

#!/usr/bin/env bash
# Unpacks what vLLM's source distribution has for logits processors: its tests and examples; and installs the plugin
# of pytest that they need.
# The first run downloads 40 MB; later runs do nothing.
#     tests/peers/vllm_tests.sh DIR
set -euo pipefail
dir=$1
version=0.33.0

[ -f "$dir/version-$version" ] && exit
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# To build it would need vLLM's compilers: pip gives up after it has unpacked the files, and leaves them.
TMPDIR=$work python3 -m pip download -q --no-clean --no-deps --no-build-isolation --no-binary=:all: -d "$work" \
    "vllm==$version" >"$work/log" 2>&1 || true
source=$(echo "$work"/pip-download-*/vllm_*)
if [ ! -d "$source/tests/v1/logits_processors" ]; then
    cat "$work/log" >&2
    exit 1
fi
rm -rf "$dir"
mkdir -p "$dir/tests/v1" "$dir/examples"
cp -r "$source/tests/v1/logits_processors" "$dir/tests/v1/"
cp -r "$source/examples/features/logits_processor" "$dir/examples/"
python3 -m pip install -q --no-deps --target "$dir/packages" pytest-asyncio==1.5.0
touch "$dir/version-$version"

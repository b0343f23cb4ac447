#!/usr/bin/env bash
# Creates a virtual environment with clients of OpenAI's API that others wrote. It has neither torch nor logitship. The
# first run takes some minutes and 1 GB; later runs do nothing.
#     tests/peers/clients.sh DIR
set -euo pipefail
dir=$1
packages=(dspy==3.4.1 guidance==0.3.1 instructor==1.17.0 langchain-openai==1.7.3 litellm==1.106.2 lm-eval==0.4.13
  mcp==2.3.0 openai==2.54.0 outlines==1.3.3)

if [ "$(cat "$dir/installed" 2>/dev/null)" != "${packages[*]}" ]; then
  python3 -m venv "$dir"
  "$dir/bin/python" -m pip install -q "${packages[@]}"
  echo "${packages[*]}" > "$dir/installed"
fi

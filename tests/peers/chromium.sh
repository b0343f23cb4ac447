#!/usr/bin/env bash
# Prints the path of a Chromium for the browser tests, and installs one if there is none:
#     tests/peers/chromium.sh
# It is the one that $LOGITSHIP_CHROMIUM names, else one on the PATH, else Debian's if packages can be installed, else
# the one that playwright downloads.
set -euo pipefail

if [ -n "${LOGITSHIP_CHROMIUM:-}" ]; then
  [ -x "$LOGITSHIP_CHROMIUM" ] || { echo "LOGITSHIP_CHROMIUM: $LOGITSHIP_CHROMIUM is not an executable file" >&2; exit 1; }
  echo "$LOGITSHIP_CHROMIUM"
  exit
fi

on_path() {
  for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" && return
  done
  return 1
}

of_playwright() {
  python3 -c '
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    print(playwright.chromium.executable_path)'
}

on_path && exit

# Tests run in parallel: one of them installs, the others wait.
exec 9> "${TMPDIR:-/tmp}/logitship-chromium-$(id -u).lock"
flock 9
on_path && exit

if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } >&2 || true
  on_path && exit
fi

python3 -m playwright install chromium >&2 || true
path=$(of_playwright)
if [ ! -x "$path" ]; then
  echo "The browser tests need Chromium, which could be neither found nor installed. Install it (apt-get install" >&2
  echo "chromium), or set its path: LOGITSHIP_CHROMIUM=/path/to/chromium" >&2
  exit 1
fi
echo "$path"

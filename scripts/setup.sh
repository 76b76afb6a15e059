#!/usr/bin/env bash
# Make a virtualenv with fxpipe and everything its tests, pictures and notebooks need.
# Debian's packages (graphviz, chromium) are added where they are missing and we are root.
set -euo pipefail
python=${PYTHON:-python3}
venv=${VENV:-.venv}

missing=()
command -v dot >/dev/null || missing+=(graphviz)
command -v chromium >/dev/null || missing+=(chromium)
if ((${#missing[@]})) && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing Debian packages: ${missing[*]}"
  apt-get update -qq || true
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null ||
    echo "could not install ${missing[*]}: pictures fall back to DOT, and the browser test needs chromium" >&2
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "fxpipe needs Python 3.11 or newer, found $("$python" --version)" >&2
  exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"

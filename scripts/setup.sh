#!/usr/bin/env bash
# setup.sh demo: a virtualenv with what `fxpipe demo` needs, and nothing else.
# setup.sh test: the same with what tests, pictures and notebooks need. Debian's packages (graphviz,
#                chromium) are added where they are missing and we are root.
set -euo pipefail
what=${1:?demo or test}
python=${PYTHON:-python3}
venv=${VENV:-.venv}
torch=${TORCH:-2.13.0}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "fxpipe needs Python 3.11 or newer, found $("$python" --version)" >&2
  exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
install() {
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" "torch==$torch"
}
if [ "$what" = demo ]; then
  install -e ".[cli]"
  exit
fi

missing=()
command -v dot >/dev/null || missing+=(graphviz)
command -v chromium >/dev/null || missing+=(chromium)
if ((${#missing[@]})) && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing Debian packages: ${missing[*]}"
  apt-get update -qq || true
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null ||
    echo "could not install ${missing[*]}: pictures of nodes need graphviz, and a test needs chromium" >&2
fi
install -e ".[dev]"

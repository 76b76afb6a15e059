#!/usr/bin/env bash
# setup.sh demo: a virtualenv with what `fxpipe demo` needs, and nothing else.
# setup.sh test: the same with what tests, pictures and notebooks need. Debian's chromium is added
#                where it is missing and we are root.
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
  # The demo runs from this folder. Python compiles the few modules of torch that it imports;
  # pip would compile all of them, which takes as long as the demo.
  read -ra needs < <("$python" -c 'import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["cli"])')
  install --no-compile "${needs[@]}"
  exit
fi

if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing Debian's chromium"
  apt-get update -qq || true
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null ||
    echo "could not install chromium, which a test of the report needs" >&2
fi
install -e ".[dev]"

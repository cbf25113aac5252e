#!/bin/sh
# Build sdist and wheel, check what they say of themselves, install the sdist alone in an empty environment (its wheel
# must be the one built here) and use it from another folder: the quick demo, which is every command from questions to
# an export, and the reports.
# Usage: tests/wheel_smoke.sh PYTHON BIN [DIST]
#   BIN: the folder of an environment that has `build`, `hatchling` and `twine`; DIST: a folder that gets both files.
set -eu
python=$1
bin=$(cd "$2" && pwd)
here=$(pwd)
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
# The wheel is built from the sdist.
"$bin/python" -m build --no-isolation --outdir "$room/dist" . >/dev/null
"$bin/python" -m twine check --strict "$room"/dist/*
"$python" -m venv "$room/venv"
pip="$room/venv/bin/python -m pip install --quiet --disable-pip-version-check -c $here/constraints.txt"
$pip "$(grep '^torch==' constraints.txt)"
$pip "$room"/dist/hiddenstore-*.tar.gz
cd "$room"
export OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1
hiddenstore=$room/venv/bin/hiddenstore
"$room/venv/bin/python" - <<'PY'
import glob, pathlib, zipfile
import collectors.demo, hiddenstore, schemas, trainer
for package in (schemas, hiddenstore, collectors, trainer):
    assert "site-packages" in package.__file__, package.__file__
assert (collectors.demo.TARGET_DIR / "model.safetensors").is_file()
site = pathlib.Path(hiddenstore.__file__).parents[1]
(wheel,) = glob.glob("dist/*.whl")
with zipfile.ZipFile(wheel) as files:
    for name in files.namelist():
        assert ".dist-info/" in name or (site / name).read_bytes() == files.read(name), name
PY
"$hiddenstore" --version
"$hiddenstore" --help >/dev/null
"$hiddenstore" doctor
"$hiddenstore" demo try --quick
test -s try/eagle3.1/drafter/model.safetensors
"$hiddenstore" report try/store
"$hiddenstore" report try/eagle3.1/run
test -s store-report.html
test -s run-report.html
if [ $# -gt 2 ]; then
    mkdir -p "$here/$3"
    cp "$room"/dist/* "$here/$3"
fi
echo "wheel and sdist: ok"

#!/bin/sh
# Build a wheel, install it alone in an empty environment, and use it from another folder.
# Usage: tests/wheel_smoke.sh PYTHON BIN   (BIN: the folder of an environment that has `build` and `hatchling`)
set -eu
python=$1
bin=$(cd "$2" && pwd)
here=$(pwd)
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
"$bin/python" -m build --wheel --no-isolation --outdir "$room/dist" . >/dev/null
"$python" -m venv "$room/venv"
pip="$room/venv/bin/python -m pip install --quiet --disable-pip-version-check -c $here/constraints.txt"
$pip "$(grep '^torch==' constraints.txt)"
$pip "$room"/dist/hiddenstore-*.whl
cd "$room"
export OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1
hiddenstore=$room/venv/bin/hiddenstore
"$room/venv/bin/python" - <<'PY'
import collectors.demo, hiddenstore, schemas, trainer
for package in (schemas, hiddenstore, collectors, trainer):
    assert "site-packages" in package.__file__, package.__file__
assert (collectors.demo.TARGET_DIR / "model.safetensors").is_file()
PY
target=$("$room/venv/bin/python" -c "from collectors.demo import TARGET_DIR; print(TARGET_DIR)")
cat > questions.jsonl <<'ROWS'
{"messages": [{"role": "user", "content": "What does `shutil.copytree` do?"}, {"role": "assistant", "content": "Recursively copy a directory tree."}]}
{"messages": [{"role": "user", "content": "Explain `json.dumps`."}, {"role": "assistant", "content": "Serialize an object to a JSON formatted string."}]}
{"messages": [{"role": "user", "content": "What is `heapq.heappush`?"}, {"role": "assistant", "content": "Push item onto heap, maintaining the heap invariant."}]}
ROWS
"$hiddenstore" --version
"$hiddenstore" --help >/dev/null
"$hiddenstore" doctor
"$hiddenstore" prepare questions.jsonl -o data --target "$target" --val 0
"$hiddenstore" collect data -o store --target "$target"
"$hiddenstore" info store
"$hiddenstore" verify store --full
"$hiddenstore" train store -o run train.max_steps=3
"$hiddenstore" eval run store --split train
"$hiddenstore" export run --engine vllm -o drafter
test -s drafter/model.safetensors
"$hiddenstore" report store
"$hiddenstore" report run
test -s store-report.html
test -s run-report.html
echo "wheel: ok"

#!/usr/bin/env bash
# Ten minutes on a GPU, the most telling first: installs wheels, runs tests/gpu, then benchmarks and profiles. Each step
# has its own time limit, and none stops the others. Run it in a checkout:
#
#     scripts/gpu_check.sh WHEELS OUT [SECONDS]
#
# WHEELS  a folder of wheels that this machine's Python lacks and cannot download. Where PyTorch, transformers and Triton
#         are there, these remain: pydantic, pydantic-core, annotated-types, typing-inspection (settings), rich,
#         markdown-it-py, mdurl, pygments, platformdirs, llguidance, torchao (quantised self-drafters), and pytest,
#         pytest-timeout, pluggy, iniconfig where they are missing. numpy, pyyaml, psutil, safetensors come with PyTorch
#         and transformers.
# OUT     the folder for results: summary.json, a log of each step, JUnit files, JSON of benchmarks.
# SECONDS the time of all steps together, 540 by default; each step gets its share of it.
#
# Variables: PYTHON (python3), QUICK_CONTEXT (16384), FULL_CONTEXT (empty: what fits the device), DEVICE (cuda).
set -u
if [ $# -lt 2 ]; then
    echo "usage: scripts/gpu_check.sh WHEELS OUT [SECONDS]" >&2
    exit 2
fi
cd "$(dirname "$0")/.." || exit 2
wheels=$1 out=$2 total=${3:-540}
python=${PYTHON:-python3} device=${DEVICE:-cuda} quick=${QUICK_CONTEXT:-16384} full=${FULL_CONTEXT:-}
mkdir -p "$out" || exit 2
: > "$out/steps.tsv"
# The tests of quantised self-drafters decode with the demo pair, which is not installed there.
export PYTHONPATH="$PWD:$PWD/demo_weights${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false

# step NAME PERCENT COMMAND…: runs the command with a share of the time; its output is in NAME.log. Interrupted, as by
# Ctrl-C, pytest still says what has failed by then.
step() {
    local name=$1 limit=$(($2 * total / 100)) began status
    shift 2
    [ "$limit" -ge 1 ] || limit=1
    began=$(date +%s.%N)
    timeout --signal=INT --kill-after=5 "$limit" "$@" > "$out/$name.log" 2>&1
    status=$?
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$status" "$began" "$(date +%s.%N)" "$limit" >> "$out/steps.tsv"
    echo "$name: $([ "$status" -eq 0 ] && echo done || echo "failed, $status (124: time is over); see $out/$name.log")"
    return "$status"
}

# bench NAME PERCENT ARGUMENTS…: its JSON is NAME.json. Kernels are fused where a compiler and Python.h are there (compile:
# auto); `kernels` in the JSON says whether they were.
bench() {
    local name=$1 percent=$2
    shift 2
    step "$name" "$percent" "$python" -m scripts.gpu_check bench "$out/$name.json" --device "$device" "$@"
}

echo "wheels of $wheels"
for wheel in "$wheels"/*.whl; do
    [ -e "$wheel" ] || { echo "no wheels in $wheels"; break; }
    # One by one, without what they depend on: a wheel for another Python must not keep the others out.
    if timeout 60 "$python" -m pip install --no-index --no-deps --quiet "$wheel" >> "$out/wheels.log" 2>&1; then
        echo "installed $(basename "$wheel")" >> "$out/wheels.log"
    else
        echo "failed $(basename "$wheel")" | tee -a "$out/wheels.log"
    fi
done

step versions 4 "$python" -m scripts.gpu_check versions "$out/versions.json"
# The tests that compile come last, because they take longest.
step tests 24 "$python" -m pytest tests/gpu/test_[!f]*.py tests/gpu/test_fused.py -q --maxfail=20 -p no:cacheprovider \
    -o addopts=--import-mode=importlib --junitxml "$out/tests.xml"
step attention 8 "$python" -m scripts.gpu_check attention "$out/attention.json" --device "$device"
bench device_quick 12 --context "$quick" --output 64 --repeats 1 --prefill 4096
bench device_full 26 ${full:+--context "$full"} --output 128 --repeats 2
bench device_gqa 10 --geometry llama-3.1-8b --context "$quick" --output 64 --repeats 1 --prefill 4096
step profile 12 "$python" -m scripts.gpu_check profile "$out/profile.json" --device "$device" --context "$quick"
step link 4 "$python" -m scripts.gpu_check link "$out/link.json" --device "$device"

"$python" - "$out" "$wheels" << 'SUMMARY' || exit 1
import json, pathlib, sys
out, wheels = map(pathlib.Path, sys.argv[1:])
steps = []
for line in (out / "steps.tsv").read_text().splitlines():
    name, status, began, ended, limit = line.split("\t")
    log = (out / f"{name}.log").read_text(errors="replace").strip().splitlines()
    steps.append({"step": name, "status": int(status), "limit_s": int(limit), "last_lines": log[-3:],
                  "seconds": round(float(ended) - float(began), 1), "result": (out / f"{name}.json").is_file()})
log = out / "wheels.log"
bad = [line.removeprefix("failed ") for line in log.read_text().splitlines() if line.startswith("failed ")] \
    if log.is_file() else []
(out / "summary.json").write_text(json.dumps({"steps": steps, "bad_wheels": bad}, indent=1) + "\n")
print(f"{out / 'summary.json'}: {sum(step['status'] == 0 for step in steps)} of {len(steps)} steps done")
SUMMARY

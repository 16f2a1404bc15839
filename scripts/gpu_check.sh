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
#         and transformers. Where its transformers is older than pyproject.toml asks, that and tokenizers too.
# OUT     the folder for results: summary.json, a log of each step, JUnit files, JSON of benchmarks. After each step they
#         are packed beside it: OUT.tgz, and OUT.traces.tgz with the profiles' traces. Bring back these two files.
# SECONDS the time of everything together, 540 by default. Each step gets its share of what is left of it, so a step
#         alone gets all.
#
# Variables: STEPS (the steps below that run, in this order; by default those of `usual`), PYTHON (python3),
# QUICK_CONTEXT (16384), FULL_CONTEXT (empty: what fits the device), DEVICE (cuda), PYTEST_OPTIONS ("-n 4" where
# pytest-xdist is installed).
#
# The figures of docs/benchmarks/device.md take three commands of ten minutes, best on one machine that stays warm:
#
#     scripts/gpu_check.sh .whl /tmp/one; cp /tmp/one*.tgz "$OUT"
#     STEPS="device_int4 device_batch plain generate" scripts/gpu_check.sh .whl /tmp/two; cp /tmp/two*.tgz "$OUT"
#     STEPS=device_offload scripts/gpu_check.sh .whl /tmp/three; cp /tmp/three*.tgz "$OUT"
set -u
usual="versions tests fused device_quick device_full attention profile link"
# The shares are relative to each other. Offloaded, a token takes over a second: a command of its own.
declare -A share=([versions]=3 [tests]=12 [fused]=12 [device_quick]=21 [device_full]=33 [attention]=8 [profile]=11 [link]=4
    [device_gqa]=21 [device_int4]=22 [device_fp8]=22 [device_batch]=24 [plain]=18 [generate]=36 [device_offload]=100)
if [ $# -lt 2 ]; then
    echo "usage: scripts/gpu_check.sh WHEELS OUT [SECONDS]" >&2
    exit 2
fi
# Made absolute here, because the next line leaves the folder that they are relative to.
wheels=$(realpath -m -- "$1") out=$(realpath -m -- "$2") total=${3:-540} steps=${STEPS:-$usual}
cd "$(dirname "$0")/.." || exit 2
left=0 # of the shares, those of the steps to come
for name in $steps; do
    [ -n "${share[$name]:-}" ] || { echo "STEPS: no step is called $name, only ${!share[*]}" >&2; exit 2; }
    left=$((left + ${share[$name]}))
done
python=${PYTHON:-python3} device=${DEVICE:-cuda} quick=${QUICK_CONTEXT:-16384} full=${FULL_CONTEXT:-}
mkdir -p "$out" || exit 2
: > "$out/steps.tsv"
# The tests of quantised self-drafters decode with the demo pair, which is not installed there.
export PYTHONPATH="$PWD:$PWD/demo_weights${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false

# step NAME COMMAND…: runs the command with its share of the time that is left; its output is in NAME.log. Interrupted,
# as by Ctrl-C, pytest still says what has failed by then.
step() {
    local name=$1 limit=$(((total - SECONDS) * ${share[$1]} / left)) began status
    shift
    left=$((left - ${share[$name]}))
    [ "$limit" -ge 1 ] || limit=1
    began=$(date +%s.%N)
    timeout --signal=INT --kill-after=5 "$limit" "$@" > "$out/$name.log" 2>&1
    status=$?
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$status" "$began" "$(date +%s.%N)" "$limit" >> "$out/steps.tsv"
    echo "$name: $([ "$status" -eq 0 ] && echo done || echo "failed, $status (124: time is over); see $out/$name.log")"
}

# check NAME STEP ARGUMENTS…: a step of gpu_check.py; its JSON is NAME.json.
check() {
    local name=$1 what=$2
    shift 2
    step "$name" "$python" -m scripts.gpu_check "$what" "$out/$name.json" --device "$device" "$@"
}

# run_tests NAME FILES…: names each test as it ends, and bounds each, so that one that hangs does not hide the others.
run_tests() {
    local name=$1
    shift
    step "$name" "$python" -m pytest "$@" -v -rf --tb=short --timeout 100 --maxfail=20 ${PYTEST_OPTIONS:-} \
        -p no:cacheprovider -o addopts=--import-mode=importlib --junitxml "$out/$name.xml"
}

# Kernels are fused where a compiler and Python.h are there (compile: auto); `kernels` in the JSON says whether they were.
run() {
    case $1 in
        tests) run_tests tests tests/gpu --ignore tests/gpu/test_fused.py ;;
        fused) run_tests fused tests/gpu/test_fused.py ;;
        device_quick) check "$1" bench --context "$quick" --output 64 --repeats 1 --prefill 4096 ;;
        device_full) check "$1" bench ${full:+--context "$full"} --output 128 --repeats 2 ;;
        device_gqa) check "$1" bench --geometry llama-3.1-8b --context "$quick" --output 64 --repeats 1 --prefill 4096 ;;
        device_int4 | device_fp8) check "$1" bench ${full:+--context "$full"} --quantization "${1#device_}" \
            --output 64 --repeats 1 --prefill 4096 ;;
        # A budget of 4096 for each of six would leave no room on 80 GB.
        device_batch) check "$1" bench --requests 6 --context 19456 --budget 768 --output 64 --repeats 1 --prefill 4096 ;;
        device_offload) check "$1" bench --offload host --acceptance .94,.6 --lookaheads 16,3 --temperatures 0 \
            --verified 1,17 --output 32 --repeats 1 --prefill 4096 ${full:+--context "$full"} ;;
        plain | generate) check "$1" "$1" --output 64 ${full:+--context "$full"} ;;
        profile) check profile profile --context "$quick" ;;
        *) check "$1" "$1" ;;
    esac
}

# Says what was done and how each step ended, in summary.json, and packs the results.
report() {
    "$python" - "$out" "$wheels" << 'SUMMARY' || return 1
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
    # Traces apart: they are the one thing that may be too large to come back.
    tar -C "$out" --exclude='./trace_*' -czf "$out.tgz" . || return 1
    if compgen -G "$out/trace_*" > /dev/null; then
        (cd "$out" && tar -czf "$out.traces.tgz" trace_*) || return 1
    fi
}

echo "wheels of $wheels"
for wheel in "$wheels"/*.whl; do
    [ -e "$wheel" ] || { echo "no wheels in $wheels"; break; }
    # One by one, without what they depend on: a wheel for another Python must not keep the others out.
    if timeout 60 "$python" -m pip install --no-index --no-deps --no-compile --quiet "$wheel" >> "$out/wheels.log" 2>&1; then
        echo "installed $(basename "$wheel")" >> "$out/wheels.log"
    else
        echo "failed $(basename "$wheel")" | tee -a "$out/wheels.log"
    fi
done
for name in $steps; do
    run "$name"
    said=$(report) || exit 1
done
echo "$said"

#!/usr/bin/env bash
# All figures of docs/benchmarks/gpu.md from a GPU that is at hand for minutes, in two commands:
#
#     scripts/gpu_check.sh WHEELS OUT 400 --jobs first
#     scripts/gpu_check.sh WHEELS OUT 330 --jobs second
#
# WHEELS  a folder of wheels that this machine's Python lacks and cannot download. Where PyTorch, transformers and Triton
#         are there, these remain: pydantic, pydantic-core, annotated-types, typing-inspection (settings), rich,
#         markdown-it-py, mdurl, pygments, platformdirs, llguidance, and pytest, pytest-timeout, pluggy, iniconfig
#         where they are missing; for `served` those of small_wheels.sh. A
#         kernels.tgz there, from an earlier run, spares the time in which kernels are compiled.
# OUT     the folder for results: a JSON of each job, and logs. After each job they are packed beside it, in OUT.tgz; the
#         compiled kernels in OUT.kernels.tgz. Bring back these two files. Run again, what is done is not repeated.
# 400     the seconds of everything together. What follows is for `python -m scripts.gpu_check`; see its --help.
set -u
if [ $# -lt 3 ]; then
    echo "usage: scripts/gpu_check.sh WHEELS OUT SECONDS [--jobs first|second|'NAME …'] [OPTION …]" >&2
    exit 2
fi
# Made absolute here, because the next line leaves the folder that they are relative to.
wheels=$(realpath -m -- "$1") out=$(realpath -m -- "$2") until=$(($(date +%s) + $3)) python=${PYTHON:-python3}
shift 3
cd "$(dirname "$0")/.." || exit 2
kernels=$out.kernels
mkdir -p "$out" "$kernels" || exit 2
export TORCHINDUCTOR_CACHE_DIR=$kernels/inductor TRITON_CACHE_DIR=$kernels/triton TOKENIZERS_PARALLELISM=false
# Neither this project is installed there, nor the demo pair, with which the tests decode.
export PYTHONPATH="$PWD:$PWD/tools:$PWD/demo_weights${PYTHONPATH:+:$PYTHONPATH}"

[ ! -f "$wheels/kernels.tgz" ] || tar -C "$kernels" -xzf "$wheels/kernels.tgz"
for wheel in "$wheels"/*.whl; do
    [ -e "$wheel" ] || { echo "no wheels in $wheels"; break; }
    # One by one, without what they depend on: a wheel for another Python must not keep the others out.
    timeout 60 "$python" -m pip install --no-index --no-deps --no-compile --quiet "$wheel" >> "$out/wheels.log" 2>&1 ||
        echo "failed: $(basename "$wheel")" | tee -a "$out/wheels.log"
done
# After an error in a job (3) or the death of the process (128 and more) a new process goes on with what is left.
status=3
while { [ "$status" -eq 3 ] || [ "$status" -ge 128 ]; } && [ $((until - $(date +%s))) -gt 5 ]; do
    timeout --kill-after=2 $((until - $(date +%s))) \
        "$python" -m scripts.gpu_check "$out" --until "$until" "$@"
    status=$?
done
# A job that was cut off is among them, too.
tar -C "$out" --exclude './trace_*' -czf "$out.part" . && mv "$out.part" "$out.tgz"
tar -C "$kernels" -czf "$kernels.part" . && mv "$kernels.part" "$kernels.tgz"
exit "$status"

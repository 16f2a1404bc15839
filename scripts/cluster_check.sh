#!/usr/bin/env bash
# Checks the chart in the cluster that kubectl reaches: installs it, asks it, upgrades it under load, kills a worker under
# a stream, scales it, uninstalls it, and looks for what is left. KubeRay's operator must be there, and an image that the
# cluster can pull. Every step has a time limit; the summary at the end says what passed.
#
#     scripts/cluster_check.sh --set image.repository=REGISTRY/triforce-serve
#
# Arguments go to helm after the values of cpu-demo, so other values may be given, except keys, TLS, ports and names:
# --values FILE. While one cluster replaces another there must be room for two heads and three workers. Variables:
# RELEASE and NAMESPACE, where nothing of that name may be yet; LIMIT, the seconds of every step in place of its own;
# KEEP=1 uninstalls nothing after a failure.
# shellcheck disable=SC2317  # steps are called by name
set -uo pipefail

RELEASE=${RELEASE:-triforce-check}
NAMESPACE=${NAMESPACE:-triforce-check}
self=$(realpath "$0")
CHART=$(dirname "$self")/../k8s/triforce
# Old clusters go soon, so that there is room for the next.
DEFAULTS=(--values "$CHART/examples/cpu-demo.yaml" --set settings.server.drain_timeout_s=30)
one_step=
[ "${1:-}" != --step ] || { one_step=$2 && shift 2; } # how this script calls itself
given=("$@")
failed=0
running=
summary=()

interrupted() {
    [ -z "$running" ] || kill "$running"
    echo "interrupted; what is there stays: helm --namespace $NAMESPACE uninstall $RELEASE"
    exit 130
}
trap interrupted INT TERM HUP

k() { kubectl --namespace "$NAMESPACE" "$@"; }
h() { helm --namespace "$NAMESPACE" "$@"; }

# step SECONDS FUNCTION NAME: runs the function, which must end with 0 within the time.
step() {
    local limit=${LIMIT:-$1} began=$SECONDS result=passed
    echo "== $3 (at most $limit s)"
    # In the background, so that Ctrl-C reaches this script, whose trap ends the step.
    timeout --kill-after=10 "$limit" "$self" --step "$2" "${given[@]}" </dev/null &
    running=$!
    wait "$running" || { result=FAILED failed=1; }
    summary+=("$(printf '%-8s %5d s  %s' "$result" $((SECONDS - began)) "$3")")
    [ "$result" = passed ]
}

# Asks every second, until the time of the step is over.
until_true() { until "$@"; do sleep 1; done; }

operator_is_there() { kubectl get customresourcedefinition rayservices.ray.io --output name; }

# The volume with models is kept by design, and not looked for.
what_is_left() {
    local kinds=rayservices,pods,services,deployments,ingresses,networkpolicies,poddisruptionbudgets
    kubectl get namespace "$NAMESPACE" --output name >/dev/null 2>&1 || return 0
    k get "$kinds,serviceaccounts,secrets,configmaps" --selector "app.kubernetes.io/instance=$RELEASE" --output name ||
        return 1
    k get rayclusters,pods,services --selector "ray.io/originated-from-cr-name=$RELEASE" --output name
}

nothing_is_there() {
    local left
    left=$(what_is_left) || return 1
    [ -z "$left" ] || { echo "there is: $left" >&2 && return 1; }
}

install() { h install "$RELEASE" "$CHART" --create-namespace "${DEFAULTS[@]}" "${given[@]}"; }
upgrade() { h upgrade "$RELEASE" "$CHART" "${DEFAULTS[@]}" "${given[@]}" "$@"; }
ready() { k wait "rayservice/$RELEASE" --for=condition=Ready --timeout=-1s; }
helm_test() { h test "$RELEASE"; }
uninstall() {
    k delete pod "$RELEASE-test" --ignore-not-found # which stays if helm's test failed
    h uninstall "$RELEASE" --wait
}
gone() { until_true nothing_is_there; }

# The Ray cluster that serves, and one of its running pods: head or worker.
cluster() { k get rayservice "$RELEASE" --output 'jsonpath={.status.activeServiceStatus.rayClusterName}'; }
pod() {
    k get pods --selector "ray.io/cluster=$(cluster),ray.io/node-type=$1" --field-selector status.phase=Running \
        --output 'jsonpath={.items[0].metadata.name}'
}

# ask TOKENS RETRIES: streams a completion through the Service by the SDK, from the head: a line for each piece of text.
ask() {
    k exec "$(pod head)" --container ray-head -- python -c "
from json import dumps
from triforce_core.client import TriForceClient
with TriForceClient('$RELEASE-serve-svc:9000', timeout_s=600, retries=$2) as client:
    for chunk in client.stream('def fibonacci(n):', max_tokens=$1, temperature=0, ignore_eos=True):
        print(dumps(chunk.text), flush=True)"
}
text_of() { sed 's/^"//; s/"$//' "$1" | tr --delete '\n'; }

answers() { ask 16 0; }

# A change of all pods: another cluster takes over, and no request fails meanwhile.
upgrade_under_load() {
    local before now asked=0
    before=$(cluster) && [ -n "$before" ] || return 1
    upgrade --set-string head.annotations.checked=yes || return 1
    until now=$(cluster) && [ -n "$now" ] && [ "$now" != "$before" ]; do
        ask 4 0 >/dev/null || { echo "a request failed after $asked" >&2 && return 1; }
        asked=$((asked + 1))
    done
    echo "$asked requests, none failed; $now in place of $before"
    answers
}

kill_under_stream() {
    local worker stream
    folder=$(mktemp -d)
    trap 'rm -r "$folder"' EXIT
    ask 2000 0 >"$folder/whole" || return 1
    worker=$(pod worker) && [ -n "$worker" ] || return 1
    ask 2000 1000 >"$folder/cut" &
    stream=$!
    until [ -s "$folder/cut" ]; do
        kill -0 "$stream" || { echo "the stream did not begin" >&2 && return 1; }
    done
    # Kubernetes may let a pod that is deleted by force take its time, so its processes are killed first.
    k exec "$worker" --container ray-worker -- bash -c 'kill -KILL -1'
    kill -0 "$stream" || { echo "the stream had ended before the worker did" >&2 && return 1; }
    k delete pod "$worker" --grace-period=0 --force || return 1
    wait "$stream" || { echo "the stream was lost" >&2 && return 1; }
    [ "$(text_of "$folder/cut")" = "$(text_of "$folder/whole")" ] || { echo "its text is another" >&2 && return 1; }
    until_true answers
}

two_workers() {
    local found
    found=$(k get pods --selector "ray.io/cluster=$(cluster),ray.io/node-type=worker" --output \
        'jsonpath={range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}')
    [ "$(grep -c True <<<"$found")" -ge 2 ]
}

one_cluster() {
    local found
    found=$(k get rayclusters --selector "ray.io/originated-from-cr-name=$RELEASE" --output name)
    [ "$(grep -c . <<<"$found")" = 1 ]
}

scale() {
    until_true one_cluster
    upgrade --set settings.server.replicas.min=2 --set settings.server.replicas.max=2 || return 1
    until_true two_workers
    answers
}

diagnose() {
    k get rayservices,rayclusters,pods --output wide
    k get events --sort-by .lastTimestamp | tail -n 20
    for kind in head worker; do
        k logs --selector "ray.io/node-type=$kind" --container "ray-$kind" --prefix --tail 40
    done
}

check() {
    step 30 operator_is_there "KubeRay's operator is there" || return
    step 30 nothing_is_there "nothing of this name is there" || return
    step 180 install "install" || return
    step 1800 ready "ready" || return
    step 300 helm_test "helm test" || return
    step 120 answers "a completion through the Service" || return
    step 1800 upgrade_under_load "an upgrade under load"
    step 900 kill_under_stream "a worker killed under a stream"
    step 1800 scale "two replicas"
}

if [ -n "$one_step" ]; then
    "$one_step"
    exit
fi
check
if [ "$failed" = 1 ]; then
    timeout 60 "$self" --step diagnose "${given[@]}" </dev/null 2>&1 &
    running=$!
    wait "$running"
fi
if [[ " ${summary[*]} " == *" install"* ]] && { [ "$failed" = 0 ] || [ "${KEEP:-0}" != 1 ]; }; then
    step 300 uninstall "uninstall"
    step 600 gone "nothing is left"
fi
printf '%s\n' "" "${summary[@]}"
exit "$failed"

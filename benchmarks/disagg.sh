#!/usr/bin/env bash
# The five disaggregation workloads on this machine's two GPUs: 1 prefill + 1 decode node, then 2 mixed replicas.
#   benchmarks/disagg.sh DATA [SETTING...]     DATA: where the traces are; SETTING: 1P1D, 2M,
#   TP2 (default: the first two)
# A setting takes about four minutes. Each workload's line is written when it is over. Settings, by environment:
#   PD_CLUSTER="pd-cluster"    the command (from a source tree: "python3 -m pd_cluster.launch.cli")   PYTHON=python3
#   SHAPE=8b  WORKLOADS="..."  what to serve, which workloads (default: all five)
#   SLO=200/10[/30]            targets of TTFT, TPOT (and ITL) in ms, of every node: sizes steps instead of a fixed limit
#   NODE_FLAGS=""              of every node      BENCH_FLAGS="...", HANDOVER_FLAGS="..."   of the benchmarks `disagg`, `handover`
#   PORT=8000                  of the router
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root:$root/router:$root/connectors:$root/kernels${PYTHONPATH:+:$PYTHONPATH}
data=$1
shift
pd_cluster=${PD_CLUSTER:-pd-cluster}
node_flags=${NODE_FLAGS:-}
if [ -n "${SLO:-}" ]; then
    IFS=/ read -r ttft tpot itl <<<"$SLO"
    node_flags="$node_flags --slo-ttft-ms $ttft --slo-tpot-ms $tpot${itl:+ --slo-itl-ms $itl}"
fi
benchmark="${PYTHON:-python3} -m benchmarks"
url=http://127.0.0.1:${PORT:-8000}
work=$(mktemp -d)
cluster=
stop() {
    if [ -n "$cluster" ]; then kill "$cluster" 2>/dev/null || true; wait "$cluster" || true; fi
    cluster=
}
trap 'stop; rm -rf "$work"' EXIT

$benchmark model --shape "${SHAPE:-8b}" "$work/model"
status=0
for setting in "${@:-1P1D 2M}"; do
    for one in $setting; do
        case $one in
            1P1D) nodes="--prefill 1 --decode 1" ;;
            2M) nodes="--prefill 0 --decode 0 --mixed 2" ;;
            TP2) nodes="--prefill 0 --decode 0 --mixed 1 --tp 2" ;;
            *) echo "setting $one is none of 1P1D, 2M, TP2" >&2; exit 2 ;;
        esac
        $pd_cluster up --port "${PORT:-8000}" --model "$work/model" --load-format dummy --no-prefix-caching \
            $nodes $node_flags >"$work/$one.log" 2>&1 &
        cluster=$!
        until grep -q "^ready: " "$work/$one.log"; do
            kill -0 "$cluster" 2>/dev/null || { cat "$work/$one.log" >&2; exit 1; }
            sleep 1
        done
        $benchmark disagg --url "$url" --data "$data" --note "$nodes $node_flags" \
            ${WORKLOADS:+--workloads $WORKLOADS} ${BENCH_FLAGS:-} || status=1
        if [ "$one" = 1P1D ]; then
            $benchmark handover --url "$url" --note "$nodes $node_flags" ${HANDOVER_FLAGS:-} || status=1
        fi
        stop
        grep -E "WARNING|ERROR" "$work/$one.log" | tail -20 >&2 || true
    done
done
exit $status

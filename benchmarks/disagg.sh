#!/usr/bin/env bash
# The five disaggregation workloads on this machine's GPUs: by default 1 prefill + 1 decode node, then 2 mixed replicas.
#   benchmarks/disagg.sh DATA [SETTING...]     DATA: where the traces are; SETTING: as in 1P1D, 3P1D, 2M, 1P1D-TP2
#   (nodes of two ranks), 1P1D-TP1:2 (a prefill node of one rank, a decode node of two)
# A setting takes about four minutes. Each workload's line is written when it is over. Settings, by environment:
#   PD_CLUSTER="pd-cluster"    the command (from a source tree: "python3 -m pd_cluster.launch.cli")   PYTHON=python3
#   SHAPE=8b  WORKLOADS="..."  what to serve, which workloads (default: all five; none: handovers only)
#   SLO=200/10[/30]            targets of TTFT, TPOT (and ITL) in ms, of every node: sizes steps instead of a fixed limit
#   NODE_FLAGS=""              of every node      BENCH_FLAGS="...", HANDOVER_FLAGS="..."   of the benchmarks `disagg`, `handover`
#   HANDOVERS="1000"           tokens of the prompts that settings of 1P1D hand over   PORT=8000   of the router
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
caching=--no-prefix-caching
if [[ " ${WORKLOADS:-}" = *" turns"* ]]; then # conversations are about what is cached
    caching=
    for one in $WORKLOADS; do
        [[ $one = turns* ]] || { echo "WORKLOADS mixes turns and $one, which is without caches" >&2; exit 2; }
    done
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
        if [[ $one =~ ^([0-9]+)P([0-9]+)D(-TP([0-9]+)(:([0-9]+))?)?$ ]]; then
            tp=${BASH_REMATCH[4]:-1}
            nodes="--prefill ${BASH_REMATCH[1]} --decode ${BASH_REMATCH[2]}"
            if [ -n "${BASH_REMATCH[3]}" ]; then nodes+=" --prefill-tp $tp --decode-tp ${BASH_REMATCH[6]:-$tp}"; fi
        elif [[ $one =~ ^([0-9]+)M(-TP([0-9]+))?$ ]]; then
            nodes="--prefill 0 --decode 0 --mixed ${BASH_REMATCH[1]}${BASH_REMATCH[3]:+ --tp ${BASH_REMATCH[3]}}"
        else
            echo "setting $one is not like 1P1D, 2M or 1P1D-TP2" >&2 && exit 2
        fi
        $pd_cluster up --port "${PORT:-8000}" --model "$work/model" --load-format dummy $caching \
            $nodes $node_flags >"$work/$one.log" 2>&1 &
        cluster=$!
        until grep -q "^ready: " "$work/$one.log"; do
            kill -0 "$cluster" 2>/dev/null || { cat "$work/$one.log" >&2; exit 1; }
            sleep 1
        done
        if [ "${WORKLOADS:-}" != none ]; then
            $benchmark disagg --url "$url" --data "$data" --setting "$one" --note "$nodes $node_flags" \
                ${WORKLOADS:+--workloads $WORKLOADS} ${BENCH_FLAGS:-} || status=1
        fi
        if [[ $one = 1P1D* ]]; then
            for tokens in ${HANDOVERS-1000}; do
                $benchmark handover --url "$url" --tokens "$tokens" --note "$nodes $node_flags" \
                    ${HANDOVER_FLAGS:-} || status=1
            done
        fi
        stop
        grep -E "WARNING|ERROR" "$work/$one.log" | tail -20 >&2 || true
    done
done
exit $status

#!/usr/bin/env bash
# What needs four GPUs, part by part, each with a time limit. Records are written as it goes; a part that the machine
# cannot run is left out with a line that says why. Exit status 1 when a part fails.
#   benchmarks/four_gpus.sh DATA [PART...]     DATA: where the traces are; default: all parts, in this order
#     kills       a rank of a decode node, then of a prefill node is killed under load; 4 nodes of 2 ranks   10 min
#     handovers   of 1,000 and 8,000 tokens, from 1 or 2 ranks to 1 or 2                                     15 min
#     sums        sums over 4 GPUs, of 4,096 and 8,192 columns                                                5 min
#     engines     decode and prefill of the 8B and 70B shapes on 4 ranks                                     20 min
#     clusters    2P2D, 1P3D, 3P1D, 4M and 1P1D-TP2 under the five workloads at twice the rates of two GPUs  45 min
# Settings, by environment: those of disagg.sh and
#   OUT=... (a new folder)     a log of each part   RECORDS=benchmarks/results   where records are appended
#   SETTINGS="2P2D ..."        of `clusters`        PAIRS="1 1:2 2:1 2"          ranks of P and D, of `handovers`
#   REHEARSE=1                 a machine without GPUs: the tiny shape, few and short requests, no measurement
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 2
export PYTHONPATH=$root:$root/router:$root/connectors:$root/kernels${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
export PYTHON=$python PD_CLUSTER=${PD_CLUSTER:-$python -m pd_cluster.launch.cli}
benchmark="$python -m benchmarks"
records=${RECORDS:-benchmarks/results}
rehearse=${REHEARSE:-}

run() { # PART DATA
    case $1 in
        kills) PD_TEST_DEVICE=$([ "$rehearse" ] && echo cpu || echo cuda) $python -m pytest -q -p no:cacheprovider -W default \
            -m slow tests/integration/test_ranks_under_load.py -o log_cli=true --log-cli-level=INFO ;;
        handovers)
            local pair settings=()
            for pair in ${PAIRS:-1 1:2 2:1 2}; do settings+=("1P1D-TP$pair"); done
            WORKLOADS=none HANDOVERS=${HANDOVERS:-1000 8000} HANDOVER_FLAGS="--json $records/handover_ranks_gpu.jsonl ${HANDOVER_FLAGS:-}" \
                benchmarks/disagg.sh "$2" "${settings[@]}" ;;
        sums)
            $benchmark reduce --ranks 4 --json "$records/reduce_gpu.jsonl" &&
                $benchmark reduce --ranks 4 --hidden 8192 --json "$records/reduce_gpu.jsonl" ;;
        engines) $benchmark gpu --tp 4 --shapes ${SHAPES:-8b 70b} --rows decode prefill prompt --repeats 2 --json "$records/engine_gpu.jsonl" ;;
        clusters) # a setting that fails does not keep the others from running
            local one status=0
            for one in ${SETTINGS:-2P2D 1P3D 3P1D 4M 1P1D-TP2}; do
                HANDOVERS="" SLO=${SLO:-200/10} NODE_FLAGS="--max-num-seqs 256 ${NODE_FLAGS:-}" \
                    BENCH_FLAGS="--rate-scale 2 --json $records/disagg_gpu_slo.jsonl ${BENCH_FLAGS:-}" \
                    timeout -k 30 "${SETTING_S:-540}" benchmarks/disagg.sh "$2" "$one" ||
                    { echo "setting $one failed ($?), after ${SETTING_S:-540} s if 124" >&2 && status=1; }
            done
            return $status ;;
    esac
}

limit() { # seconds
    case $1 in
        kills) echo 600 ;;
        handovers) echo 900 ;;
        sums) echo 300 ;;
        engines) echo 1200 ;;
        clusters) echo 2700 ;;
    esac
}

lacking() { # PART -> what the machine lacks for it; "" if nothing
    if [ "$1" = clusters ] && [ ! -r "$data/dev_mooncake_conv_0-15min.jsonl" ]; then echo "the traces are not in $data"; fi
    case $1 in kills | handovers | clusters) [ "$rehearse" ] && return ;; esac
    if ((num_gpus < 4)); then echo "torch finds $num_gpus of 4 GPUs"; fi
}

if [ "${1:-}" = --run ]; then
    run "$2" "$3"
    exit
fi
data=${1:?the folder of the traces}
shift
parts=("$@")
if ((!${#parts[@]})); then parts=(kills handovers sums engines clusters); fi
for part in "${parts[@]}"; do
    if [ -z "$(limit "$part")" ]; then echo "there is no part $part" >&2 && exit 2; fi
done
num_gpus=$($python -c 'import torch; print(torch.cuda.device_count())') || exit 2
if [ "$rehearse" ]; then
    records=$(mktemp -d)
    export SHAPE=tiny SETTING_S=${SETTING_S:-300} WORKLOADS=${WORKLOADS:-1024x256} HANDOVERS=${HANDOVERS:-50}
    export NODE_FLAGS="--device cpu --num-threads 1 --kv-cache-gb 0.02 --max-num-batched-tokens 512 --max-model-len 2048 ${NODE_FLAGS:-}"
    export BENCH_FLAGS="--scale 0.05 --num-requests 8 --vocab-size 2048" HANDOVER_FLAGS="--samples 5 --batches 0 --vocab-size 2048"
fi
export RECORDS=$records
out=${OUT:-$(mktemp -d)}
mkdir -p "$out" "$records"
failed=0
for part in "${parts[@]}"; do
    missing=$(lacking "$part")
    if [ "$missing" ]; then
        echo "== $part: left out, $missing"
        continue
    fi
    start=$SECONDS status=0
    timeout -k 30 "$(limit "$part")" "$root/benchmarks/${0##*/}" --run "$part" "$data" >"$out/$part.log" 2>&1 || status=$?
    case $status in
        0) word=held ;;
        124 | 137) word="ran out of time" ;;
        *) word="failed ($status)" ;;
    esac
    ((status)) && failed=1
    echo "== $part: $word, $((SECONDS - start)) s ($out/$part.log)"
    tail -n 14 "$out/$part.log" | cut -c 1-200
done
exit $failed

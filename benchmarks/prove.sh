#!/usr/bin/env bash
# What only a GPU can prove, all parts at once, each with a time limit. Exit status 1 when one of them fails.
#   benchmarks/prove.sh [PART...]        default: all of them
#     tokens     the demo model in fp32 beside transformers', token for token; the GPU worker beside the CPU's
#     logits     an 8B shape in bf16 within twice transformers' own distance from fp32 (needs 120 GB of GPU memory)
#     soak       SOAK_S seconds of the engine with aborts, forks and preemption
#     memcheck, racecheck      compute-sanitizer over each kernel family's smallest shapes
#     mixtures, mixturesrace   the same over the kernels of experts and of float8
#     engine     compute-sanitizer's memcheck over a worker with captured graphs
# Settings, by environment:
#   PYTHON=python3   SOAK_S=600   SOAK_FLAGS="--shape 0.6b"   OUT=... (a new folder): a log of each part goes there
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 2
export PYTHONPATH=$root:$root/router:$root/connectors:$root/kernels${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
soak_s=${SOAK_S:-600}
warm_processes=6

# Without a device the kernels' tests would pass in Triton's interpreter
on_gpu=("${PYTHON:-python3}" -c 'import sys, pytest, torch
sys.exit(pytest.main(sys.argv[1:]) if torch.cuda.is_available() else "no CUDA device here")'
    -q -p no:cacheprovider --timeout=400 -W default) # a library's new warning is no disproof
kernels=(tests/kernels/test_triton_attention.py tests/kernels/test_triton_elementwise.py
    tests/kernels/test_triton_sampling.py tests/kernels/test_triton_matmul.py tests/kernels/test_triton_replayable.py
    tests/kernels/test_triton_new_token.py)
gluon=(tests/kernels/test_gluon_gated.py tests/kernels/test_hopper_prefill.py)
checked=("${kernels[@]}" "${gluon[@]}" -k "not compile and not replays and not 0.125 and not 0.3 and not refuse and not 4096x4096 and not 128256 and not real_s and not captured \
    and not only-decodes and not mha-64 and not gqa-256 and not gqa-80-torch.float16 and not 1-7 and not 5-80 \
    and not 3-256 and not 20-4-80 and not 3-3-96 and (not triton_matmul or bfloat16 and split and (3-104 or 33-96))")
# Not Gluon's: it says that the byte by which Triton tells idle warps what to run is raced for, between two barriers
raced=("${kernels[@]}" -k "small_tiles and gqa-80-20 or padded_steps and gqa-80-20 or programs_share_equal and gqa-80 or short_dtypes and gqa-128 or tiles_by and 30-True \
    or one_launch and gqa-128 or rms_norm_and and 33-96-torch.f or norm_rope and 6-1-128 and True or silu and 1100-torch.f \
    or argmax_takes and 3-5000 or the_draw and 3-5000 or triton_matmul and bfloat16 and split and 3-104")
mixtures=(tests/kernels/test_triton_experts.py tests/kernels/test_triton_quantize.py
    tests/kernels/test_triton_quantized_product.py tests/kernels/test_triton_attention.py
    tests/kernels/test_triton_new_token.py tests/kernels/test_packed_experts.py
    tests/kernels/test_triton_draft_attention.py tests/kernels/test_triton_state.py
    tests/kernels/test_triton_latent.py)
mixtures_checked=("${mixtures[@]}" -k "not real and not captured and not tiling and not refused and not without_float8 and not same_tiles \
    and not 33-1152-4096 and not 64-96-2048 and not compile and not 120b and not pair_fills \
    and (not (triton_attention or triton_new_token) or an_fp8_cache or sinks)")
mixtures_raced=("${mixtures[@]}" -k "test_route and 20-96-3 or sorted and 50-3 or test_experts and 20-5 or in_float8 and 20-256 or order_of_the_others and 20 \
    or prompts_beside and float16 or decodes_with and float16 or test_rows and 4-1280 or rows_of_small and 10-chunks4 or chunks_attend and absorbed \
    or test_norms and 4-1280 or test_activations and 4-1280") # nor here Gluon's ring: see above
worked=(tests/worker/test_worker_cuda.py tests/worker/test_few_rows.py
    -k "greedy and qwen3 and not windows or ahead or few_rows and on_a_gpu and (1-64 or 20-64)")

warm() { # compile the kernels of these tests, in several processes, before the sanitizer slows everything down
    local share ids
    mapfile -t ids < <("${on_gpu[@]}" --collect-only "$@" | grep "::" | tr -d '\r')
    for ((share = 0; share < warm_processes; share++)); do
        local some=()
        for ((i = share; i < ${#ids[@]}; i += warm_processes)); do some+=("${ids[i]}"); done
        if ((${#some[@]})); then "${on_gpu[@]}" "${some[@]}" >/dev/null & fi
    done
    wait
}

sanitize() { # TOOL TEST...
    local tool=$1
    shift
    warm "$@"
    compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 --print-limit 20 "${on_gpu[@]}" "$@"
}

run() {
    case $1 in
        # Not the test of memory shares, which the other parts' memory would fail
        tokens) "${on_gpu[@]}" tests/worker/test_demo_parity_cuda.py tests/worker/test_worker_cuda.py tests/worker/test_few_rows.py tests/worker/test_step*.py -m gpu -k "not share" ;;
        logits) "${on_gpu[@]}" tests/worker/test_logits_cuda.py -k 8b -o log_cli=true --log-cli-level=INFO --log-cli-format="%(message)s" ;;
        soak) "${PYTHON:-python3}" -m benchmarks soak --seconds "$soak_s" --device cuda ${SOAK_FLAGS:---shape 0.6b} ;;
        # The allocator's cache would hide what lies past the end of a tensor
        memcheck) PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize memcheck "${checked[@]}" ;;
        racecheck) sanitize racecheck "${raced[@]}" ;;
        mixtures) PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize memcheck "${mixtures_checked[@]}" ;;
        mixturesrace) sanitize racecheck "${mixtures_raced[@]}" ;;
        engine) sanitize memcheck "${worked[@]}" ;;
    esac
}

limit() {
    case $1 in
        soak) echo $((soak_s + 180)) ;;
        *) echo 400 ;;
    esac
}

one() { # PART -> its log, and `PART.status`: exit status and seconds
    local start=$SECONDS status=0
    timeout -k 10 "$(limit "$1")" "$root/benchmarks/${0##*/}" --run "$1" >"$out/$1.log" 2>&1 || status=$?
    if ((status == 0)) && grep -qE "[0-9]+ skipped" "$out/$1.log"; then status=3; fi # which proves nothing
    echo "$status $((SECONDS - start))" >"$work/$1"
}

if [ "${1:-}" = --run ]; then
    run "$2"
    exit
fi
parts=("$@")
if ((!${#parts[@]})); then parts=(tokens logits soak memcheck racecheck mixtures mixturesrace engine); fi
for part in "${parts[@]}"; do
    case $part in
        tokens | logits | soak | memcheck | racecheck | mixtures | mixturesrace | engine) ;;
        *) echo "there is no part $part" >&2 && exit 2 ;;
    esac
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for part in "${parts[@]}"; do one "$part" & done
wait
failed=0
for part in "${parts[@]}"; do
    read -r status seconds <"$work/$part"
    case $status in
        0) word=held ;;
        3) word="left tests out" ;;
        9) word="the sanitizer found errors" ;;
        124 | 137) word="ran out of time" ;;
        *) word="failed ($status)" ;;
    esac
    ((status)) && failed=1
    echo "== $part: $word, $seconds s ($out/$part.log)"
    lines=14
    if [ "$part" = logits ]; then lines=36; fi # a figure for each prompt
    tail -n $lines "$out/$part.log" | cut -c 1-200
done
exit $failed

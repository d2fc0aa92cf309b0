#!/usr/bin/env bash
# An open-loop load test with its record and its plot. Usage: load_test.sh [URL [FOLDER]]; it writes FOLDER/load.json and
# FOLDER/load.png. For a model and machine of yours, raise the lengths and look for the rate at which goodput falls.
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
folder=${2:-.}

pd-cluster bench serve --url "$url" \
    --rate "${RATE:-8}" --num-requests "${NUM_REQUESTS:-80}" --input-len 64:256 --output-len 16:32 --seed 1 \
    --goodput ttft:500 tpot:50 --json "$folder/load.json" --plot "$folder/load.png"

#!/bin/bash
# Stands in for the image's trainer: keeps what it was started with, and prints MLPerf's lines.
set -eu
source ./mllog.sh
{
    env
    echo "cwd=$PWD"
    echo "root=$(echo /*)"
    echo "data=$(cat /data/c4.txt)"
    echo "common=$(cat /workspace/common.sh)"
    echo "same_path=$(echo "$LOGDIR"/*.hosts)"
} >"/results/seen-$RANK.txt"
touch /data/mine 2>/dev/null && echo "data_is_writable=1" >>"/results/seen-$RANK.txt"
echo "scratch" >"/workspace/llm/scratch-$RANK"
[ "$RANK" = 0 ] || { [ -z "${HANGS:-}" ] || sleep 600; exit 0; }

batch=$((MINIBS * WORLD_SIZE))
mllog init_start null
mllog submission_benchmark '"llama31_8b"' 60000
mllog submission_org '"Example"' 60000
mllog submission_platform '"2xBed"' 60000
mllog submission_division '"closed"' 60000
mllog seed "$SEED" 60000
mllog global_batch_size "$batch" 60000
mllog gradient_accumulation_steps 8 60000
mllog max_sequence_length 8192 60000
mllog init_stop null 119000
mllog run_start null 120000
for step in $(seq 40); do
    seconds=0.50$((step * 7 % 5))
    mllog tracked_stats "{\"train_step_time\": $seconds, \"train_loss\": $((12 - step / 8)).5}" \
        $((120000 + 500 * step)) "\"step\": $step, \"samples_count\": $((step * batch))"
    [ -z "${HANGS:-}" ] || [ "$step" -lt 20 ] || sleep 600
done
mllog eval_accuracy 3.29 960000 '"samples_count": 190464'
mllog run_stop null 960000 '"status": "success", "samples_count": 190464'

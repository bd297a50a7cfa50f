#!/bin/bash
#SBATCH --job-name=stand-in
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --ntasks-per-node=2
#SBATCH --time=0:10:00

# Stands in for the recipe's launch.sh: the same variables and the same names of folders and logs.
set -eu -o pipefail
: "${DTYPE:?}" "${MODEL_SIZE:?}" "${STAGE_PATH:?}"
export SLURM_MPI_TYPE=${SLURM_MPI_TYPE:-pmix}
export JOB_TOTAL_GPUS=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
export RESULT_DIR=${RUN_CONF_RESULT_DIR:-$STAGE_PATH/results/25.01/$DTYPE/$MODEL_SIZE/$JOB_TOTAL_GPUS}
mkdir -p "$RESULT_DIR"
export SRUN_OUTPUT=$RESULT_DIR/log-nemo_llama3.1_${MODEL_SIZE}_${JOB_TOTAL_GPUS}_%j.out
srun --container-image="$RUN_CONF_IMAGE" --container-mounts="$RESULT_DIR,$STAGE_PATH/cfg:/cfg" \
  --container-writable --no-container-mount-home \
  python3 -u train.py "model.global_batch_size=$GBS" "trainer.max_steps=$MAX_STEPS"

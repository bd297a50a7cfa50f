source $(dirname ${BASH_SOURCE[0]})/config_common.sh

export MINIBS=8
export TENSOR_MODEL_PARALLEL=1
export PIPELINE_MODEL_PARALLEL=1
export CONTEXT_PARALLEL=1
export DGXNNODES=2
export DGXNGPU=2
export DGXSYSTEM=$(basename $(readlink -f ${BASH_SOURCE[0]}) | sed 's/^config_//' | sed 's/\.sh$//')
export WALLTIME_RUNANDTIME=5
export WALLTIME=$((5 + ${NEXP:-1} * ($WALLTIME_RUNANDTIME + 5)))

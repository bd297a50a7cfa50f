# What all systems share.
export MODEL_SIZE="8b"
export MICRO_BATCH_SIZE=1
export SEQ_PARALLEL=False
export INTERLEAVED_PIPELINE=null
export OVERWRITTEN_NUM_LAYERS=32

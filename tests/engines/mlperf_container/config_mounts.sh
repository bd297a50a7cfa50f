# Which folders the container sees.
: "${DATADIR:?DATADIR not set}" "${LOGDIR:?LOGDIR not set}"
_cont_mounts="${DATADIR}:/data:ro,${LOGDIR}:/results:rw,${PWD}/config_common.sh:/workspace/common.sh:ro,${LOGDIR}"

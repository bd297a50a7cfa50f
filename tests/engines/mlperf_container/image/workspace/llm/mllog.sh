begun_ms=$(date +%s%3N)

# mllog KEY VALUE [MS AFTER THE BEGINNING] [METADATA]
mllog() {
    printf ':::MLLOG {"namespace": "", "time_ms": %d, "event_type": "POINT_IN_TIME", "key": "%s", "value": %s, "metadata": {"file": "train.py", "lineno": 1%s}}\n' \
        $((begun_ms + ${3:-0})) "$1" "$2" "${4:+, $4}"
}

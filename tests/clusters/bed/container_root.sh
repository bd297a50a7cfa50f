# Lays the root of a container in the mount namespace of its caller:
#     container_root.sh IMAGE FROM:TO[:ro],... ROOT FOLDER
# The image stays as it is: what is written goes into memory and is gone with the task.
set -eu
image=$1 mounts=$2 root=$3 folder=$4
layers=$root.layers
mkdir -p "$layers"
mount -t tmpfs tmpfs "$layers"
mkdir "$layers/upper" "$layers/work"
mount -t overlay overlay -o "lowerdir=$image,upperdir=$layers/upper,workdir=$layers/work" "$root"
for place in proc sys dev; do
    mkdir -p "$root/$place"
    mount --rbind "/$place" "$root/$place"
done
IFS=,
for entry in $mounts; do
    from=${entry%%:*} rest=${entry#*:}
    to=${rest%%:*}
    [ -e "$from" ] || { echo "container: nothing to mount at $from" >&2; exit 1; }
    mkdir -p "$root$to"
    mount --rbind "$from" "$root$to"
    [ "$rest" = "$to:ro" ] && mount -o remount,bind,ro "$root$to"
done
mkdir -p "$root$folder"

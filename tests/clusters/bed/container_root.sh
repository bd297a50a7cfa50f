# Lays the root of a container in the mount namespace of its caller:
#     container_root.sh IMAGE FROM[:TO[:FLAGS]],... ROOT FOLDER
# FROM is a folder or a file; TO is FROM if it is left out. Of the flags, ro counts.
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
    from=${entry%%:*} rest=${entry#"${entry%%:*}"}
    rest=${rest#:}
    to=${rest%%:*} flags=${rest#"${rest%%:*}"}
    [ -n "$to" ] || to=$from
    case $to in /*) ;; *) echo "container: $to is no absolute path" >&2; exit 1 ;; esac
    [ -e "$from" ] || { echo "container: nothing to mount at $from" >&2; exit 1; }
    if [ -d "$from" ]; then
        mkdir -p "$root$to"
    else
        mkdir -p "$root${to%/*}"
        [ -e "$root$to" ] || : >"$root$to"
    fi
    mount --rbind "$from" "$root$to"
    case ${flags#:} in ro | ro+* | *+ro) mount -o remount,bind,ro "$root$to" ;; esac
done
mkdir -p "$root$folder"

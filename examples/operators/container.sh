#!/bin/sh
# Runs a training script in a container that has no right to set clocks: the daemon on the host does
# so, and puts everything back when the container dies. The directory is mounted, not the socket:
# after a restart of the daemon the socket is another file.
#
#   container.sh IMAGE train.py --epochs 3
set -eu
runtime=${RUNTIME:-docker}
image=$1
shift
exec "$runtime" run --rm --gpus all \
    --user "$(id -u):$(id -g)" \
    --volume /run/kilterd:/run/kilterd:ro \
    --volume "$PWD:$PWD" --workdir "$PWD" \
    "$image" kilter run "$@"

#!/bin/sh
# Slurm Prolog (runs as root before a job): the job's GPUs begin at the operator's baseline.
# Never fails the job: a prolog that fails drains the node. What was done is in the system log.
kilter=${KILTER:-kilter}
[ -n "${SLURM_JOB_GPUS:-}" ] || exit 0
set --
for gpu in $(printf '%s' "$SLURM_JOB_GPUS" | tr ',' ' '); do
    set -- "$@" --gpu "$gpu"
done
told=$(timeout 60 "$kilter" baseline restore "$@" 2>&1) ||
    logger -t kilter "prolog of job ${SLURM_JOB_ID:-?}: $told"
exit 0

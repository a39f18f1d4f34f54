#!/bin/sh
# Slurm Epilog (runs as root after a job): nothing of the job is left on its GPUs.
# First what dead runs have written down, then the baseline. GPUs under a live lease are left alone.
kilter=${KILTER:-kilter}
[ -n "${SLURM_JOB_GPUS:-}" ] || exit 0
told=$(timeout 60 "$kilter" restore --all 2>&1) ||
    logger -t kilter "epilog of job ${SLURM_JOB_ID:-?}: $told"
set --
for gpu in $(printf '%s' "$SLURM_JOB_GPUS" | tr ',' ' '); do
    set -- "$@" --gpu "$gpu"
done
told=$(timeout 60 "$kilter" baseline restore "$@" 2>&1) ||
    logger -t kilter "epilog of job ${SLURM_JOB_ID:-?}: $told"
exit 0

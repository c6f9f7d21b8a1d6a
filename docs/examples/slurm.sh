#!/bin/bash
#SBATCH --job-name=lmsys
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00

# One launcher on each node: torchrun starts the ranks of its node, one for each GPU. From the folder of a clone:
#   sbatch docs/examples/slurm.sh -m pytest benchmarks/bench_data_parallel.py --benchmark-only --benchmark-json nodes.json
set -euo pipefail

# --ntasks-per-node=8, or --ntasks=2 without "per node", gives a host several launchers, whose ranks take the same GPUs.
doubled=$(srun hostname | sort | uniq -d)
if [ -n "$doubled" ]; then
    echo "more than one launcher on $doubled: ask for --ntasks-per-node=1" >&2
    exit 2
fi

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # another for each job, as two jobs may share a host
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # for --max-restarts of trainings: docs/nodes.md
export OMP_NUM_THREADS=1
exec srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$host:$port" "$@"

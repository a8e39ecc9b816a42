#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A worker with four GPUs on each of two nodes, the trainer beside the first: sbatch docs/examples/slurm.sh
# Every user of the cluster who reaches the nodes' ports has the rights of this job: see docs/network.md.
#SBATCH --job-name=lingvo_gpipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

logdir=runs/one_billion_wds
port=$((20000 + SLURM_JOB_ID % 10000))
hosts=$PWD/hosts-$SLURM_JOB_ID.json

# {"worker": ["node1:20017", "node2:20017"]}
scontrol show hostnames "$SLURM_JOB_NODELIST" |
  sed "s/.*/\"&:$port\"/" | paste -sd, | sed 's/.*/{"worker": [&]}/' > "$hosts"

srun --overlap bash -c "worker --cluster='$hosts' --task_index=\$SLURM_NODEID --trusted_network" &
workers=$!

# Five minutes before the time is up, the trainer finishes its step, saves and leaves, and the job is queued again.
# After `scancel --batch --signal=TERM JOB` it saves and leaves, too. Plain `scancel` ends all processes at once.
is_time_up=
trap 'is_time_up=1; kill -TERM $! || true' USR1  # $! is the trainer, the last program in the background.
trap 'kill -TERM $! || true' TERM
trap 'kill $workers 2> /dev/null || true; rm -f "$hosts"' EXIT
trainer --cluster="$hosts" --model=lm.one_billion_wds.Transformer103 --logdir="$logdir" &
trainer=$!
while kill -0 $trainer 2> /dev/null; do
  wait $trainer || true  # A signal ends the wait, but not the trainer.
done
status=0
wait $trainer || status=$?
if [[ $is_time_up && $status == 143 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status

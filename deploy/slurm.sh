#!/bin/bash
# A run on the nodes of a Slurm job: a Ray head on the first, a Ray worker on each other, and agentrl in that cluster. One node or several.
#
#     sbatch deploy/slurm.sh recipes/search_r1_nq.yaml recipes/search_r1_nq_2nodes.yaml run.dir=/shared/runs
#
# Arguments are those of `agentrl run`. Two variables name environments that all nodes see under the same path:
#     AGENTRL_ENV  agentrl's (default: .venv of the directory it is submitted from)      SGLANG_ENV  SGLang's (default: sglang beside it)
# Ten minutes before the job's time is over the run is told to end with a checkpoint; the same command goes on from there.
#
# Not run so far: deploy/README.md says what was checked.

#SBATCH --job-name=agentrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --output=agentrl-%j.log

set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch deploy/slurm.sh RECIPE... [a.b=c ...]" >&2
    exit 2
fi

environment=${AGENTRL_ENV:-$SLURM_SUBMIT_DIR/.venv}
sglang=${SGLANG_ENV:-$SLURM_SUBMIT_DIR/sglang}
gpus=${SLURM_GPUS_ON_NODE:-8}
cpus=${SLURM_CPUS_PER_TASK:-64}
start_s=300 # how long the cluster may take to be complete

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
# A host may have several addresses: the first that is IPv4.
head_ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --all-ip-addresses | tr ' ' '\n' | grep -m 1 -E '^[0-9]+(\.[0-9]+){3}$')
port=$((20000 + SLURM_JOB_ID % 10000)) # another one for each job, as nodes may be shared
address=$head_ip:$port

# Only who has this job's token may use its cluster.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
export PATH=$environment/bin:$PATH

echo "== Ray head on $head ($address)"
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap --export=ALL \
    ray start --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false --num-cpus="$cpus" --num-gpus="$gpus" --block &

# Workers may come first: they wait until the head can be reached.
if [ "${#nodes[@]}" -gt 1 ]; then
    others=$(IFS=,; echo "${nodes[*]:1}")
    echo "== Ray workers on $others"
    srun --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) --nodelist="$others" --overlap --export=ALL \
        bash -c 'until (exec 3<>"/dev/tcp/${0/://}") 2>/dev/null; do sleep 2; done
                 exec ray start --address="$0" --num-cpus="$1" --num-gpus="$2" --block' "$address" "$cpus" "$gpus" &
fi

alive() {
    python - "$address" 2>/dev/null <<'P' || echo 0
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
P
}
deadline=$((SECONDS + start_s))
until [ "$(alive | tail -n 1)" -ge "${#nodes[@]}" ]; do
    if [ "$SECONDS" -ge "$deadline" ]; then
        echo "the Ray cluster did not have ${#nodes[@]} nodes after $start_s s" >&2
        exit 1
    fi
    sleep 5
done

echo "== agentrl run $*"
agentrl run "$@" run.ray_address="$address" run.bind=node engine.python="$sglang/bin/python" &
run=$!
trap 'kill -TERM "$run" 2>/dev/null' TERM INT

# A signal ends `wait`, not the run.
status=0
wait "$run" || status=$?
while kill -0 "$run" 2>/dev/null; do
    status=0
    wait "$run" || status=$?
done

# The steps are ended, and with each its own Ray. `ray stop` would end the Ray of every job of this user on the node.
mapfile -t steps < <(jobs -p)
kill -TERM "${steps[@]}" 2>/dev/null || true
wait
exit "$status"

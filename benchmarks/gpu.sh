#!/usr/bin/env bash
# Measures one thing on a GPU, in at most 10 minutes:
#
#     pip install -e ".[test,bench]" && bash benchmarks/gpu.sh tests|buffers|images|agents|sweep|droq
#
# The output also goes to runs/gpu/. With SMALL=1 each command runs only briefly, to check that it
# works, also on a CPU. DROQ_ENV is the environment of droq, by default Hopper-v5.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p runs/gpu
exec > >(tee "runs/gpu/$1.log") 2>&1

pick() { # prints the first value with SMALL=1, otherwise the second
    if [ -n "${SMALL:-}" ]; then echo "$1"; else echo "$2"; fi
}

case $1 in
tests)
    files="tests/test_buffers*.py tests/test_images.py tests/test_policies.py"
    python -m pytest -n 4 $(pick "-k wraps" "") $files
    ;;
buffers)
    python benchmarks/replay_buffers.py --times-only --peers flashbax --repetitions $(pick 1 5) \
        --capacities $(pick 1000 "10000 1000000") $(pick "--only prioritised" "")
    ;;
images)
    python benchmarks/image_step.py --rounds $(pick 1 3)
    ;;
agents)
    for agents in $(pick 2 "1 100 1000"); do
        python ppo_jax.py --env-id phys2d/CartPole-v1 --num-seeds "$agents" --log-interval 10000 \
            --total-timesteps $(pick 20000 500000) --eval-interval 500000
    done
    ;;
sweep) # 1,000 agents: 10 learning rates, 10 discounts, 10 seeds
    rates=$(pick 1e-4,1e-3 1e-4,1.67e-4,2.78e-4,4.64e-4,7.74e-4,1.29e-3,2.15e-3,3.59e-3,5.99e-3,1e-2)
    gammas=$(pick 0.9,0.99 0.9,0.92,0.94,0.95,0.96,0.97,0.98,0.99,0.995,0.999)
    python ppo_jax.py --env-id phys2d/CartPole-v1 --sweep learning_rate="$rates" gamma="$gammas" \
        --num-seeds $(pick 1 10) --log-interval 50000 --total-timesteps $(pick 20000 500000) \
        --eval-interval 500000
    ;;
droq) # three seeds at once; without NVIDIA's MPS they take turns
    export XLA_PYTHON_CLIENT_PREALLOCATE=false
    export XLA_FLAGS=$(pick "" "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL")
    if command -v nvidia-cuda-mps-control > /dev/null; then nvidia-cuda-mps-control -d; fi
    runs=()
    for seed in 1 2 3; do
        python sac_jax.py --env-id "${DROQ_ENV:-Hopper-v5}" --seed $seed --eval-interval 25000 \
            --total-timesteps $(pick 300 100000) --learning-starts $(pick 256 5000) \
            --gradient-steps 20 --policy-frequency 20 --policy-steps 1 --critic-layer-norm \
            --critic-dropout 0.01 --q-lr 3e-4 &
        runs+=($!)
    done
    wait "${runs[@]}" # a plain wait would also wait for tee
    ;;
esac

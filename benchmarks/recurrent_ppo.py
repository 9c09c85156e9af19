"""Trains RecurrentPPO of sb3-contrib, with the flags that `returns.py` gives to a script.

    pip install -e ".[bench]"
    python benchmarks/returns.py --scripts r2d2_jax benchmarks/recurrent_ppo --seeds 3 \
        --env-ids cleanreplay.memory_tasks:CartPoleNoVelocity-v0 --evaluations \
        -- --total-timesteps 100000 --eval-interval 10000

The hyperparameters are those of rl-baselines3-zoo for CartPole without velocities. Evaluations are
like those of the scripts: one episode in each of ten environments, without exploration.
"""

import json
import os
import time
from typing import Any

import tyro
from machine import ROOT  # noqa: F401  makes cleanreplay importable
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter

ZOO: dict = dict(n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20, ent_coef=0.0)


def main(
    env_id: str,
    env_kwargs: str = "{}",
    seed: int = 1,
    total_timesteps: int = 100_000,
    eval_interval: int = 10_000,
    eval_episodes: int = 10,
) -> None:
    """Trains, and logs the mean return of each evaluation under runs/."""
    import torch
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    class Evaluation(BaseCallback):
        """Evaluates whenever a multiple of `eval_interval` steps is reached."""

        def _on_step(self) -> bool:
            if self.num_timesteps % eval_interval < envs.num_envs:
                score, _ = evaluate_policy(self.model, eval_envs, eval_episodes)
                event = Event(step=self.num_timesteps, wall_time=time.time())
                event.summary.value.add(tag="eval/episodic_return", simple_value=score)
                writer.add_event(event)
            return True

    torch.set_num_threads(1)
    kwargs: dict[str, Any] = dict(env_kwargs=json.loads(env_kwargs), seed=seed)
    envs = make_vec_env(env_id, 8, **kwargs)
    eval_envs = make_vec_env(env_id, eval_episodes, **kwargs)
    writer = EventFileWriter(f"{os.getcwd()}/runs/recurrent_ppo__{seed}__{time.time_ns()}")
    model = RecurrentPPO(
        "MlpLstmPolicy",
        envs,
        seed=seed,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        **ZOO,
    )
    model.learn(total_timesteps, Evaluation())
    writer.close()


if __name__ == "__main__":
    tyro.cli(main)

"""Draws trained agents side by side, each in one episode, as a GIF.

    python benchmarks/agents_gif.py benchmarks/agents/*.safetensors --output agents.gif

Each agent is given as for `cleanreplay.watch`: the folder of a run, or the file of an agent. An
episode that is shorter than the others begins again.
"""

from contextlib import closing
from pathlib import Path

import numpy as np
import PIL.Image
import tyro
from machine import ROOT

from cleanreplay import agent_file, policies
from cleanreplay.watch import make_drawn, play

PICTURES_PER_SECOND = 15


def episode(agent: str, seed: int, size: int, count: int) -> list[np.ndarray]:
    """Plays an episode. Returns its first `count` pictures [size, size, 3]."""
    script = ROOT / agent_file.open_agent(agent_file.find(agent)).about["script"]
    loaded = policies.load_agent(agent, script)
    envs, draw = make_drawn(loaded, "rgb_array")
    with closing(envs):
        every = max(1, round(envs.metadata.get("render_fps", 15) / PICTURES_PER_SECOND))
        pictures, returns = play(
            loaded.agent, loaded.params, envs, seed, loaded.run.eval_max_steps, draw
        )
    print(f"{loaded.run.env_id}: return {returns[-1]:.1f}")
    pictures = pictures[::every]
    shown = [pictures[i % len(pictures)] for i in range(count)]
    return [np.asarray(PIL.Image.fromarray(x).resize((size, size))) for x in shown]


def main(
    agents: tyro.conf.Positional[tuple[str, ...]],
    output: Path = ROOT / "docs" / "agents.gif",
    seconds: float = 8,
    size: int = 180,
    seed: int = 0,
) -> None:
    """Writes the GIF. `size` is the width and height of each agent in pixels."""
    count = round(seconds * PICTURES_PER_SECOND)
    columns = [episode(agent, seed, size, count) for agent in agents]
    frames = [PIL.Image.fromarray(np.hstack(row)) for row in zip(*columns, strict=True)]
    palette = PIL.Image.fromarray(np.vstack([np.asarray(x) for x in frames[::20]])).quantize(48)
    first, *others = [x.quantize(palette=palette, dither=PIL.Image.Dither.NONE) for x in frames]
    first.save(
        output,
        save_all=True,
        append_images=others,
        duration=round(1_000 / PICTURES_PER_SECOND),
        loop=0,
        optimize=True,
    )


if __name__ == "__main__":
    tyro.cli(main)

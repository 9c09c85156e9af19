"""Divides agents, and what one agent learns from, over the devices of all processes."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cleanreplay.errors import UsageError


def make_mesh(num_agents: int, num_envs: int, num_devices: int) -> Mesh:
    """Arranges `num_devices` of each process in a mesh ["seeds", "envs"].

    Its axis "seeds" has length gcd(num_agents, devices). Each agent gets devices / length devices.
    """
    devices = []
    for process in range(jax.process_count()):
        local = jax.local_devices(process)
        if len(local) < num_devices:
            raise UsageError(f"num_devices must be {len(local)} or less here, not {num_devices}")
        devices += local[:num_devices]
    side_by_side = math.gcd(num_agents, len(devices))
    grid = np.reshape(devices, (side_by_side, -1))
    per_agent = grid.shape[1]
    if num_envs % per_agent > 0:
        text = f"num_devices: {per_agent} devices for each agent do not divide its {num_envs}"
        raise UsageError(f"{text} environments")
    return Mesh(grid, ("seeds", "envs"))


def num_parts(mesh: Mesh, batch_size: int) -> int:
    """Counts the parts that a batch is split into: one for each device of an agent, or 1."""
    devices = mesh.shape["envs"]
    return devices if batch_size % devices == 0 else 1


def split(tree: Any, mesh: Mesh, axis: int = 0) -> Any:
    """Divides an axis of all arrays over the devices of an agent."""
    parts = PartitionSpec(*[None] * axis, "envs")
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, parts))


class SplitNetwork(NamedTuple):
    """Applies a recurrent network to a part of the sequences on each device of an agent.

    Each device has a copy of the parameters, so the gradient is summed over the devices once.
    Otherwise XLA sums it at each step of the loop over time.
    """

    network: Any
    mesh: Mesh

    def init(self, *args: Any) -> Any:
        """Makes the parameters of the network."""
        return self.network.init(*args)

    def apply(self, params: Any, carry: Any, *steps: Any) -> tuple:
        """Applies the network to carries [B, ...] and steps [W, B, ...].

        Returns its outputs [W, B, ...], and the carry after them.
        """
        devices = num_parts(self.mesh, len(jax.tree.leaves(carry)[0]))
        if devices == 1:
            return self.network.apply(params, carry, *steps)

        def parts(tree: Any, axis: int) -> Any:  # the axis of the batch becomes [devices, B]
            def cut(x: Any) -> Any:
                return x.reshape(*x.shape[:axis], devices, -1, *x.shape[axis + 1 :])

            return split(jax.tree.map(cut, tree), self.mesh, axis)

        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (devices, *x.shape)), params)
        axes = (0, 0, *[1] * len(steps))
        apply = jax.vmap(self.network.apply, axes, spmd_axis_name="envs")
        *outputs, carry = apply(split(copies, self.mesh), parts(carry, 0), *parts(steps, 1))
        outputs = [jax.lax.collapse(x.swapaxes(0, 1), 1, 3) for x in outputs]
        return *outputs, jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), carry)

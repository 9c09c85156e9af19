"""docs/coming_from.md: our column runs, and has the results of Flashbax's, line by line.

The columns of the others do not run: dejax does not work with a JAX of today, Stable-Baselines3
needs torch, and the functional buffer is anyone's.
"""

import re
from functools import partial

import flashbax
import flashbax.vault  # as flashbax.vault
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT

import buffers
from cleanreplay.vault import Vault

pytestmark = pytest.mark.pages

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
KEY = jax.random.key(0)
assert_close = partial(np.testing.assert_allclose, rtol=1e-5)


class CompiledFlashbax:
    """Flashbax with each function of its buffers compiled: one program instead of dozens."""

    functions = ("init", "add", "sample", "can_add", "can_sample", "set_priorities")

    def __getattr__(self, name):
        theirs = getattr(flashbax, name)
        if not name.startswith("make_"):
            return theirs

        def make(*args, **kwargs):
            buffer = theirs(*args, **kwargs)
            names = [function for function in self.functions if hasattr(buffer, function)]
            return buffer.replace(**{name: jax.jit(getattr(buffer, name)) for name in names})

        return make


fbx = CompiledFlashbax()


def items_of(ids):
    ids = np.asarray(ids, np.float32)
    observation = np.repeat(ids[..., None], 3, axis=-1)
    return {"observation": jnp.asarray(observation), "reward": jnp.asarray(ids)}


SEQUENCES = np.arange(32).reshape(8, 4).T  # [environments, steps]
OF_TWO_DEVICES = np.stack([SEQUENCES, 500 + SEQUENCES])
NAMES = {
    "jax": jax,
    "jnp": jnp,
    "buffers": buffers,
    "key": KEY,
    "item": items_of(1000),
    "items": items_of(np.arange(100, 110)),
    "other_items": items_of(np.arange(300, 310)),
    "transition": items_of(5),
    "step": items_of(np.arange(200, 204)),
    "sequences": items_of(SEQUENCES),
    "sequences_of_two": items_of(OF_TWO_DEVICES),
    "steps_of_two": items_of(OF_TWO_DEVICES.swapaxes(1, 2)),
    "item_update_fn": lambda item: jax.tree.map(lambda x: x + 1, item),
    "clustering_fn": lambda item: (item["reward"] >= 105).astype(int),
}


def rows(heading):
    """Reads the code (left, right) of each row of the table under a heading; "" if empty."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n#")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    code = []
    for line in table[2:]:  # after the head of the table
        left, right, _ = line.strip("|").split("|")
        code.append((left.strip(" `"), right.strip(" `")))
    return code


def assigned(line):
    names = re.match(r"([\w, ]+) = ", line)
    return set(names[1].split(", ")) if names else set()


def held(state):
    """Lists the ids of the items that a state holds, ours or Flashbax's, oldest first."""
    if hasattr(state, "experience"):
        return held_by_flashbax(state)
    ids = np.asarray(state.storage["reward"])
    ids = ids.reshape(len(ids), -1)  # [T, N]
    sizes = np.reshape(state.size, -1)  # of each cluster
    cursors = np.reshape(state.cursor, -1)
    rings = ids.reshape(len(sizes), -1, ids.shape[1])
    held = []
    for ring, cursor, size in zip(rings, cursors, sizes, strict=True):
        held.append(ring[np.arange(cursor - size, cursor) % len(ring)].tolist())
    return held


def held_by_flashbax(state):
    ids = np.asarray(state.experience["reward"]).T  # [T, N]
    end = int(state.write_index if hasattr(state, "write_index") else state.current_index)
    start = int(getattr(state, "read_index", 0))
    if state.is_full:
        return [np.roll(ids, -end, axis=0).tolist()]
    return [ids[start:end].tolist()]


def ids_of(drawn):
    """Returns the ids [B, steps] of items, sequences, or Flashbax's pairs, in a sample or not."""
    drawn = getattr(drawn, "experience", drawn)
    if hasattr(drawn, "first"):
        return np.stack([ids_of(drawn.first)[:, 0], ids_of(drawn.second)[:, 0]], axis=1)
    ids = np.asarray(drawn["reward"])
    observation = np.asarray(drawn["observation"])
    np.testing.assert_array_equal(observation, np.repeat(ids[..., None], 3, axis=-1))
    return ids.reshape(len(ids), -1)


def all_drawn(batch):
    """Returns how many ids, and which: a batch of 256 of few items has all of them."""
    ids = ids_of(batch)
    return ids.shape, np.unique(ids, axis=0).tolist()


def drawn_by_each_device(batches):
    return [all_drawn(jax.tree.map(lambda x, i=i: x[i], batches.experience)) for i in range(2)]


def probabilities_of(sample):
    """Returns the probability of each item or sequence that can be sampled, by its first id."""
    first = ids_of(sample)[:, 0].tolist()
    return dict(zip(first, sample.probabilities.tolist(), strict=True))


def as_it_is(value):
    return value


# What is compared of variables with these names, if not the value itself.
COMPARED = {
    "state": held,
    "other": held,
    "batch": all_drawn,
    "pair": all_drawn,
    "first": all_drawn,
    "second": all_drawn,
    "batches": drawn_by_each_device,
    "sample": probabilities_of,
    "weights": np.unique,
}
NOT_COMPARED = {"queue", "vault", "states", "popped"}  # the rows after them compare parts


def compared(name, value):
    return COMPARED.get(name, as_it_is)(value)


HEADINGS = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
OF_FLASHBAX = [heading for heading in HEADINGS if heading.startswith("Flashbax")]


@pytest.mark.parametrize("heading", sorted(set(HEADINGS) - set(OF_FLASHBAX)))
def test_our_column_runs(heading):
    names = NAMES.copy()
    for _, ours in rows(heading):
        exec(ours, names)

    assert names.keys() > NAMES.keys()


@pytest.mark.parametrize("heading", OF_FLASHBAX)
def test_flashbax_does_the_same(heading):
    theirs = NAMES | {"fbx": fbx}
    ours = NAMES | {"Vault": Vault}
    names_compared = set()
    for left, right in rows(heading):
        exec(left, theirs)
        exec(right, ours)
        for name in assigned(left) & assigned(right) - NOT_COMPARED:
            there, here = compared(name, theirs[name]), compared(name, ours[name])
            jax.tree.map(assert_close, there, here)
            names_compared.add(name)

    assert len(names_compared) > 1

"""docs/coming_from.md: our column runs, and holds and draws what it should, line by line.

The column of Flashbax runs, too, and gives the same. Those of the others do not run: dejax does not
work with a JAX of today, Stable-Baselines3 needs torch, and the functional buffer is anyone's.
"""

import re
from functools import partial

import flashbax
import flashbax.vault  # as flashbax.vault
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, more

import buffers
from cleanreplay.vault import Vault

pytestmark = pytest.mark.pages

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
KEY = jax.random.key(0)
assert_close = partial(np.testing.assert_allclose, rtol=1e-5)


class CompiledFlashbax:
    """Flashbax, each function of whose buffers is compiled: one program instead of dozens."""

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


# ------------------------------------------------------------------------------------ the columns


def items_of(ids):
    """Items [*ids.shape, ...] with the id in both fields."""
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
    """The code (left, right) of each row of the table under a heading; "" for an empty cell."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n#")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    code = []
    for line in table[2:]:  # after the head of the table
        left, right, _ = line.strip("|").split("|")
        code.append((left.strip(" `"), right.strip(" `")))
    return code


def assigned(line):
    """The names that a line assigns."""
    names = re.match(r"([\w, ]+) = ", line)
    return set(names[1].split(", ")) if names else set()


def compared(name, theirs, ours, held):
    """What of a variable must be the same there and here."""
    if name in ("state", "other"):
        return held(theirs[name]), held_here(ours[name])
    part = COMPARED.get(name, exactly)
    return part(theirs[name]), part(ours[name])


def run_table(heading, theirs, held=None):
    """Runs both columns, and compares each name that both assign in a row; gives all names of both.

    What `held` gives of a state there is what `held_here` gives of one here.
    """
    theirs = NAMES | theirs
    ours = NAMES | {"Vault": Vault}
    for left, right in rows(heading):
        exec(left, theirs)
        exec(right, ours)
        for name in assigned(left) & assigned(right) - NOT_COMPARED:
            there, here = compared(name, theirs, ours, held)
            jax.tree.map(assert_close, there, here)
    return theirs, ours


# ------------------------------------------------------------------------------ what is compared


def held_here(state):
    """The ids of the items that a state holds, oldest first."""
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
    """The ids [B, steps] of items, windows, or Flashbax's pairs, in a sample or not."""
    drawn = getattr(drawn, "experience", drawn)
    if hasattr(drawn, "first"):
        return np.stack([ids_of(drawn.first)[:, 0], ids_of(drawn.second)[:, 0]], axis=1)
    ids = np.asarray(drawn["reward"])
    observation = np.asarray(drawn["observation"])
    np.testing.assert_array_equal(observation, np.repeat(ids[..., None], 3, axis=-1))
    return ids.reshape(len(ids), -1)


def all_drawn(batch):
    """How many, and which: in a batch of 256 of few items all are there."""
    ids = ids_of(batch)
    return ids.shape, np.unique(ids, axis=0).tolist()


def drawn_by_each_device(batches):
    pairs = batches.experience
    each = [jax.tree.map(lambda x, i=i: x[i], pairs) for i in range(2)]
    return [all_drawn(pairs) for pairs in each]


def probabilities_of(sample):
    """The probability of each item or window that can be drawn, by its first id."""
    first = ids_of(sample)[:, 0].tolist()
    return dict(zip(first, sample.probabilities.tolist(), strict=True))


def exactly(value):
    return value


COMPARED = {
    "batch": all_drawn,
    "pair": all_drawn,
    "first": all_drawn,
    "second": all_drawn,
    "batches": drawn_by_each_device,
    "sample": probabilities_of,
    "weights": np.unique,
    "rewards": np.unique,
}
NOT_COMPARED = {"queue", "vault", "states", "popped", "data"}  # the rows after them compare parts


# ------------------------------------------------------------------------------------- the tables


TABLES_OF_FLASHBAX = [
    f"Flashbax: {subject}"
    for subject in (
        *("items", "steps of several environments", "trajectories", "prioritised", "a queue"),
        *("several devices", "several buffers in one batch", "Vault"),
    )
]


def rings(*of_ids):
    """What `held_here` gives of a state whose rings hold these ids."""
    return [[[id] for id in ids] for ids in of_ids]


def drawn(*ids):
    """What `all_drawn` gives of 256 items that have these ids."""
    return (256, 1), [[id] for id in ids]


ITEMS, OTHERS = range(100, 110), range(300, 310)
# What our column assigns, in the order of its lines, where Flashbax is not beside it.
OURS = {
    "dejax": [
        ("state", rings([])),
        ("state", rings([1000])),
        ("state", rings([1000, *ITEMS])),
        ("size", 11),
        ("batch", drawn(*ITEMS, 1000)),
        ("state", rings([1001, *range(101, 111)])),
        ("state", rings(range(101, 105), range(106, 110))),  # the last four of each cluster
        ("batch", drawn(*range(101, 105), *range(106, 110))),
    ],
    "dejax.circular_buffer": [
        ("state", rings([])),
        ("state", rings([1000])),
        ("size", 1),
        ("oldest", 1000),
        ("state", rings([])),
        ("reward", 1000),
    ],
    "A functional ReplayBuffer": [  # 20 items go into 15 places, the last five over the first five
        ("state", rings([])),
        ("state", rings(ITEMS)),
        ("batch", drawn(*ITEMS)),
        ("state", rings([*range(105, 110), *OTHERS])),
        ("batch", drawn(*range(105, 110), *OTHERS)),
        ("data", [*range(305, 310), *range(105, 110), *range(300, 305)]),
        ("position", 5),
        ("size", 15),
    ],
    "Stable-Baselines3, CleanRL": [
        ("state", rings([])),
        ("state", rings([5])),
        ("data", [5] * 256),
        ("rewards", [5] * 256),
    ],
}
SHOWN = {
    "state": held_here,
    "batch": all_drawn,
    "oldest": lambda item: item["reward"].tolist(),
    "data": lambda items: ids_of(items).ravel().tolist(),
} | dict.fromkeys(("size", "position", "reward", "rewards"), lambda value: value.tolist())


@pytest.mark.parametrize("heading", OURS)
def test_our_column_holds_and_draws_what_it_should(heading):
    names = NAMES.copy()
    values = []
    for _, ours in rows(heading):
        exec(ours, names)
        assigned_here = assigned(ours) & SHOWN.keys()
        values += [(name, SHOWN[name](names[name])) for name in sorted(assigned_here, reverse=True)]
    assert values == OURS[heading]


def test_every_table_is_run():
    assert {*re.findall(r"^## (.+)$", PAGE, re.MULTILINE)} == {*OURS, *TABLES_OF_FLASHBAX}


@pytest.mark.slow
@pytest.mark.parametrize("heading", TABLES_OF_FLASHBAX[:5])
def test_flashbax_does_the_same(heading):
    run_table(heading, {"fbx": fbx}, held_by_flashbax)


def test_flashbax_does_the_same_on_several_devices():
    run_table("Flashbax: several devices", {"fbx": fbx})


def test_flashbax_mixes_as_many_of_each_buffer():
    names = run_table("Flashbax: several buffers in one batch", {"fbx": fbx}, held_by_flashbax)
    for column in names:
        ids = ids_of(column["batch"])[:, 0]
        assert set(ids[:128].tolist()) == set(range(100, 110))
        assert set(ids[128:].tolist()) == set(range(300, 310))


def test_the_vault_of_flashbax_does_the_same():
    run_table("Flashbax: Vault", {"fbx": fbx}, held_by_flashbax)


# ------------------------------------------------------------ from when on there can be a sample


def answers(buffer, can_sample, rows):
    """What `can_sample` says after each of the rows."""
    state = buffer.init(items_of(0))
    add = jax.jit(buffer.add)
    found = []
    for row in rows:
        state = add(state, row)
        found.append(bool(can_sample(state)))
    return found


def first_answers(theirs, ours, min_size, rows):
    """Those of both, which must agree, and after how many rows they turn to yes."""
    there = answers(theirs, theirs.can_sample, rows)
    here = answers(ours, lambda state: ours.can_sample(state, min_size), rows)
    assert there == here
    return there.index(True) + 1


@pytest.mark.parametrize(
    ("min_length", "steps"), [(4, 2), (7, 2), (8, 3), (15, 4), (16, 5), (17, 5)]
)
@pytest.mark.parametrize("kind", ["flat", more("prioritised_flat")])
def test_min_length_means_the_same_for_pairs_of_several_environments(kind, min_length, steps):
    make = getattr(fbx, f"make_{kind}_buffer")
    theirs = make(64, min_length, 2, add_batch_size=4)
    ours = buffers.uniform_replay(64, num_envs=4, sequence_length=2)
    added = [items_of(np.arange(4))] * 8
    min_size = 4 * (min_length // 4 + 1)
    assert first_answers(theirs, ours, min_size, added) == steps


@pytest.mark.parametrize("min_length", [1, 2, 7])
def test_min_length_means_the_same_for_pairs_of_one_environment(min_length):
    theirs = fbx.make_flat_buffer(64, min_length, 2)
    ours = buffers.uniform_replay(64, sequence_length=2)
    added = [items_of(0)] * 10
    assert first_answers(theirs, ours, min_length + 1, added) == min_length + 1


@pytest.mark.parametrize("min_length", [1, 2, 7])
def test_min_length_means_the_same_for_items(min_length):
    theirs = fbx.make_item_buffer(64, min_length, 2)
    ours = buffers.uniform_replay(64)
    added = [items_of(0)] * 10
    assert first_answers(theirs, ours, min_length, added) == min_length


@pytest.mark.parametrize("min_length", [3, 5])
def test_min_length_means_the_same_for_trajectories(min_length):
    theirs = fbx.make_trajectory_buffer(4, 2, 3, 1, min_length, max_length_time_axis=16)

    def add_one_step(state, items):
        sequences = jax.tree.map(lambda x: x[:, None], items)
        return theirs.add(state, sequences)

    ours = buffers.uniform_replay(64, num_envs=4, sequence_length=3)
    added = [items_of(np.arange(4))] * 8
    adding_steps = theirs.replace(add=add_one_step)
    assert first_answers(adding_steps, ours, 4 * min_length, added) == min_length


# ------------------------------------------------------------------------- Flashbax's quickstart


def test_the_quickstart_runs_on_two_devices():
    """Flashbax's quickstart in our names: add in batches, can_sample, sample, under pmap."""
    replay = buffers.uniform_replay(64, num_envs=2, sequence_length=2)
    item = {"obs": jnp.zeros(5), "reward": jnp.float32(0)}
    states = jax.pmap(lambda _: replay.init(item))(jnp.arange(2))
    add = jax.pmap(replay.add, donate_argnums=0)
    can_sample = jax.pmap(replay.can_sample)
    for t in range(40):
        # Of two devices with two environments each.
        step = {"obs": jnp.full((2, 2, 5), t * 1.0), "reward": jnp.full((2, 2), t * 1.0)}
        states = add(states, step)
        has_pairs = t >= 1
        assert can_sample(states).tolist() == [has_pairs, has_pairs]

    draw = jax.pmap(lambda state, key: replay.sample(state, key, 16).experience)
    pairs = draw(states, jax.random.split(jax.random.key(0), 2))
    first = pairs["reward"][:, :, 0]
    second = pairs["reward"][:, :, 1]
    np.testing.assert_array_equal(second, first + 1)
    assert first.min() >= 40 - 32
    assert (first[0] != first[1]).any()


QUICKSTART = [
    {"obs": jnp.array([1, 2]), "reward": jnp.array(3.0)},
    {"obs": jnp.array([4, 5]), "reward": jnp.array(6.0)},
    {"obs": jnp.array([7, 8]), "reward": jnp.array(9.0)},
]


def quickstart_here():
    """What `can_sample` says after each step, and the rewards of the pairs of 20 draws."""
    replay = buffers.uniform_replay(32, sequence_length=2)
    state = replay.init({"obs": jnp.array([0, 0]), "reward": jnp.array(0.0)})
    said = []
    for step in QUICKSTART:
        state = replay.add(state, step)
        said.append(bool(replay.can_sample(state, min_size=2 + 1)))  # two pairs, three steps
    drawn = set()
    for seed in range(20):
        pair = replay.sample(state, jax.random.PRNGKey(seed), 1).experience
        drawn.add(tuple(pair["reward"][0].tolist()))
    return said, drawn


def quickstart_in_flashbax():
    """The same of the quickstart in Flashbax's README."""
    buffer = fbx.make_flat_buffer(max_length=32, min_length=2, sample_batch_size=1)
    state = buffer.init({"obs": jnp.array([0, 0]), "reward": jnp.array(0.0)})
    said = []
    for step in QUICKSTART:
        state = buffer.add(state, step)
        said.append(bool(buffer.can_sample(state)))
    drawn = set()
    for seed in range(20):
        pair = buffer.sample(state, jax.random.PRNGKey(seed)).experience
        drawn.add((float(pair.first["reward"][0]), float(pair.second["reward"][0])))
    return said, drawn


def test_the_quickstart_gives_the_same_line_by_line():
    said, drawn = quickstart_here()
    assert said == [False, False, True]
    assert drawn == {(3.0, 6.0), (6.0, 9.0)}
    assert quickstart_in_flashbax() == (said, drawn)

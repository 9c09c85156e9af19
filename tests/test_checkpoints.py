"""cleanreplay/checkpoints.py: a state is saved completely, and restored unchanged."""

import errno
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DAMAGE, assert_trees_equal, flip_a_bit

from cleanreplay import UsageError, checkpoints, disk
from cleanreplay.checkpoints import Checkpoints, steps_in

RANDOM = np.random.default_rng(0)
RING = RANDOM.integers(0, 9, (1, 30, 4, 90), np.uint8)
WEIGHTS = RANDOM.standard_normal((3, 1_000), np.float32)


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    """Makes leaves of 10 kB large, chunks 1 kB and blocks 4 kB."""
    monkeypatch.setattr(disk, "LARGE", 10_000)
    monkeypatch.setattr(disk, "CHUNK_BYTES", 1_000)
    monkeypatch.setattr(disk, "CHUNKS_AT_ONCE", 4)


def new_state():
    """Makes a pytree with two large leaves, of several chunks and blocks, and small ones."""
    state = {"ring": RING, "weights": WEIGHTS, "params": np.arange(6.0).reshape(2, 3)}
    return jax.tree.map(jnp.asarray, state | {"is_on": np.bool_(True), "step": np.int32(7)})


def zeros():
    return jax.tree.map(jnp.zeros_like, new_state())


def save(saver, step, state):
    saver.save(step, state, {"step": step, "total_timesteps": 300})


def saved(*steps):
    """Saves the state of a run at these steps. Returns its Checkpoints after the writes."""
    saver = Checkpoints("run")
    for step in steps:
        save(saver, step, new_state())
    saver.wait()
    return saver


def test_large_leaves_are_restored_into_their_memory():
    """Two replays may exceed the memory. Other programs can read the compressed arrays by name."""
    like = zeros()
    step, state, about = saved(100).restore(like)
    folder = Path("run/checkpoints/100")
    stored = disk.open_file(folder / "state.safetensors")

    assert step == about["step"] == 100
    assert_trees_equal(state, new_state())
    assert [like[name].is_deleted() for name in ("ring", "weights", "step")] == [True, True, False]
    assert {x.name for x in folder.iterdir()} == {"ring", "weights", "state.safetensors"}
    np.testing.assert_array_equal(stored.read(["weights"])["weights"], WEIGHTS)


def test_the_newest_two_are_kept():
    saved(100, 200, 1000)

    assert steps_in("run") == [200, 1000]
    assert checkpoints.newest(Path("run")).parent.name == "1000"
    assert len(list(Path("run/checkpoints").iterdir())) == 2


def test_a_step_is_saved_once():
    save(saved(100), 100, zeros())
    reopened = Checkpoints("run")
    reopened.restore(zeros())
    save(reopened, 100, zeros())

    assert_trees_equal(reopened.restore(zeros())[1], new_state())


def test_what_a_killed_process_began_is_deleted():
    begun = Path("run/checkpoints/.150.new")
    begun.mkdir(parents=True)
    (begun / "part").write_bytes(bytes(100))
    saved(100)

    assert not begun.exists()
    assert steps_in("run") == [100]


def test_a_copy_is_written_if_the_state_is_overwritten(monkeypatch):
    """Training may overwrite the state before the thread begins to write."""
    saver, state = Checkpoints("run"), new_state()
    write = disk.write
    overwritten = threading.Event()

    def write_late(*given, **named):
        assert overwritten.wait(timeout=20)
        write(*given, **named)

    monkeypatch.setattr(disk, "write", write_late)
    save(saver, 100, state)
    for x in jax.tree.leaves(state):
        x.delete()
    overwritten.set()
    saver.wait()

    assert_trees_equal(saver.restore(zeros())[1], new_state())


def test_a_state_too_large_to_copy_is_written_at_once(monkeypatch):
    size = sum(x.nbytes for x in jax.tree.leaves(new_state()))
    monkeypatch.setattr(checkpoints, "COPIED", size - 1)
    save(Checkpoints("run"), 100, new_state())

    assert steps_in("run") == [100]


def fail_once(monkeypatch, name, error):
    """Makes the next call of a function of `disk` fail."""
    function = getattr(disk, name)

    def fail(*given, **named):
        monkeypatch.setattr(disk, name, function)
        raise error

    monkeypatch.setattr(disk, name, fail)


def test_a_full_disk_does_not_stop_the_next_checkpoint(monkeypatch):
    saver = Checkpoints("run")
    fail_once(monkeypatch, "write", OSError(errno.ENOSPC, "No space left on device"))
    save(saver, 100, new_state())
    with pytest.raises(UsageError, match=r"no space left on the disk of .*checkpoints"):
        save(saver, 200, new_state())
    saver.wait()

    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["200"]


def swap_chunks(folder):
    first, second = sorted(folder.glob("ring/[0-9]*"))[:2]
    texts = first.read_bytes(), second.read_bytes()
    assert texts[0] != texts[1]
    first.write_bytes(texts[1])
    second.write_bytes(texts[0])


def of_file(damage, name="state.safetensors"):
    return lambda folder: damage(next(folder.glob(name)))


DAMAGES = {name: (of_file(damage), word) for name, (damage, word) in DAMAGE.items()}
DAMAGES |= {
    "a bit": (of_file(lambda file: flip_a_bit(file, "step")), "step has a different checksum"),
    "no file": (of_file(Path.unlink), "FileNotFound"),
    "no chunk": (of_file(Path.unlink, "ring/0*"), "ring"),
    "a chunk cut off": (of_file(DAMAGE["cut off"][0], "ring/0*"), "ring"),
    "swapped chunks": (swap_chunks, "ring has a different checksum"),
}


@pytest.mark.parametrize(("damage", "word"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_moved_aside(damage, word, capsys):
    """The run continues from the checkpoint before it."""
    saver = saved(100, 200)
    damage(Path("run/checkpoints/200"))
    step, state, _ = saver.restore(zeros())

    assert step == 100
    assert_trees_equal(state, new_state())
    assert steps_in("run") == [100]
    assert [path.name.partition("_")[0] for path in Path("run/damaged").iterdir()] == ["200"]
    (line,) = capsys.readouterr().out.splitlines()
    assert "checkpoint 200 is damaged" in line
    assert word in line


def test_without_a_readable_checkpoint_nothing_is_moved():
    saver = saved(100, 200)
    for step in (100, 200):
        checkpoints.file_at("run", step).write_bytes(b"")

    with pytest.raises(UsageError, match=r"no checkpoint in .*run/checkpoints can be read"):
        saver.restore(zeros())
    assert steps_in("run") == [100, 200]


def test_a_checkpoint_that_cannot_be_read_now_stays(monkeypatch):
    saver = saved(100, 200)
    fail_once(monkeypatch, "open_file", OSError(errno.ESTALE, "Stale file handle"))
    with pytest.raises(UsageError, match=r"checkpoint 200 cannot be read now: .*Stale file handle"):
        saver.restore(zeros())

    assert saver.restore(zeros())[0] == 200
    assert not Path("run/damaged").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (MemoryError(), True),
        (ValueError("INTERNAL: Error reading x [OS error 5: EIO Input/output error]"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 80 bytes"), True),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (ValueError("NOT_FOUND: Error opening x [OS error 2: ENOENT No such file]"), False),
    ],
)
def test_errors_of_the_machine_are_told_from_damage(error, expected):
    assert checkpoints.is_of_the_machine(error) is expected


def test_another_state_is_refused_with_a_leaf():
    changed = zeros() | {"b": jnp.zeros(1), "params": jnp.zeros(2)}
    words = r"is of another script or version: params is \(2, 3\) there, \(2,\) here"

    with pytest.raises(UsageError, match=words):
        saved(100).restore(changed)


@pytest.mark.parametrize(
    ("folder", "hint"), [("run", ""), ("run/seed_2", ": all agents .* in run")]
)
def test_a_folder_without_checkpoints_is_an_error(folder, hint):
    if hint:
        saved(100)
    Path(folder).mkdir(exist_ok=True)

    with pytest.raises(UsageError, match=f"^{folder}/checkpoints has no checkpoint{hint}$"):
        checkpoints.newest(Path(folder))

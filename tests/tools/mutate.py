"""Changes one line of the sources at a time, and shows which test fails.

    python tests/tools/mutate.py                      # all of mutants.json
    python tests/tools/mutate.py b14 s22 --slow       # some of them, also with slow tests

A mutant is {id, file, old, new, by}: in a copy of the project the only line `old` of the file
becomes `new`, without regard to indentation. If several lines are equal, `before` is the one above.
The test `by`, which is known to fail, runs first; then the module's own test files, and those that
name the module, up to the first failure.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copy_project(folder: Path) -> None:
    """Copies the files that git tracks, or would add, to a folder."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).exists():  # otherwise its deletion is not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def places_of(root: Path, mutant: dict) -> list[int]:
    """Finds the numbers of the lines that the mutant changes, from 0."""
    lines = [line.strip() for line in (root / mutant["file"]).read_text().splitlines()]
    before = mutant.get("before")
    return [
        i
        for i, line in enumerate(lines)
        if line == mutant["old"] and (before is None or lines[i - 1] == before)
    ]


def write(root: Path, mutant: dict) -> None:
    """Writes the mutant into the sources under `root`."""
    (place,) = places_of(root, mutant)
    file = root / mutant["file"]
    lines = file.read_text().splitlines(keepends=True)
    lines[place] = lines[place].replace(mutant["old"], mutant["new"])
    file.write_text("".join(lines))


def tests_of(root: Path, mutant: dict) -> list[str]:
    """Lists the test files that name the module: its own, then by how often they name it."""
    stem = Path(mutant["file"]).stem
    own = f"test_{stem.removesuffix('_jax')}"
    word = re.compile(rf"\b{stem}\b")
    counts = {file: len(word.findall(file.read_text())) for file in root.glob("tests/test_*.py")}
    found = [file for file, count in counts.items() if count > 0]
    found.sort(key=lambda file: (not file.stem.startswith(own), -counts[file]))
    return [str(file.relative_to(root)) for file in found]


def run(root: Path, mutant: dict, layers: str, seconds: float) -> str:
    """Runs the tests of a mutant that is written under `root`. Returns the outcome."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    given = {"cwd": root, "capture_output": True, "text": True, "timeout": seconds}
    known = ["-m", "", mutant["by"]] if "by" in mutant else []
    for tests in filter(None, [known, ["-m", layers, *tests_of(root, mutant)]]):
        try:
            done = subprocess.run([*command, *tests], check=False, **given)
        except subprocess.TimeoutExpired:
            if tests is known:
                return f"killed by {mutant['by']}, which does not end"
            return "not noticed before the time was over"
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if failed:
            return f"killed by {failed[0]}"
    return "lives"


def main() -> None:
    """Runs the mutants, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("ids", nargs="*", help="ids in mutants.json; by default all")
    parser.add_argument("--slow", action="store_true", help="also run slow tests")
    parser.add_argument("--seconds", type=float, default=120, help="time limit of each mutant")
    given = parser.parse_args()
    mutants = json.loads((Path(__file__).parent / "mutants.json").read_text())
    layers = "not pages and not benchmarks" + ("" if given.slow else " and not slow")
    for mutant in mutants:
        if given.ids and mutant["id"] not in given.ids:
            continue
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            copy_project(root)
            write(root, mutant)
            print(mutant["id"], run(root, mutant, layers, given.seconds), flush=True)


if __name__ == "__main__":
    main()

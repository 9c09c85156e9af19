"""Shared by the benchmarks: descriptions of the machine, statistics and tables of results."""

import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for the buffers and the scripts, imported after this
MISSING = "not installed"


def resident(field: str = "VmRSS:") -> int:
    """Returns the physical memory of this process, without freed memory; only on Linux."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(field))


def processor() -> str:
    """Returns the model of the processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or a processor without such a line
        return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Describes the processor, the cores that this process may use, memory, system and Python."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "processor": processor(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the version of each package, or MISSING."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = MISSING
    return found


def header(packages: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """Describes machine and versions: a paragraph to print, and the same for JSON."""
    about = {"machine": machine(), "versions": versions(packages)}
    here = about["machine"]
    lines = [
        f"{here['processor']}, {here['cores']} cores, {here['memory_gb']} GB, {here['system']}, "
        f"Python {here['python']}",
        ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
    ]
    return "\n".join(lines) + "\n", about


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes the result if there is a path. Numbers that are not finite become null."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(finite(result), indent=1, allow_nan=False) + "\n")


def finite(x: Any) -> Any:
    """Replaces every infinity and NaN by None, because JSON has neither."""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    if isinstance(x, float) and not abs(x) < float("inf"):
        return None
    return x


def spread(values: list[float], digits: int = 0) -> str:
    """Writes median, minimum and maximum; only the median if all are equal or it is infinite."""
    three = statistics.median(values), min(values), max(values)
    median, low, high = ("never" if x == float("inf") else f"{x:,.{digits}f}" for x in three)
    return median if median == "never" or three[1] == three[2] else f"{median} ({low} to {high})"


def ratios(values: list[float], base: list[float]) -> list[float]:
    """Divides the values by those of `base`, repetition by repetition."""
    return [x / y for x, y in zip(values, base, strict=True)]


def line(cells: Iterable[str]) -> str:
    """Makes a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table(heads: list[str], rows: Iterable[Iterable[str]]) -> str:
    """Makes a Markdown table."""
    return "\n".join(map(line, [heads, ["---"] * len(heads), *rows]))


def records(rows: list[dict[str, Any]]) -> str:
    """Makes a Markdown table of rows with the same keys: lists as spreads, 0.0 as empty cells."""

    def cell(x: Any) -> str:
        number = f"{x:,.2f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x
        return spread(x, 2) if isinstance(x, list) else number if x else ""

    return table(list(rows[0]), [map(cell, row.values()) for row in rows])

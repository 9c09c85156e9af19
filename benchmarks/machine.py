"""What the benchmarks say of where they ran, and how they write it: each stands at its own top."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MISSING = "not installed"


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def processor() -> str:
    """Its model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or a processor that has no such line
        return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, system and Python."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "processor": processor(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The version of each, or that it is not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = MISSING
    return found


def header(packages: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """A paragraph to print, and the same for JSON."""
    about = {"machine": machine(), "versions": versions(packages)}
    here = about["machine"]
    lines = [
        f"{here['processor']}, {here['cores']} cores, {here['memory_gb']} GB, {here['system']}, "
        f"Python {here['python']}",
        ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
    ]
    return "\n".join(lines) + "\n", about


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes it, if there is a path to write to; what is not a finite number is null."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(finite(result), indent=1, allow_nan=False) + "\n")


def finite(x: Any) -> Any:
    """The same, with None for every infinity and NaN: JSON has neither."""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    if isinstance(x, float) and not abs(x) < float("inf"):
        return None
    return x


def line(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table(heads: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    return "\n".join(map(line, [heads, ["---"] * len(heads), *rows]))

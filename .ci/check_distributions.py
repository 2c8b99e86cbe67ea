"""Checks that the source distribution and the wheel hold the package whole, every file once and nothing else."""

import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath

_NOT_SHIPPED = {"__pycache__"}
# What the package is built with, beside what lies in the tree: the CPU kernels, by the processor that they are for.
_BUILT = {f"selfspec/kernels/built/{variant}.so" for variant in ("v3", "v4", "vnni", "neon", "dotprod")}
_MOST_BYTES = 3_000_000


def package_files(tree: Path) -> dict[str, str]:
    """Where each file of the package lies in the tree, by where it has to lie in the wheel."""
    files = {}
    for folder, shipped_as in (("selfspec", "selfspec"), ("adapters", "selfspec/adapters")):
        for path in (tree / folder).rglob("*"):
            inside = path.relative_to(tree / folder)
            through_link = folder == "selfspec" and inside.parts[0] == "adapters"
            if path.is_file() and path.suffix != ".so" and not through_link and not _NOT_SHIPPED & set(inside.parts):
                files[f"{shipped_as}/{inside.as_posix()}"] = f"{folder}/{inside.as_posix()}"
    return files


def main(tree: Path, dist: Path) -> list[str]:
    """Everything that is wrong, in words."""
    (sdist,) = dist.glob("*.tar.gz")
    (wheel,) = dist.glob("*.whl")
    expected = package_files(tree)
    wrong = []

    with zipfile.ZipFile(wheel) as archive:
        in_wheel = Counter(name for name in archive.namelist() if not name.endswith("/"))
    package = {name for name in in_wheel if ".dist-info" not in PurePosixPath(name).parts[0]}
    wrong += [f"wheel: {name} is there {count} times" for name, count in in_wheel.items() if count > 1]
    wrong += [f"wheel: {name} is missing" for name in sorted(expected.keys() - package)]
    wrong += [f"wheel: {name} does not belong there" for name in sorted(package - expected.keys() - _BUILT)]
    if not package & _BUILT:
        wrong.append("wheel: the CPU kernels are missing")
    if wheel.stat().st_size > _MOST_BYTES:
        wrong.append(f"wheel: {wheel.stat().st_size:,} bytes, more than {_MOST_BYTES:,}")
    if not any(name.endswith("/licenses/LICENSE") for name in in_wheel):
        wrong.append("wheel: the licence is missing")

    with tarfile.open(sdist) as archive:
        in_sdist = Counter(name.split("/", 1)[1] for name in archive.getnames() if "/" in name)
    wrong += [f"source distribution: {name} is there {count} times" for name, count in in_sdist.items() if count > 1]
    wrong += [f"source distribution: {name} is missing" for name in sorted(set(expected.values()) - in_sdist.keys())]
    wrong += [
        f"source distribution: {name} is a second copy of {expected[name]}"
        for name in sorted(expected.keys() & in_sdist.keys())
        if expected[name] != name
    ]
    if not wrong:
        print(f"{wheel.name}: {len(package)} files of the package, each once; {sdist.name} holds them too")
    return wrong


if __name__ == "__main__":
    faults = main(Path(sys.argv[1]), Path(sys.argv[2]))
    print(*faults, sep="\n", end="\n" if faults else "")
    sys.exit(bool(faults))

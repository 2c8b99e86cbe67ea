"""Says which packages there are, and builds the CPU kernels: those under selfspec/, and adapters/ as selfspec.adapters.

Everything else is in pyproject.toml. `selfspec/adapters` is a link to `adapters/` for type checkers and for runs
without an install; it is left out of the search, because a source distribution does not carry it.

The kernels are one library for each kind of processor, without torch or Python in them: the same sources with other
flags. An install compiles the one for its own processor, and a distribution (`SELFSPEC_BUILD=all`) each. Without a
C++ compiler (`CXX`, c++, g++ or clang++) selfspec is installed without them, and `selfspec doctor` says so.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("selfspec/kernels")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-s")
STATIC = ("-static-libstdc++", "-static-libgcc") if sys.platform == "linux" else ()
# The compiler's generic tuning makes a pass over 32 rows a seventh slower on AMD; this one is as fast as tuning for it.
TUNED = "-mtune=icelake-server"
VARIANTS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "v3": ["-march=x86-64-v3", TUNED],
        "v4": ["-march=x86-64-v4", TUNED],
        "vnni": ["-march=x86-64-v4", "-mavx512vnni", TUNED],
    },
    "aarch64": {"neon": [], "dotprod": ["-march=armv8.2-a+dotprod"]},
    "arm64": {"dotprod": []},
}
"""The best last."""


class Build(build_py):
    """Copies the modules, and builds the kernels beside them."""

    def run(self) -> None:
        super().run()
        # Windows calls its machines otherwise.
        variants = VARIANTS.get(platform.machine(), {})
        named = (os.environ.get("CXX"), "c++", "g++", "clang++")
        compiler = next((found for name in named if name and (found := shutil.which(name))), None)
        if compiler is None or not variants:
            missing = "there is no C++ compiler (g++ or clang++)"
            why = missing if variants else f"there are none for {platform.machine()}"
            self.warn(f"selfspec is built without CPU kernels: {why}")
            return
        if os.environ.get("SELFSPEC_BUILD") != "all":
            variants = dict(list(runs_here(compiler, variants).items())[-1:])
        folder = (KERNELS if self.editable_mode else Path(self.build_lib, KERNELS)) / "built"
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            built = pool.map(lambda variant: build(compiler, folder, variant[0], variant[1]), variants.items())
        for failure in filter(None, built):
            self.warn(f"selfspec is built without some CPU kernels: {failure}")


class Wheel(bdist_wheel):
    """Names a wheel by its platform alone: the kernels serve every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        built = any(Path(self.bdist_dir, KERNELS, "built").glob("*.so"))
        return "py3", "none", super().get_tag()[2] if built else "any"


class Package(Distribution):
    """Holds machine code."""

    def has_ext_modules(self) -> bool:
        return True


def runs_here(compiler: str, variants: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the variants that need nothing which this processor lacks, by the macros that compilers set for it."""

    def macros(flags: list[str]) -> set[str]:
        command = [compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return {line.split()[1] for line in lines if line.startswith("#define __A")}

    here = macros(["-march=native"])
    # A compiler that cannot tell builds all.
    return {name: flags for name, flags in variants.items() if macros(flags) <= here} or variants


def build(compiler: str, folder: Path, name: str, flags: list[str]) -> str | None:
    """Build one library; return what failed. Moved into place at the end, so that none is left half written."""
    sources = sorted(each for each in KERNELS.iterdir() if each.suffix in (".cpp", ".h"))
    digest = hashlib.sha256(b"\n".join(each.read_bytes() for each in sources)).hexdigest()[:16]
    program = [str(each) for each in sources if each.suffix == ".cpp"]
    half = folder / f".{name}.so"
    added = os.environ.get("CXXFLAGS", "").split()
    command = [compiler, *FLAGS, *STATIC, *flags, *added, f'-DSELFSPEC_SOURCES="{digest}"', *program, "-o", str(half)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"{name}: {done.stderr.strip()[-1000:]}"
    half.replace(folder / f"{name}.so")
    return None


setup(
    packages=[*find_packages(include=["selfspec", "selfspec.*"], exclude=["selfspec.adapters"]), "selfspec.adapters"],
    package_dir={"selfspec.adapters": "adapters"},
    distclass=Package,
    cmdclass={"build_py": Build, "bdist_wheel": Wheel},
)

"""Measures selfspec on an H100 or H200, in named stages that can be stopped and resumed: see README.md here.

python benchmarks/device/run.py --list
python benchmarks/device/run.py pieces waits --to benchmarks/results/device_h200
python benchmarks/device/run.py --to /tmp/miniature --device cpu --miniature
"""

from __future__ import annotations

import sys
from pathlib import Path

# A machine that is lent for half an hour has nothing installed.
_HERE = Path(__file__).resolve()
sys.path[:0] = [str(_HERE.parents[1]), str(_HERE.parents[2])]

from device.kit import main  # noqa: E402
from device.stages import STAGES  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(STAGES))

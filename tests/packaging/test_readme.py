"""README's first lines do what they say: the code runs as printed, and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

from transformers.utils import logging

from helpers.snippets import snippets


def test_the_first_lines_print_what_readme_says() -> None:
    printed = io.StringIO()
    bars = logging.is_progress_bar_enabled()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(snippets("README.md", "python")[0], "README.md", "exec"), {})
    finally:
        if bars:
            logging.enable_progress_bar()
    assert printed.getvalue() == snippets("README.md", "text")[0]


def test_the_demo_is_reached_by_its_name_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, selfspec; assert 'selfspec.measure.embedded' not in sys.modules; "
        "assert (selfspec.demo.checkpoint_folder() / 'config.json').is_file(); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

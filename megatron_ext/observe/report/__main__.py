"""The command: python -m megatron_ext.observe.report RUN [--output FILE]."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.errors import DataError, MegatronExtError
from megatron_ext.observe.run_files import replace_file


def main(words: Sequence[str] | None = None) -> int:
    """Write the page and print where. Returns an exit code of `megatron_ext.errors`."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.observe.report",
        description="Draws a run as one self-contained HTML page, also while the run goes on.",
    )
    parser.add_argument("run", type=Path, help="run folder, for example runs/nano")
    parser.add_argument("--output", type=Path, help="default: report.html in the run folder")
    arguments = parser.parse_args(words)
    try:
        output = write_report(arguments.run, arguments.output)
    except MegatronExtError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(output)
    return 0


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run folder; returns the file.

    Raises:
        DataError: the folder cannot be read, or the file not written.
    """
    # Here, since matplotlib takes a second, which `--help` need not.
    from megatron_ext.observe.report.page import render
    from megatron_ext.observe.report.run_data import read_run

    target = output or run / "report.html"
    page = render(read_run(run))
    try:
        replace_file(target, page.encode())
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror}); use --output") from error
    return target


if __name__ == "__main__":
    sys.exit(main())

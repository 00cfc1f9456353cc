"""Run notebooks from start to end and keep what they show: `make notebooks`."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",  # else it reports on every model it loads
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent / "examples"), os.environ.get("PYTHONPATH")])),
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm, where ipywidgets is not installed
}
_BAR = re.compile(r"\d+%\|.*\[.*\]")


def execute(path: Path, last: str | None = None, timeout: int = 3600) -> Any:
    """The notebook at `path` with its cells run, in an empty folder that goes when it is done.

    Args:
        path: the notebook; it is not written.
        last: code of one more cell, for a test that wants to know what the notebook found.
        timeout: seconds a cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
        ValueError: something other than progress bars was written to standard error.
    """
    notebook = nbformat.read(path, as_version=4)
    if last is not None:
        notebook.cells.append(nbformat.v4.new_code_cell(last))
    with tempfile.TemporaryDirectory() as folder:
        # The kernel sees the folder as its own, so that no path of this machine is shown.
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources=resources,
        )
        client.execute(env=os.environ | QUIET)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_progress(output)]
            for output in cell.outputs:
                if output.get("name") == "stderr":
                    raise ValueError(f"{path.name} writes to standard error: {output.text}")
    return notebook


def _is_progress(output: Any) -> bool:
    """Whether an output is progress bars alone: they are for a screen, not for a page that is read later."""
    return output.get("name") == "stderr" and all(_BAR.search(line) for line in output.text.split("\n") if line.strip())


def main(names: list[str]) -> None:
    """Execute the notebooks of these names, or all of them, and write each where it was."""
    for path in [HERE / f"{name.removesuffix('.ipynb')}.ipynb" for name in names] or sorted(HERE.glob("*.ipynb")):
        print(path.name, flush=True)
        nbformat.write(execute(path), path)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Plot F1 against minutes of training, from the table of docs/scores.md: python docs/curve.py."""

from __future__ import annotations

import re
from pathlib import Path

from ctx_compress_rag.evaluation.plots import new_figure, save

HERE = Path(__file__).parent
ERRORS = {"4x": 0.035, "8x": 0.032, "16x": 0.027, "32x": 0.020}  # of the shipped bundle, on these 150 questions
_ROW = re.compile(r"^\| (\d+) minutes.*?\| (.*) \|$", re.MULTILINE)

if __name__ == "__main__":
    rows = [(int(at), cells.split(" | ")) for at, cells in _ROW.findall((HERE / "scores.md").read_text("utf-8"))]
    axes = (figure := new_figure(6.4, 3.4)).subplots()
    for column, (label, error) in enumerate(ERRORS.items()):
        scores = [float(cells[column]) for _, cells in rows]
        axes.errorbar([at for at, _ in rows], scores, yerr=error, capsize=3, marker="o", label=label)
    axes.set(xlabel="minutes of training, one core", ylabel="answer F1, 150 questions of XQuAD", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, HERE / "curve.png")

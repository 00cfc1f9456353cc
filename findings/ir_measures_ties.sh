#!/usr/bin/env bash
# ir_measures 0.4.3. Guess: passages of one score have one order, whichever the measure, so that the reciprocal rank of
# the first ten is never above that of all. Seen: measures come from several programs, each with its own order of ties.
# In one call, RR puts the last name first (a third), RR@10 the first name (1), and Accuracy what the run names first.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q ir_measures==0.4.3 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import ir_measures
from ir_measures import RR, Accuracy, P

judged = {"question": {"a": 1, "b": 0, "c": 0}}


def scores(names):
    found = ir_measures.calc_aggregate([RR, RR @ 10, P @ 1, Accuracy], judged, {"question": dict.fromkeys(names, 1.0)})
    return {str(measure): round(value, 3) for measure, value in sorted(found.items(), key=str)}


forward, backward = scores("abc"), scores("cba")
print("run a, b, c:", forward)
print("run c, b, a:", backward)
assert forward["RR"] == backward["RR"] == 0.333 and forward["P@1"] == backward["P@1"] == 0
assert forward["RR@10"] == backward["RR@10"] == 1
assert (forward["Accuracy"], backward["Accuracy"]) == (1, 0)
PYTHON
# Output of 2026-11-30:
# run a, b, c: {'Accuracy': 1.0, 'P@1': 0.0, 'RR': 0.333, 'RR@10': 1.0}
# run c, b, a: {'Accuracy': 0.0, 'P@1': 0.0, 'RR': 0.333, 'RR@10': 1.0}

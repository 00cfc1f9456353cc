#!/usr/bin/env bash
# pyarrow 26.0.1, columns of float16, as embeddings and scores are often kept. Guess: what works for float32 works for
# them. Seen: they cannot be sorted, summed, compared, searched for a value or for their least, though they can be
# grouped by, made unique and negated; the error of a cast that loses a fraction says the bits (15872)
# in place of the number (1.5).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyarrow==26.0.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import pyarrow as pa
import pyarrow.compute as pc

tries = {
    "sort": lambda numbers: pc.sort_indices(numbers),
    "sum": lambda numbers: pc.sum(numbers),
    "mean": lambda numbers: pc.mean(numbers),
    "least": lambda numbers: pc.min_max(numbers),
    "equal": lambda numbers: pc.equal(numbers, numbers),
    "greater": lambda numbers: pc.greater(numbers, numbers),
    "add": lambda numbers: pc.add(numbers, numbers),
    "is_in": lambda numbers: pc.is_in(numbers, numbers),
    "unique": lambda numbers: numbers.unique(),
    "negate": lambda numbers: pc.negate(numbers),
    "is_nan": lambda numbers: pc.is_nan(numbers),
    "group": lambda numbers: pa.table({"key": numbers}).group_by("key").aggregate([]),
}


def works(name, kind):
    try:
        tries[name](pa.array([1.5, 2, 1.5], kind))
    except pa.ArrowNotImplementedError:
        return False
    return True


assert all(works(name, pa.float32()) for name in tries)
seen = {name: works(name, pa.float16()) for name in tries}
try:
    said = pa.array([1.5], pa.float16()).cast(pa.int32())
except pa.ArrowInvalid as error:
    said = str(error)
print("float16 works:", *(name for name, able in seen.items() if able))
print("float16 fails:", *(name for name, able in seen.items() if not able))
print("1.5 to a whole number:", said)
assert [name for name, able in seen.items() if able] == ["unique", "negate", "is_nan", "group"]
assert "15872" in said
PYTHON
# Output of 2026-11-30:
# float16 works: unique negate is_nan group
# float16 fails: sort sum mean least equal greater add is_in
# 1.5 to a whole number: Float value 15872 was truncated converting to int32

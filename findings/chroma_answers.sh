#!/usr/bin/env bash
# chromadb 1.5.9. Guesses: the count of a deletion is of records that were there; a number that the store cannot hold is
# refused; a whole number and its float match in lists as elsewhere; a search among given ids passes over those that are
# not there, as `get` does. Seen: deleting two unknown ids says 2; NaN and infinity are left out, and 2**63 comes
# back as a float; 3.0 finds the field 3 but not the list [3]; the search ends with an InternalError.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q chromadb==1.5.9 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import chromadb
from chromadb.errors import InternalError

records = chromadb.EphemeralClient().create_collection("records", embedding_function=None)
numbers = {"nan": float("nan"), "infinity": float("inf"), "large": 2**63}
records.add(ids=["a", "b"], embeddings=[[1, 0], [0, 1]], metadatas=[numbers, {"field": 3, "list": [3]}])
deleted = records.delete(ids=["unknown", "neither"]), records.count()
[held] = records.get(ids=["a"])["metadatas"]
matches = {
    str(condition): records.get(where=condition)["ids"]
    for condition in ({"field": 3.0}, {"list": {"$contains": 3}}, {"list": {"$contains": 3.0}})
}
got = records.get(ids=["a", "unknown"])["ids"]
try:
    found = records.query(query_embeddings=[[1, 0]], n_results=1, ids=["a", "unknown"])["ids"]
except InternalError as error:
    found = type(error).__name__
print("deleted", *deleted)
print("held", sorted(held.items()))
print("matches", matches)
print("get and query", got, found)
assert deleted == ({"deleted": 2}, 2)
assert held == {"large": 2.0**63} and isinstance(held["large"], float)
assert list(matches.values()) == [["b"], ["b"], []]
assert (got, found) == (["a"], "InternalError")
PYTHON
# Output of 2026-11-30:
# deleted {'deleted': 2} 2
# held [('large', 9.223372036854776e+18)]
# matches {"{'field': 3.0}": ['b'], "{'list': {'$contains': 3}}": ['b'], "{'list': {'$contains': 3.0}}": []}
# get and query ['a'] InternalError

"""Read all vectors of a collection and search it: `python probe.py FOLDER COLLECTION` exits with 0 if both work.

This needs a process of its own, since a damaged index can crash the process that reads it.
"""

import sys

import chromadb

_PAGE = 1000


def main(folder: str, name: str) -> None:
    """Raise or crash if the index is damaged."""
    collection = chromadb.PersistentClient(folder).get_collection(name, embedding_function=None)
    for start in range(0, collection.count(), _PAGE):
        vectors = collection.get(include=["embeddings"], limit=_PAGE, offset=start)["embeddings"]
        assert vectors is not None
        collection.query(query_embeddings=vectors[:1], n_results=10, include=["distances"])


if __name__ == "__main__":
    main(*sys.argv[1:])

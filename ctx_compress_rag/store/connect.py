"""Find the place of a store, and the name of its collection."""

from __future__ import annotations

import os
import re
from pathlib import Path

import chromadb
from chromadb.api import ClientAPI

from ctx_compress_rag.errors import ConfigError, StoreError
from ctx_compress_rag.store.chroma_internals import chroma_client, chroma_settings
from ctx_compress_rag.store.place import StoreFolder, StorePlace, StoreServer

Location = str | os.PathLike[str] | ClientAPI | chromadb.Collection
_LONGEST = 512
_NAME = re.compile(rf"[a-zA-Z0-9][a-zA-Z0-9._-]{{1,{_LONGEST - 2}}}[a-zA-Z0-9]")  # Chroma's rule


def connect_store(location: Location | StorePlace) -> StorePlace:
    """Return the place that a path, a Chroma client or a collection stands for. A client of a folder gives the folder.

    Nothing is created. Raises ConfigError for anything else, such as an asynchronous client, StoreError for a file.
    """
    if isinstance(location, StorePlace):
        return location
    if isinstance(location, ClientAPI | chromadb.Collection):
        settings = chroma_settings(location)
        if settings.is_persistent and not settings.chroma_server_host:
            return StoreFolder(Path(settings.persist_directory), location.tenant, location.database)
        return StoreServer(chroma_client(location) if isinstance(location, chromadb.Collection) else location)
    if not isinstance(location, str | os.PathLike):
        raise ConfigError(
            f"cannot keep a store in {type(location).__name__}: give a folder, a chromadb client (HttpClient, "
            "PersistentClient, EphemeralClient) or a collection; asynchronous ones are not supported"
        )
    path = os.fspath(location)
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        raise StoreError(f"a store needs a folder, and {path!r} is not one")
    check_store_folder_name(path)
    return StoreFolder(Path(path))


def companion_collection(location: object, collection: str) -> str:
    """Add `-ctx` to the name of `location`, if a collection, else to `collection`. Raise ConfigError for a bad name."""
    if isinstance(location, chromadb.Collection):
        check_app_collection(location)
        collection = location.name
    if not isinstance(collection, str) or not _NAME.fullmatch(name := f"{collection}-ctx"):
        raise ConfigError(
            f"collection={collection!r}: give a name of at most {_LONGEST - len('-ctx')} letters, digits, '.', '_' and "
            "'-' that starts with a letter or digit; to give a collection itself, use it as the location"
        )
    return name


def check_app_collection(collection: chromadb.Collection) -> None:
    """Raise ConfigError if a collection holds soft contexts, so that it is not the app's own."""
    if "ctx_format" in (collection.metadata or {}):
        raise ConfigError(f"{collection.name!r} holds soft contexts itself: give the app's own collection")


def check_store_folder_name(folder: str) -> None:
    """Raise StoreError for a folder whose name is not UTF-8, because Chroma cannot open it."""
    try:
        folder.encode()
    except UnicodeEncodeError:
        raise StoreError(f"Chroma cannot use {folder!r}, whose name is not UTF-8: rename it, or give another") from None

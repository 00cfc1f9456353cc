"""From what the caller names (a path, a client, a collection) to a Chroma client."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import chromadb
from chromadb.api import ClientAPI
from chromadb.api.client import Client
from chromadb.errors import ChromaError

from ctx_compress_rag.errors import ConfigError, StoreError

Location = str | os.PathLike[str] | ClientAPI | chromadb.Collection


@dataclass(frozen=True)
class Connection:
    """A Chroma client and what is known of it.

    Attributes:
        client: the client.
        companion: name of the collection that holds the soft contexts.
        folder: where an embedded client keeps its files; None for a server or memory.
        lasting: whether what is stored outlives the process.
        owned: whether this library opened the client, and hence closes it.
    """

    client: ClientAPI
    companion: str
    folder: Path | None
    lasting: bool
    owned: bool

    @property
    def where(self) -> str:
        """The location, for messages."""
        return str(self.folder) if self.folder else "a Chroma server" if self.lasting else "memory"

    def close(self) -> None:
        """Close the client if this library opened it; Chroma counts who else uses the same engine."""
        if self.owned and isinstance(self.client, Client) and hasattr(self.client, "close"):  # since chromadb 1.5.2
            self.client.close()


def connect(location: Location, collection: str) -> Connection:
    """Open a location. The companion of collection `x` is `x-ctx`, in the same tenant and database.

    Raises:
        ConfigError: the location is no path, (synchronous) client or collection.
        StoreError: Chroma cannot open it.
    """
    if isinstance(location, chromadb.Collection):
        if "ctx_format" in (location.metadata or {}):
            raise ConfigError(f"{location.name!r} holds soft contexts itself: give the collection it stands beside")
        # A collection knows only the server part of its client.
        client = Client.from_system(location._client._system, tenant=location.tenant, database=location.database)
        return _describe(client, location.name, owned=True)
    if isinstance(location, ClientAPI):
        return _describe(location, collection, owned=False)
    if not isinstance(location, str | os.PathLike):
        raise ConfigError(
            f"cannot keep a store in {type(location).__name__}: give a folder, a chromadb client (HttpClient, "
            "PersistentClient, EphemeralClient) or a collection; asynchronous ones are not supported"
        )
    # Chroma shares one engine between clients of the same spelling of a path: leave it as it was given.
    path = os.fspath(location)
    if not path or (Path(path).exists() and not Path(path).is_dir()):
        raise StoreError(f"a store needs a folder, and {path!r} is none")
    try:
        return _describe(chromadb.PersistentClient(path), collection, owned=True)
    except (ChromaError, ValueError) as error:
        raise StoreError(
            f"Chroma cannot open {path} ({error}). If a client with other settings is open on it in this process, "
            "give that client in place of the path"
        ) from error


def _describe(client: ClientAPI, collection: str, *, owned: bool) -> Connection:
    settings = client.get_settings()
    remote = bool(settings.chroma_server_host)
    folder = Path(settings.persist_directory) if settings.is_persistent and not remote else None
    return Connection(client, f"{collection}-ctx", folder, remote or folder is not None, owned)

"""The store of soft contexts, in a Chroma collection beside the app's own."""

from ctx_compress_rag.store.passage import AddReport, Compresses, Passage, StoredPassage, StoreInfo, SyncReport
from ctx_compress_rag.store.store import SoftContextStore

__all__ = ["AddReport", "Compresses", "Passage", "SoftContextStore", "StoreInfo", "StoredPassage", "SyncReport"]

"""A trained compressor for one decoder."""

from pathlib import Path

SHIPPED = {folder.name: folder for folder in Path(__file__).parent.glob("shipped/*/")}

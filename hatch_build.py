"""What the package's page needs of the repository's address, which is set at release (`make release`)."""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose relative links lead into the repository at a tag; those of pictures, to the bytes."""

    def link(match: re.Match[str]) -> str:
        return f"{match[1]}({repository}/{'raw' if match[1].startswith('!') else 'blob'}/{tag}/{match[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)", link, text)


class ReleaseHook(MetadataHookInterface):
    """Sets `readme` and `urls`. Without an address, links stay relative, as in the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("CTX_COMPRESS_REPOSITORY", "").rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        urls = {"Homepage": "https://pypi.org/project/ctx-compress-rag/"}
        if repository:
            tag = f"v{metadata['version']}"
            text = absolute(text, repository, tag)
            urls = {
                "Homepage": repository,
                "Documentation": f"{repository}/tree/{tag}/docs",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
                "Security": f"{repository}/security/advisories/new",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls

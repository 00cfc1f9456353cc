"""A bundle in a folder, files to index, and what an index holds."""

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import chromadb
import pytest
import torch

from benchmarks.world.world import World
from ctx_compress_rag.store import codec as codecs
from ctx_compress_rag.store.record import passage_id


def save_bundle(bundle: Any, folder: Path, seed: int = 1) -> Path:
    """Save a tiny bundle, its random weights made so large that answers are more than a repeated end token.

    By default they are short.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in bundle.backbone.model.model.layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    bundle.config = bundle.config.model_copy(update={"answer_tokens": 2})
    bundle.save_pretrained(folder)
    return folder


def paragraphs(seed: int) -> list[str]:
    return World("dev", seed).passages()[:5]


def write_docs(folder: Path, files: int = 3) -> Path:
    """A folder of `files` text files in two folders."""
    (folder / "more").mkdir(parents=True)
    for number in range(files):
        path = folder / ("more" if number % 2 else ".") / f"file{number}.txt"
        path.write_text("\n\n".join(paragraphs(number)), encoding="utf-8")
    return folder


def write_documents(folder: Path, word: str) -> None:
    """A sentence as HTML, as a Word document and as PDF, each in as little as makes one."""
    page = f"<html><body><h1>Guide</h1><script>x</script><p>The {word} page.</p></body></html>"
    (folder / "page.html").write_text(page)
    write_docx(folder / "letter.docx", f"<w:p><w:r><w:t>The {word} letter.</w:t></w:r></w:p>")
    write_pdf(folder / "report.pdf", f"BT /F1 12 Tf 72 720 Td (The {word} report.) Tj ET".encode())


def write_docx(path: Path, body: str, **more: str) -> None:
    """A Word document of a body's XML, and of more parts, such as `comments`."""
    main = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    related = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
    package = "http://schemas.openxmlformats.org/package/2006"
    words = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types">'
        f'<Override PartName="/word/document.xml" ContentType="{main}"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships">'
        f'<Relationship Id="r1" Type="{related}" Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{words}"><w:body>{body}</w:body></w:document>',
    } | {f"word/{name}.xml": f'<w:r xmlns:w="{words}">{content}</w:r>' for name, content in more.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as docx:
        for name, content in parts.items():
            docx.writestr(name, content)


def write_pdf(
    path: Path,
    drawn: bytes,
    about: str = "",
    font: str = "/Type1 /BaseFont /Helvetica",
    trailer: str = "",
    form: str = "",
) -> None:
    """A PDF of one page that draws so, with these entries for its stream, its font, at its end and in its form."""
    resources = f"<< /Font << /F1 << /Type /Font /Subtype {font} >> >> >>"
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R /AcroForm << {form} >> >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources {resources} >>",
        f"<< /Length {len(drawn)} {about} >>\nstream\n{drawn.decode('latin-1')}\nendstream",
    ]
    body = "".join(f"{number} 0 obj\n{each}\nendobj\n" for number, each in enumerate(objects, 1))
    path.write_bytes(f"%PDF-1.4\n{body}trailer << /Root 1 0 R /Size 5 {trailer} >>\n%%EOF\n".encode("latin-1"))


def without_rights() -> tuple[str, ...]:
    """What precedes a command that permissions hold for: root may read and write anywhere, unless it gives that up."""
    if os.geteuid():
        return ()
    if not shutil.which("setpriv"):
        pytest.skip("needs setpriv, or another user than root")
    return ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


def contents(store: Path) -> dict[str, tuple[Any, ...]]:
    """Everything an index holds, by id, straight from Chroma."""
    client: Any = chromadb.PersistentClient(str(store))
    try:
        rag = client.get_collection("passages").get(include=["documents", "metadatas", "embeddings"])
        soft = client.get_collection("passages-ctx").get(include=["metadatas"])
    finally:
        client.close()
    records = {passage_id(id): dict(record) for id, record in zip(soft["ids"], soft["metadatas"], strict=True)}
    assert sorted(rag["ids"]) == sorted(records)
    return {
        id: (text, metadata, torch.tensor(vector), codecs.decode_soft_context(records[id].pop("payload")), records[id])
        for id, text, metadata, vector in zip(
            rag["ids"], rag["documents"], rag["metadatas"], rag["embeddings"], strict=True
        )
    }

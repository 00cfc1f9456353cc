"""Text that is not UTF-8."""

from codecs import BOM_UTF16_BE, BOM_UTF16_LE


def conversion(error: UnicodeDecodeError) -> str:
    """The command that converts what could not be read to UTF-8, for messages."""
    coding = "UTF-16" if error.object[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "LATIN1"
    return f"iconv -f {coding} -t UTF-8"

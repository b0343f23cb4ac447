"""The operator's list of shipped processors that may run: `--allow-processor`.

One digest per line, `sha256:` and 64 hexadecimal digits. Blank lines are ignored, as is text after a `#`.
"""

from __future__ import annotations

from pathlib import Path

from logitship.client.serialization.processor_string import DIGEST_PATTERN


def read_allowed_digests(path: str) -> frozenset[str]:
    """Read the digests in a file. An empty file allows no processor.

    Raises:
        ValueError: the file cannot be read, or a line is not a digest; names the file and the line.
    """
    return read_digests(path, "allow_processor")


def read_digests(path: str, setting: str) -> frozenset[str]:
    """Read the digests in a file.

    Args:
        path: the file.
        setting: the setting that names it, for error messages.

    Raises:
        ValueError: the file cannot be read, or a line is not a digest; names the file and the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{setting}: {path} cannot be read: {error}") from None
    digests = set()
    for number, line in enumerate(lines, 1):
        digest = line.partition("#")[0].strip()
        if digest and not DIGEST_PATTERN.fullmatch(digest):
            raise ValueError(
                f"{setting}: {path}, line {number}: {digest[:80]!r} is not 'sha256:' and 64 hexadecimal digits "
                "(lower case)"
            )
        digests.add(digest)
    return frozenset(digests - {""})

"""Files of Debian packages, out of `.deb` archives or out of the installed system.

A `.deb` is an `ar` archive whose member `data.tar.*` holds the files. Reading it here rather than
with `dpkg` lets the corpus be built as an ordinary user and on any distribution.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from libs.errors import BadInput

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER_BYTES = 60


def read_package(name: str, debs: Path | None, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """The files of package `name` whose absolute path is `wanted`, by path.

    `name` may be a glob (`python3*-doc`). With `debs` the newest matching archive in that folder is
    read; without, the installed files according to `dpkg`'s own lists. Raises `BadInput` naming
    the package when it is in neither place.
    """
    if debs is not None:
        files = _from_archive(_find_archive(name, debs), wanted)
    else:
        files = _from_installed(name, wanted)
    if not files:
        raise BadInput(f"package {name} holds none of the expected files", field=name)
    return files


def _find_archive(name: str, debs: Path) -> Path:
    archives = sorted(debs.glob(f"{name}_*.deb"))
    if not archives:
        raise BadInput(
            f"no archive {name}_*.deb in {debs}; fetch it with: apt-get download {name}", field=name
        )
    return archives[-1]


def _from_archive(archive: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    for member, payload in _ar_members(archive):
        if member.startswith("data.tar"):
            return _tar_files(archive, payload, wanted)
    raise BadInput(f"{archive} has no data.tar member", field=archive.name)


def _tar_files(archive: Path, payload: bytes, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(payload), mode="r:*") as tar:
            for info in tar:
                path = info.name.removeprefix(".")
                if info.isfile() and wanted(path):
                    content = tar.extractfile(info)
                    assert content is not None, path
                    files[path] = content.read()
    except tarfile.TarError as error:
        message = f"{archive} is packed in a way this Python cannot read: {error}"
        raise BadInput(message, field=archive.name) from error
    return files


def _ar_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    data = archive.read_bytes()
    if not data.startswith(_AR_MAGIC):
        raise BadInput(f"{archive} is not a Debian archive", field=archive.name)
    at = len(_AR_MAGIC)
    while at + _AR_HEADER_BYTES <= len(data):
        header = data[at : at + _AR_HEADER_BYTES]
        size = _ar_size(archive, header)
        at += _AR_HEADER_BYTES
        yield header[:16].decode("ascii", "replace").strip().rstrip("/"), data[at : at + size]
        at += size + size % 2  # members start at even offsets


def _ar_size(archive: Path, header: bytes) -> int:
    digits = header[48:58].strip()
    if not digits.isdigit():
        raise BadInput(f"{archive} is damaged: member size {digits!r}", field=archive.name)
    return int(digits)


def _from_installed(name: str, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    lists = sorted(Path("/var/lib/dpkg/info").glob(f"{name}.list"))
    if not lists:
        raise BadInput(
            f"package {name} is not installed; apt-get install it, or pass --debs", field=name
        )
    paths = (Path(line) for line in lists[-1].read_text().splitlines() if wanted(line))
    return {str(path): path.read_bytes() for path in paths if path.is_file()}

"""Lists the layers of an image: unpacked, and as registries keep them.

    python3 deploy/image/layers.py IMAGE [BEFORE] [--below MB]

With another image, BEFORE, only the layers that it lacks are compressed and counted: what a node
that has BEFORE downloads for IMAGE.  With --below the exit code is 1 if that is more.
ENGINE is podman or docker: the first that is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from dataclasses import dataclass
from typing import IO

CHUNK = 1 << 20
MB = 1e6


@dataclass(frozen=True)
class Blob:
    """A file of a saved image."""

    size: int  # bytes, unpacked
    compressed: int  # bytes with gzip; 0 if it was not measured
    text: bytes  # all of it, if it is small


def engine() -> str:
    found = [name for name in (os.environ.get("ENGINE", ""), "podman", "docker") if name]
    for name in found:
        if shutil.which(name):
            return name
    raise SystemExit("neither podman nor docker is installed")


def diff_ids(image: str) -> list[str]:
    """The digests of an image's layers, unpacked, from the lowest to the highest."""
    ran = subprocess.run(
        [engine(), "image", "inspect", image, "--format", "{{json .RootFS.Layers}}"],
        capture_output=True,
        text=True,
    )
    if ran.returncode != 0:
        raise SystemExit(ran.stderr.strip())
    return json.loads(ran.stdout)


def read(file: IO[bytes], compress: bool) -> tuple[str, Blob]:
    """The digest of a file of an archive, unpacked, and its sizes."""
    digest, packer = hashlib.sha256(), zlib.compressobj(6, wbits=31)
    unpacker, size, compressed, text = None, 0, 0, b""
    first = True
    while chunk := file.read(CHUNK):
        if first and chunk[:2] == b"\x1f\x8b":
            unpacker = zlib.decompressobj(wbits=31)
        first = False
        if unpacker:
            compressed += len(chunk)
            chunk = unpacker.decompress(chunk)
        elif compress:
            compressed += len(packer.compress(chunk))
        digest.update(chunk)
        size += len(chunk)
        text = text + chunk if size < CHUNK else b""
    if compress and not unpacker:
        compressed += len(packer.flush())
    return "sha256:" + digest.hexdigest(), Blob(size, compressed, text)


def blobs(image: str, known: set[str]) -> dict[str, Blob]:
    """All files of an image by digest; those that are named by a digest of `known` are not read."""
    found: dict[str, Blob] = {}
    names = {digest.removeprefix("sha256:") for digest in known}
    with subprocess.Popen([engine(), "save", image], stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        with tarfile.open(fileobj=saving.stdout, mode="r|") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                named = next((name for name in names if name in member.name), None)
                if file is None:
                    continue
                if named:
                    found[f"sha256:{named}"] = Blob(member.size, 0, b"")
                else:
                    digest, blob = read(file, compress=member.size > CHUNK // 16)
                    found[digest] = blob
    if saving.returncode != 0:
        raise SystemExit(f"{engine()} save {image} failed")
    return found


def steps(found: dict[str, Blob], layers: list[str]) -> list[str]:
    """What made each layer, as the configuration of the image says."""
    for blob in found.values():
        if blob.text.startswith(b"{") and b'"rootfs"' in blob.text:
            config = json.loads(blob.text)
            if config["rootfs"]["diff_ids"] == layers:
                made = [s for s in config.get("history", []) if not s.get("empty_layer")]
                return [" ".join(step.get("created_by", "").split()) for step in made]
    return ["" for _ in layers]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image")
    parser.add_argument("before", nargs="?")
    parser.add_argument("--below", type=float, metavar="MB", help="largest download that passes")
    args = parser.parse_args()
    layers = diff_ids(args.image)
    known = set(diff_ids(args.before)) if args.before else set()
    found = blobs(args.image, known)
    moved = 0
    print(f"{'unpacked':>10} {'gzip':>10}  MB; made by")
    for layer, step in zip(layers, steps(found, layers), strict=True):
        blob = found[layer]
        compressed = blob.compressed or blob.size
        moved += 0 if layer in known else compressed
        shown = "known" if layer in known else f"{compressed / MB:.2f}"
        print(f"{blob.size / MB:10.2f} {shown:>10}  {step.removeprefix('/bin/sh -c ')[:80]}")
    print(f"{sum(found[layer].size for layer in layers) / MB:10.2f} {moved / MB:10.2f}  together")
    if args.below is not None and moved > args.below * MB:
        print(f"more than {args.below:g} MB")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

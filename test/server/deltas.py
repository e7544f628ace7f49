"""What a trainer's disk transport writes, made independently of the server: versions as whole checkpoints or as
deltas.  Bytes only; no dtype is known here."""
import json
import os
import shutil
import zlib

import numpy as np
import xxhash
import zstandard

INDEX = "model.safetensors.index.json"
SUMS = {"xxh3-128": lambda b: xxhash.xxh3_128(b).hexdigest(), "adler32": lambda b: f"{zlib.adler32(b):08x}"}


def header_of(path):
    with open(path, "rb") as f:
        n = int.from_bytes(f.read(8), "little")
        return json.loads(f.read(n)), 8 + n


def places(folder):
    """Name -> (file, first byte, bytes) of every tensor."""
    out = {}
    for file in sorted(os.listdir(folder)):
        if not file.endswith(".safetensors"):
            continue
        header, start = header_of(os.path.join(folder, file))
        for name, x in header.items():
            if name != "__metadata__":
                a, b = x["data_offsets"]
                out[name] = (file, start + a, b - a)
    return out


def tensors(folder):
    """Name -> bytes."""
    out = {}
    for name, (file, at, n) in places(folder).items():
        with open(os.path.join(folder, file), "rb") as f:
            f.seek(at)
            out[name] = f.read(n)
    return out


def with_tensors(like, folder, new):
    """A copy of a checkpoint in which some tensors have other bytes."""
    shutil.copytree(like, folder)
    for name, (file, at, n) in places(folder).items():
        if name in new:
            assert len(new[name]) == n
            with open(os.path.join(folder, file), "r+b") as f:
                f.seek(at)
                f.write(new[name])
    return folder


def overwrite(old, new):
    """u4 count, u4 positions, new bytes, of two uint8 arrays."""
    at = np.nonzero(old != new)[0]
    return np.uint32(at.size).tobytes() + at.astype("<u4").tobytes() + new[at].tobytes()


def write(path, data):
    with open(path + ".tmp", "wb") as f:
        f.write(data)
    os.replace(path + ".tmp", path)


class Publisher:
    """Versions under `source`, each against the one before; `base` is version 0.  `ranks` files a version, as the
    ranks of a trainer write them; a rank without a changed tensor writes none."""

    def __init__(self, source, base, encoding="xor", checksum="xxh3-128", ranks=2):
        shutil.rmtree(source, ignore_errors=True)
        os.makedirs(source)
        self.source, self.base, self.encoding, self.checksum, self.ranks = source, base, encoding, checksum, ranks
        self.now, self.version = tensors(base), 0

    def folder(self, version):
        return os.path.join(self.source, f"weight_v{version:06d}")

    def delta(self, new):
        """The next version; `new` has the tensors that may have changed."""
        self.version += 1
        folder = self.folder(self.version)
        os.makedirs(folder)
        shards = [{} for _ in range(self.ranks)]
        for i, (name, data) in enumerate(sorted(new.items())):
            if data == self.now[name]:
                continue
            a, b = np.frombuffer(self.now[name], np.uint8), np.frombuffer(data, np.uint8)
            change = (a ^ b).tobytes() if self.encoding == "xor" else overwrite(a, b)
            shards[i % self.ranks][name] = zstandard.ZstdCompressor(level=1).compress(change), SUMS[self.checksum](data)
            self.now[name] = data
        shards = [s for s in shards if s]
        where = {}
        for i, shard in enumerate(shards):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            header, at = {"__metadata__": {name: digest for name, (_, digest) in shard.items()}}, 0
            for name, (frame, _) in shard.items():
                header[name] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": [at, at + len(frame)]}
                at += len(frame)
                where[name] = file
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            write(os.path.join(folder, file), len(text).to_bytes(8, "little") + text + b"".join(f for f, _ in shard.values()))
        meta = {"version": f"{self.version:06d}", "base_version": f"{self.version - 1:06d}",
                "delta_encoding": self.encoding, "compression_format": "zstd", "checksum_format": self.checksum}
        write(os.path.join(folder, INDEX), json.dumps({"metadata": meta, "weight_map": where}).encode())
        return folder

    def whole(self, folder):
        """The next version is a checkpoint as it is."""
        self.version += 1
        shutil.copytree(folder, self.folder(self.version))
        self.now = tensors(folder)
        return self.folder(self.version)

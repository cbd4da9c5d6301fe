"""Tensors in files, by hand: what the command reads and writes, with nothing but the standard library."""

import json
import math
import random
import struct
from pathlib import Path

FORMATS = {"<f4": "f", "<f2": "e", "<u2": "H", "|b1": "?", "|u1": "B", "|i1": "b", "<i4": "i", "<i8": "q", "<f8": "d", ">f4": "f"}


def count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def elements(values: list, descr: str) -> bytes:
    order = ">" if descr[0] == ">" else "<"
    return struct.pack(f"{order}{len(values)}{FORMATS[descr]}", *values)


def npy(shape: tuple[int, ...], values: list, descr: str = "<f4", fortran: bool = False, version: int = 1) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}"
    length_bytes = 2 if version == 1 else 4
    text += " " * (-(8 + length_bytes + len(text) + 1) % 64) + "\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode() + elements(values, descr)


def read_npy(path: Path) -> tuple[str, tuple[int, ...], list]:
    """descr, shape, values of a file that the command wrote."""
    data = path.read_bytes()
    assert data[:8] == b"\x93NUMPY\x01\x00", data[:8]
    (length,) = struct.unpack("<H", data[8:10])
    assert (10 + length) % 64 == 0, "elements are not aligned"
    header = eval(data[10 : 10 + length], {})  # noqa: S307: our own file
    assert header["fortran_order"] is False
    descr, shape = header["descr"], header["shape"]
    return descr, shape, list(struct.unpack(f"<{count(shape)}{FORMATS[descr]}", data[10 + length :]))


def safetensors(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def read_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    payload = data[8 + length :]
    return {
        name: (entry["dtype"], tuple(entry["shape"]), payload[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def normal(size: int, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(0, 1) for _ in range(size)]


def bf16(value: float) -> int:
    """Bits, rounded to nearest even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def from_e4m3(bits: int) -> float:
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if bits & 128 else magnitude


def e4m3(value: float) -> int:
    """The bits of the nearest code, NaN apart; a tie becomes either."""
    nearest = min(range(127), key=lambda bits: abs(from_e4m3(bits) - abs(value)))
    return nearest | (128 if value < 0 else 0)


def from_bf16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]

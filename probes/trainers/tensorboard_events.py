"""Scalars of a TensorBoard event file, read without the tensorboard package.

A file is a sequence of records: length (8 bytes, little endian), its checksum (4), an `Event`
message, its checksum (4).
Source: tensorflow/core/lib/io/record_writer.h; tensorboard/compat/proto/{event,summary}.proto
(fields by number below).
"""

import struct
from collections.abc import Iterator
from pathlib import Path

EVENT_STEP, EVENT_SUMMARY = 2, 5
SUMMARY_VALUE = 1
VALUE_TAG, VALUE_SIMPLE = 1, 2
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def read_scalars(path: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value of every simple scalar; reading stops at a record that was cut short."""
    scalars: dict[str, dict[int, float]] = {}
    for event in _records(path.read_bytes()):
        step, summaries = 0, []
        for number, value in _fields(event):
            if number == EVENT_STEP and isinstance(value, int):
                step = value
            elif number == EVENT_SUMMARY and isinstance(value, bytes):
                summaries.append(value)
        for tag, scalar in (pair for summary in summaries for pair in _values(summary)):
            scalars.setdefault(tag, {})[step] = scalar
    return scalars


def _records(data: bytes) -> Iterator[bytes]:
    place = 0
    while place + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        if place + 16 + length > len(data):
            return
        yield data[place + 12 : place + 12 + length]
        place += 16 + length


def _values(summary: bytes) -> Iterator[tuple[str, float]]:
    for number, value in _fields(summary):
        if number != SUMMARY_VALUE or not isinstance(value, bytes):
            continue
        found = dict(_fields(value))
        tag, simple = found.get(VALUE_TAG), found.get(VALUE_SIMPLE)
        if isinstance(tag, bytes) and isinstance(simple, bytes):
            yield tag.decode("utf-8", "replace"), struct.unpack("<f", simple)[0]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protocol buffer message; fixed-width values as their bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == BYTES:
            size, place = _varint(message, place)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            return
        yield number, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message):
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, place

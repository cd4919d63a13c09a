"""Box layout of the fragmented MP4 writer, read back field by field."""

import struct

import pytest

from vllm_omni.outputs import mp4_boxes
from vllm_omni.outputs.mp4_boxes import Sample, Track

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

SPS, PPS = b"\x67\x42\xc0\x1e\xaa", b"\x68\xce\x01"
CONTAINERS = {b"moov", b"trak", b"mdia", b"minf", b"dinf", b"stbl", b"mvex", b"moof", b"traf"}


def boxes(data: bytes) -> list[tuple[bytes, bytes]]:
    found = []
    while data:
        size, kind = struct.unpack(">I4s", data[:8])
        assert 8 <= size <= len(data)
        found.append((kind, data[8:size]))
        data = data[size:]
    return found


def flat(data: bytes) -> dict[bytes, bytes]:
    table = {}
    for kind, body in boxes(data):
        table[kind] = body
        if kind in CONTAINERS:
            table |= flat(body)
    return table


def track(sps: bytes = SPS) -> Track:
    return Track(width=832, height=480, timescale=16_000, sps=sps, pps=PPS)


def test_start_codes_of_both_lengths_split_units():
    stream = b"\0\0\0\1\x67ab\0\0\1\x68c\0\0\0\1\x65\0\0\3d"
    assert mp4_boxes.nal_units(stream) == [b"\x67ab", b"\x68c", b"\x65\0\0\3d"]


def test_a_sample_drops_what_the_header_holds_and_knows_a_key_picture():
    annex_b = b"\0\0\0\1\x09\xf0\0\0\0\1" + SPS + b"\0\0\0\1" + PPS + b"\0\0\1\x65IDR"
    key = mp4_boxes.sample(annex_b)
    assert key == Sample(struct.pack(">I", 4) + b"\x65IDR", is_key=True)
    assert not mp4_boxes.sample(b"\0\0\1\x41P").is_key


def test_parameter_sets():
    sets = mp4_boxes.parameter_sets(b"\0\0\0\1" + SPS + b"\0\0\0\1" + PPS + b"\0\0\1\x06sei")
    assert sets == (SPS, PPS)
    with pytest.raises(ValueError, match="needs 7 and 8"):
        mp4_boxes.parameter_sets(b"\0\0\0\1" + PPS)


def test_initialization_segment():
    data = mp4_boxes.initialization(track())
    assert [kind for kind, _ in boxes(data)] == [b"ftyp", b"moov"]
    table = flat(data)
    assert struct.unpack(">I", table[b"mdhd"][12:16]) == (16_000,)
    assert struct.unpack(">II", table[b"tkhd"][-8:]) == (832 << 16, 480 << 16)
    assert {b"mvex", b"trex", b"hdlr", b"vmhd", b"dref"} <= table.keys()
    entry = table[b"stsd"][8:]
    assert entry[4:8] == b"avc1"
    inner = dict(boxes(entry[8 + 78 :]))
    assert inner[b"avcC"][:6] == bytes([1, 0x42, 0xC0, 0x1E, 0xFF, 0xE1])
    assert SPS in inner[b"avcC"]
    assert PPS in inner[b"avcC"]
    assert inner[b"colr"] == b"nclx" + struct.pack(">HHHB", 1, 1, 1, 0)


def test_high_profiles_describe_their_chroma():
    high = b"\x67\x64" + SPS[2:]
    plain, extended = (mp4_boxes.initialization(track(sps)) for sps in (SPS, high))
    assert len(extended) == len(plain) + 4


def test_chunk():
    samples = [Sample(b"key", is_key=True), Sample(b"other!", is_key=False)]
    data = mp4_boxes.chunk(samples, sequence_number=7, decode_time=2**33, duration=1000)
    assert [kind for kind, _ in boxes(data)] == [b"moof", b"mdat"]
    table = flat(data)
    assert struct.unpack(">II", table[b"mfhd"]) == (0, 7)
    assert struct.unpack(">IQ", table[b"tfdt"]) == (1 << 24, 2**33)
    _, count, offset = struct.unpack(">IIi", table[b"trun"][:12])
    assert data[offset : offset + 9] == b"keyother!"
    rows = [struct.unpack_from(">III", table[b"trun"], 12 + 12 * i) for i in range(count)]
    assert rows == [(1000, 3, 0x02000000), (1000, 6, 0x01010000)]


def test_a_chunk_after_thirty_days_keeps_its_time():
    ticks = 30 * 24 * 3600 * 16_000
    data = mp4_boxes.chunk(
        [Sample(b"x", is_key=True)], sequence_number=2_600_000, decode_time=ticks, duration=1000
    )
    version, time = struct.unpack(">B3xQ", flat(data)[b"tfdt"])
    assert ticks > 2**32
    assert (version, time) == (1, ticks)

"""ISO base media boxes of a fragmented H.264 file: one ``ftyp`` + ``moov``, then chunks.

A chunk is one ``moof`` + ``mdat`` with all its samples, so it is complete when it is written;
FFmpeg's muxer would hold the last sample back until the next chunk. Box layouts follow
ISO/IEC 14496-12 (container), 14496-15 (``avc1``, ``avcC``) and the ``nclx`` colour box of the
former. All integers are big-endian.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

TRACK_ID = 1
BT709 = 1
"""Code of BT.709 for primaries, transfer and matrix alike."""

_START_CODE = re.compile(rb"\x00*\x00\x00\x01")
_NAL_SPS, _NAL_PPS, _NAL_DELIMITER = 7, 8, 9
_NAL_IDR = 5
_HIGH_PROFILES = frozenset({100, 110, 122, 144, 244})
_UNITY_MATRIX = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
_UNDETERMINED_LANGUAGE = 0x55C4
_KEY_SAMPLE = 0x02000000
"""Sample flags: depends on no other sample."""
_DEPENDENT_SAMPLE = 0x01010000
"""Sample flags: depends on others, not a synchronisation sample."""
_BASE_IS_MOOF = 0x020000
_RUN_FIELDS = 0x000701
"""``trun`` carries a data offset and each sample's duration, size and flags."""


@dataclass(frozen=True, slots=True)
class Track:
    """The one video track of a file.

    Attributes:
        timescale: ticks per second.
        sps: sequence parameter set of the H.264 stream, without start codes.
        pps: its picture parameter set.
    """

    width: int
    height: int
    timescale: int
    sps: bytes
    pps: bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """One coded picture: length-prefixed NAL units."""

    payload: bytes
    is_key: bool


def nal_units(annex_b: bytes) -> list[bytes]:
    """NAL units of a byte stream with start codes (ITU-T H.264, annex B)."""
    return [unit for unit in _START_CODE.split(annex_b) if unit]


def parameter_sets(extradata: bytes) -> tuple[bytes, bytes]:
    """Sequence and picture parameter set in an encoder's global header.

    Raises:
        ValueError: the header lacks one of them.
    """
    units = {_nal_type(unit): unit for unit in nal_units(extradata)}
    if not {_NAL_SPS, _NAL_PPS} <= units.keys():
        raise ValueError(f"the encoder's header holds NAL types {sorted(units)}, needs 7 and 8")
    return units[_NAL_SPS], units[_NAL_PPS]


def sample(annex_b: bytes) -> Sample:
    """The coded picture of one encoder packet; parameter sets live in the header instead."""
    dropped = {_NAL_SPS, _NAL_PPS, _NAL_DELIMITER}
    units = [unit for unit in nal_units(annex_b) if _nal_type(unit) not in dropped]
    payload = b"".join(struct.pack(">I", len(unit)) + unit for unit in units)
    return Sample(payload, is_key=any(_nal_type(unit) == _NAL_IDR for unit in units))


def initialization(track: Track) -> bytes:
    """``ftyp`` + ``moov`` without samples."""
    brands = b"iso5iso6mp41avc1"
    return _box(b"ftyp", b"iso5", struct.pack(">I", 512), brands) + _box(
        b"moov", _movie_header(track.timescale), _track(track), _movie_extends()
    )


def chunk(
    samples: Sequence[Sample], *, sequence_number: int, decode_time: int, duration: int
) -> bytes:
    """``moof`` + ``mdat`` of consecutive samples.

    Args:
        sequence_number: of the chunk, from 1.
        decode_time: ticks of the first sample since the start of the track.
        duration: ticks of each sample.
    """
    header_bytes = len(_fragment(samples, sequence_number, decode_time, duration, 0))
    data_offset = header_bytes + 8  # past the mdat's own header
    fragment = _fragment(samples, sequence_number, decode_time, duration, data_offset)
    return fragment + _box(b"mdat", *(one.payload for one in samples))


def _fragment(
    samples: Sequence[Sample], sequence_number: int, decode_time: int, duration: int, offset: int
) -> bytes:
    rows = b"".join(
        struct.pack(
            ">III", duration, len(one.payload), _KEY_SAMPLE if one.is_key else _DEPENDENT_SAMPLE
        )
        for one in samples
    )
    run_header = struct.pack(">Ii", len(samples), offset)
    return _box(
        b"moof",
        _full_box(b"mfhd", 0, 0, struct.pack(">I", sequence_number)),
        _box(
            b"traf",
            _full_box(b"tfhd", 0, _BASE_IS_MOOF, struct.pack(">I", TRACK_ID)),
            _full_box(b"tfdt", 1, 0, struct.pack(">Q", decode_time)),
            _full_box(b"trun", 0, _RUN_FIELDS, run_header, rows),
        ),
    )


def _movie_header(timescale: int) -> bytes:
    times = struct.pack(">IIII", 0, 0, timescale, 0)
    rate_and_volume = struct.pack(">IHHII", 0x10000, 0x100, 0, 0, 0)
    next_track = struct.pack(">I", TRACK_ID + 1)
    return _full_box(b"mvhd", 0, 0, times, rate_and_volume, _UNITY_MATRIX, bytes(24), next_track)


def _track(track: Track) -> bytes:
    enabled_in_movie = 3
    identity = struct.pack(">IIIII", 0, 0, TRACK_ID, 0, 0)
    extent = struct.pack(">II", track.width << 16, track.height << 16)
    header = _full_box(b"tkhd", 0, enabled_in_movie, identity, bytes(16), _UNITY_MATRIX, extent)
    media_times = struct.pack(">IIIIHH", 0, 0, track.timescale, 0, _UNDETERMINED_LANGUAGE, 0)
    return _box(
        b"trak",
        header,
        _box(
            b"mdia",
            _full_box(b"mdhd", 0, 0, media_times),
            _full_box(b"hdlr", 0, 0, bytes(4), b"vide", bytes(12), b"video\0"),
            _media_information(track),
        ),
    )


def _media_information(track: Track) -> bytes:
    same_file = 1
    reference = _full_box(b"dref", 0, 0, struct.pack(">I", 1), _full_box(b"url ", 0, same_file))
    return _box(
        b"minf",
        _full_box(b"vmhd", 0, 1, bytes(8)),
        _box(b"dinf", reference),
        _box(
            b"stbl",
            _full_box(b"stsd", 0, 0, struct.pack(">I", 1), _sample_entry(track)),
            _full_box(b"stts", 0, 0, bytes(4)),
            _full_box(b"stsc", 0, 0, bytes(4)),
            _full_box(b"stsz", 0, 0, bytes(8)),
            _full_box(b"stco", 0, 0, bytes(4)),
        ),
    )


def _sample_entry(track: Track) -> bytes:
    extent = struct.pack(">HH", track.width, track.height)
    resolution_72_dpi = struct.pack(">II", 0x480000, 0x480000)
    return _box(
        b"avc1",
        bytes(6),
        struct.pack(">H", 1),  # data reference
        bytes(16),
        extent,
        resolution_72_dpi,
        bytes(4),
        struct.pack(">H", 1),  # frames per sample
        bytes(32),
        struct.pack(">Hh", 24, -1),  # colour without alpha; no colour table
        _decoder_configuration(track.sps, track.pps),
        _box(b"colr", b"nclx", struct.pack(">HHHB", BT709, BT709, BT709, 0)),
    )


def _decoder_configuration(sps: bytes, pps: bytes) -> bytes:
    profile_and_level = sps[1:4]
    four_byte_lengths, one_sps = 0xFF, 0xE1
    tail = b""
    if sps[1] in _HIGH_PROFILES:
        chroma_420, eight_bit, no_extension = 0xFD, 0xF8, 0
        tail = bytes([chroma_420, eight_bit, eight_bit, no_extension])
    return _box(
        b"avcC",
        b"\x01" + profile_and_level + bytes([four_byte_lengths, one_sps]),
        struct.pack(">H", len(sps)) + sps,
        b"\x01" + struct.pack(">H", len(pps)) + pps,
        tail,
    )


def _movie_extends() -> bytes:
    defaults = struct.pack(">IIIII", TRACK_ID, 1, 0, 0, 0)
    return _box(b"mvex", _full_box(b"trex", 0, 0, defaults))


def _nal_type(unit: bytes) -> int:
    return unit[0] & 31


def _box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def _full_box(kind: bytes, version: int, flags: int, *parts: bytes) -> bytes:
    return _box(kind, struct.pack(">I", version << 24 | flags), *parts)

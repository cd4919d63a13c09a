"""Recorded camera paths: what is read, what is refused, and that no path leaks."""

import os
import socket
import traceback

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.golden import golden_dir, requires_golden
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs import safe_files
from vllm_omni.inputs.camera import ROTATION_TOLERANCE, RecordedPath, read_camera

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def path_of(frames=21):
    poses = np.tile(np.eye(4, dtype=np.float32), (frames, 1, 1))
    poses[:, 2, 3] = np.arange(frames)
    return poses, np.tile(np.float32([500, 501, 416, 240]), (frames, 1))


def write(directory, poses=None, intrinsics=None):
    directory.mkdir(parents=True, exist_ok=True)
    default_poses, default_intrinsics = path_of()
    np.save(directory / "poses.npy", default_poses if poses is None else poses)
    np.save(directory / "intrinsics.npy", default_intrinsics if intrinsics is None else intrinsics)
    return directory


def refused(root, match, action_path="walk", num_frames=9):
    """The error text, which names neither the root nor anything above it: clients see it."""
    with pytest.raises(InvalidRequestError, match=match) as caught:
        read_camera(RecordedPath(str(root), action_path, num_frames))
    assert str(root) not in str(caught.value)
    assert caught.value.field.startswith("extra_args.action_path")
    return str(caught.value)


# --- what is read ------------------------------------------------------------------------------


@requires_golden
@pytest.mark.parametrize(("suffix", "frames"), [("", 961), ("_01", 561), ("_02", 957)])
def test_real_recorded_paths_load(tmp_path, suffix, frames):
    inputs = golden_dir() / "inputs"
    poses = np.load(inputs / f"poses{suffix}.npy")
    intrinsics = np.load(inputs / f"intrinsics{suffix}.npy")
    write(tmp_path / "walk", poses, intrinsics)
    camera = read_camera(RecordedPath(str(tmp_path), "walk", 45))
    assert np.array_equal(camera.poses, poses[:45])
    assert np.array_equal(camera.intrinsics, intrinsics[:45])
    whole = read_camera(RecordedPath(str(tmp_path), "walk", frames - (frames - 9) % 12))
    assert len(whole.poses) == frames - (frames - 9) % 12


@pytest.mark.parametrize("dtype", ["<f8", ">f8", ">f4", "<f2", "<i4", "|i1", "<i8"])
def test_every_numeric_type_becomes_float32(tmp_path, dtype):
    poses, intrinsics = path_of(9)
    intrinsics = np.tile([100, 101, 50, 60], (9, 1))
    write(tmp_path / "walk", poses.astype(dtype), intrinsics.astype(dtype))
    camera = read_camera(RecordedPath(str(tmp_path), "walk", 9))
    assert camera.poses.dtype == camera.intrinsics.dtype == np.float32
    assert np.array_equal(camera.poses, poses)


def test_column_order_and_npy_version_2_are_read(tmp_path):
    poses, _ = path_of(21)
    poses[:, 0, 1], poses[:, 1, 0] = 1e-3, -1e-3
    write(tmp_path / "walk", np.asfortranarray(poses))
    with (tmp_path / "walk" / "intrinsics.npy").open("wb") as file:
        np.lib.format.write_array(file, path_of(21)[1], version=(2, 0))
    camera = read_camera(RecordedPath(str(tmp_path), "walk", 21))
    assert np.array_equal(camera.poses, poses)


def test_a_path_may_stand_still_and_may_be_longer_than_needed(tmp_path):
    write(tmp_path / "walk", np.tile(np.eye(4), (21, 1, 1)))
    (tmp_path / "walk" / "notes.txt").write_text("ignored")
    assert read_camera(RecordedPath(str(tmp_path), "walk", 9)).poses.shape == (9, 4, 4)


@pytest.mark.parametrize(
    "action_path", ["a/walk", "a/./walk/", "a/b/../walk", "{root}/a/walk", "{root}/x/../a/walk"]
)
def test_spellings_of_one_directory(tmp_path, action_path):
    write(tmp_path / "a" / "walk")
    name = action_path.format(root=tmp_path)
    assert len(read_camera(RecordedPath(str(tmp_path), name, 9)).poses) == 9


def test_the_root_itself_may_hold_the_files_and_may_be_a_link(tmp_path):
    write(tmp_path / "real")
    (tmp_path / "root").symlink_to(tmp_path / "real")
    assert len(read_camera(RecordedPath(str(tmp_path / "root"), ".", 9)).poses) == 9


# --- where it may not lead ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action_path", "match"),
    [
        ("../walk", "leaves the trusted root"),
        ("a/../../walk", "leaves the trusted root"),
        ("/etc", "leaves the trusted root"),
        ("{root}/../outside", "leaves the trusted root"),
        ("{root}evil", "leaves the trusted root"),
        ("~", "not expanded"),
        ("~nobody/walk", "not expanded"),
        ("", "blank"),
        ("  ", "blank"),
        ("wa\0lk", "NUL"),
        ("missing", "directory 'missing': cannot be opened .No such file or directory"),
        ("full/missing/walk", "directory 'full/missing': cannot be opened"),
        ("a\ud800", "not usable"),
        ("x" * 300, "cannot be opened"),
        ("file", "directory 'file': is not a directory"),
    ],
)
def test_paths_that_lead_elsewhere_are_refused(tmp_path, action_path, match):
    root = tmp_path / "root"
    write(tmp_path / "outside")
    write(tmp_path / "rootevil")
    (root / "full").mkdir(parents=True)
    (root / "file").touch()
    refused(root, match, action_path.format(root=root))


@pytest.mark.parametrize("action_path", ["missing", "../walk", "walk"])
def test_the_root_is_named_where_a_traceback_is_seen_and_nowhere_else(tmp_path, action_path):
    root = tmp_path / "root"
    (root / "walk").mkdir(parents=True)  # without the two files
    with pytest.raises(InvalidRequestError) as caught:
        read_camera(RecordedPath(str(root), action_path, 9))
    assert str(root) not in str(caught.value)
    note = f"{action_path!r} was looked up below the trusted root {str(root)!r}"
    assert caught.value.__notes__ == [note]
    assert "".join(traceback.format_exception(caught.value)).rstrip().endswith(note)


def test_links_below_the_root_are_refused(tmp_path):
    root = tmp_path / "root"
    write(root / "walk")
    (root / "link").symlink_to("walk")
    (root / "up").symlink_to(tmp_path)
    refused(root, "symbolic links are not followed", "link")
    refused(root, "symbolic links are not followed", "up/root/walk")
    (root / "walk" / "poses.npy").rename(root / "poses.npy")
    (root / "walk" / "poses.npy").symlink_to("../poses.npy")
    assert "poses.npy" in refused(root, "symbolic links are not followed")


def test_pipes_sockets_and_directories_are_not_files(tmp_path, monkeypatch):
    walk = write(tmp_path / "walk")
    poses = walk / "poses.npy"
    poses.unlink()
    os.mkfifo(poses)
    refused(tmp_path, "poses.npy: is not a regular file")  # at once: it does not wait for a writer
    poses.unlink()
    poses.mkdir()
    refused(tmp_path, "poses.npy: is not a regular file")
    poses.rmdir()
    monkeypatch.chdir(walk)  # socket names are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("poses.npy")
        refused(tmp_path, "poses.npy: is not a regular file")


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_an_entry_replaced_between_look_and_open_is_refused(tmp_path, monkeypatch, kind):
    root = tmp_path / "root"
    write(root / "walk")
    write(root / "other")
    victim = "walk" if kind == "directory" else "poses.npy"
    real_open = os.open

    def swap_then_open(name, *args, **kwargs):
        if name == victim:
            monkeypatch.setattr(safe_files.os, "open", real_open)
            base = root if kind == "directory" else root / "walk"
            (base / victim).rename(base / "gone")
            (root / "other" / (victim if kind == "file" else "")).rename(base / victim)
        return real_open(name, *args, **kwargs)

    monkeypatch.setattr(safe_files.os, "open", swap_then_open)
    refused(root, "was replaced while being opened")


def test_no_descriptor_is_left_open(tmp_path):
    write(tmp_path / "a" / "walk")
    before = len(os.listdir("/proc/self/fd"))
    read_camera(RecordedPath(str(tmp_path), "a/walk", 9))
    refused(tmp_path, "needs at least as many", "a/walk", num_frames=33)
    refused(tmp_path, "cannot be opened", "a/missing")
    assert len(os.listdir("/proc/self/fd")) == before


# --- what the files may not hold ---------------------------------------------------------------


def test_missing_files_are_named(tmp_path):
    (write(tmp_path / "walk") / "intrinsics.npy").unlink()
    refused(tmp_path, "intrinsics.npy: cannot be opened")
    (tmp_path / "walk" / "poses.npy").unlink()
    refused(tmp_path, "poses.npy: cannot be opened")


def test_too_few_frames_give_both_numbers(tmp_path):
    write(tmp_path / "walk")
    refused(tmp_path, "has 21 frames, num_frames 33", num_frames=33)
    poses, _ = path_of(20)
    write(tmp_path / "walk", poses)
    refused(tmp_path, "poses.npy has 20 frames, intrinsics.npy 21")


@pytest.mark.parametrize(
    ("poses", "match"),
    [
        (np.zeros((0, 4, 4)), "needs 1 to 4096 frames, got 0"),
        (np.zeros((4097, 4, 4), np.int8), "needs 1 to 4096 frames, got 4097"),
        (np.zeros((21, 3, 4)), r"needs shape \[frames, 4, 4\], got \[21, 3, 4\]"),
        (np.zeros((21, 16)), r"got \[21, 16\]"),
        (np.float32(1), r"got \[\]"),
        (np.zeros((21, 4, 4), np.longdouble), "type '<f16'"),
        (np.zeros((21, 4, 4), np.complex64), "type '<c8'"),
        (np.zeros((21, 4, 4), bool), "type '|b1'"),
        (np.zeros((21, 4, 4), "U3"), "type '<U3'"),
        (np.zeros((21, 4, 4), [("x", "f4")]), r"type \[\('x', '<f4'\)\]"),
    ],
)
def test_arrays_of_another_kind_are_refused(tmp_path, poses, match):
    write(tmp_path / "walk", poses)
    assert "poses.npy" in refused(tmp_path, match)


def test_objects_are_refused_without_unpickling(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "unpickled"),)

    write(tmp_path / "walk", np.array([Bomb()], dtype=object))
    refused(tmp_path, "needs plain numbers of at most 8 bytes")
    assert not (tmp_path / "unpickled").exists()


def bad_pose(kind):
    poses, _ = path_of()
    match kind:
        case "nan":
            poses[7, 1, 1] = np.nan
        case "inf":
            poses[7, 0, 3] = np.inf
        case "huge":
            poses[7, 0, 3] = 1e20
        case "scaled":
            poses[7, :3, :3] *= 1 + 0.6 * ROTATION_TOLERANCE
        case "reflected":
            poses[7, 0, 0] = -1
        case "last_row":
            poses[7, 3] = [0, 0, 1e-3, 1]
        case "homogeneous":
            poses[7, 3, 3] = 2
    return poses


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("nan", "poses.npy: frame 7 holds NaN or infinity"),
        ("inf", "poses.npy: frame 7 holds NaN or infinity"),
        ("huge", r"poses.npy: frame 7 needs numbers within \+-1e\+12"),
        ("scaled", "frame 7 needs a rotation orthonormal within 0.01, got 0.012"),
        ("reflected", "frame 7 needs a rotation orthonormal within 0.01, got a reflection"),
        ("last_row", "frame 7 needs 0 0 0 1 as its last row"),
        ("homogeneous", "frame 7 needs 0 0 0 1 as its last row"),
    ],
)
def test_bad_poses_name_their_frame(tmp_path, kind, match):
    write(tmp_path / "walk", bad_pose(kind))
    refused(tmp_path, match)


def test_rotations_within_the_tolerance_are_accepted(tmp_path):
    poses, _ = path_of()
    poses[7, :3, :3] *= 1 + 0.4 * ROTATION_TOLERANCE
    write(tmp_path / "walk", poses)
    assert len(read_camera(RecordedPath(str(tmp_path), "walk", 9)).poses) == 9


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ([np.nan, 1, 1, 1], "intrinsics.npy: frame 3 holds NaN"),
        ([0, 500, 416, 240], "intrinsics.npy: frame 3 needs positive fx and fy"),
        ([500, -1, 416, 240], "intrinsics.npy: frame 3 needs positive fx and fy"),
        ([1e-60, 500, 416, 240], "intrinsics.npy: frame 3 needs positive fx and fy"),
        ([500, 500, 1e300, 240], "intrinsics.npy: frame 3 needs numbers within"),
    ],
)
def test_bad_intrinsics_name_their_frame(tmp_path, row, match):
    _, intrinsics = path_of()
    intrinsics = intrinsics.astype(np.float64)
    intrinsics[3] = row
    write(tmp_path / "walk", intrinsics=intrinsics)
    refused(tmp_path, match)


# --- headers -----------------------------------------------------------------------------------


def npy(header, data=b"", version=(1, 0), length=None):
    text = header.encode("latin1")
    size = 2 if version[0] == 1 else 4
    return (
        b"\x93NUMPY"
        + bytes(version)
        + (len(text) if length is None else length).to_bytes(size, "little")
        + text
        + data
    )


HEADER = "{{'descr': {!r}, 'fortran_order': False, 'shape': {}}}"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is not an NPY file"),
        (b"PK\x03\x04zipped....", "is not an NPY file"),
        (npy("", version=(3, 0)), "NPY version 3.0"),
        (npy("", length=0), "header of 0 bytes"),
        (npy("", length=60000), "header of 60000 bytes; at most 4096"),
        (npy("", version=(2, 0), length=2**32 - 1), "header of 4294967295 bytes"),
        (npy("{'descr'", length=118), "ends inside its NPY header"),
        (npy("{'descr': '<f4'"), "unreadable NPY header"),
        (npy("-" * 4000 + "1"), "unreadable NPY header"),
        (npy("(" * 150 + "1"), "unreadable NPY header"),
        (npy("__import__('os').getcwd()"), "unreadable NPY header"),
        (npy("{'descr': '<f4'}"), "incomplete NPY header"),
        (npy("{'descr': '<f4', 'fortran_order': 0, 'shape': (9, 4, 4)}"), "incomplete"),
        (npy(HEADER.format("<f4", "[9, 4, 4]")), "incomplete"),
        (npy(HEADER.format("<f4", "(True, 4, 4)")), "incomplete"),
        (npy(HEADER.format("<f4", "(-1, 4, 4)")), "incomplete"),
        (npy(HEADER.format("<f4", f"({10**15}, 4, 4)")), f"1 to 4096 frames, got {10**15}"),
        (npy(HEADER.format("<f4", "(9, 4, 4)"), b"1234"), "4 bytes of data.*needs 576"),
        (npy(HEADER.format("<f4", "(1, 4, 4)"), bytes(65)), "65 bytes of data.*needs 64"),
    ],
)
def test_broken_npy_files_are_refused(tmp_path, content, match):
    (write(tmp_path / "walk") / "poses.npy").write_bytes(content)
    assert "poses.npy" in refused(tmp_path, match)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=200), st.integers(0, 140))
def test_any_bytes_load_or_are_refused(tmp_path, junk, position):
    poses = write(tmp_path / "walk") / "poses.npy"
    good = poses.read_bytes()
    poses.write_bytes(good[:position] + junk + good[position + len(junk) :])
    try:
        camera = read_camera(RecordedPath(str(tmp_path), "walk", 9))
    except InvalidRequestError:
        return
    assert np.isfinite(camera.poses).all()

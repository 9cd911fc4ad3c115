"""Recordings: what went in comes out; a torn end and a full file do no harm."""

from pathlib import Path

import pytest

from chassis.recorder import Recorder, read_frames


def test_frames_come_back_in_order(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    frames = [b"", b"a", b"b" * 100_000]
    for frame in frames:
        recorder.write(frame)
    recorder.close()
    assert list(read_frames(tmp_path / "r")) == frames


def test_a_torn_last_frame_ends_the_reading(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    recorder.write(b"whole")
    recorder.write(b"torn")
    recorder.close()
    data = (tmp_path / "r").read_bytes()
    (tmp_path / "r").write_bytes(data[:-1])
    assert list(read_frames(tmp_path / "r")) == [b"whole"]


def test_a_full_recording_takes_no_more(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r", bytes_max=12)
    recorder.write(b"12345678")
    recorder.write(b"1")
    recorder.close()
    assert list(read_frames(tmp_path / "r")) == [b"12345678"]


def test_garbage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="no frame"):
        list(read_frames(tmp_path / "r"))

"""A library of two lines for tests of how libraries are built."""

from pathlib import Path

ONE = '#include "two.h"\nextern "C" int answer() { return 40 + TWO; }\n'
TWO = "#define TWO 2\n"


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "one.cpp").write_text(ONE)
    (folder / "two.h").write_text(TWO)

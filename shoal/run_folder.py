"""The folder of one running deployment: who has it, and the file that says what runs.

The state is replaced whole, so that whoever reads it while things join and leave sees one or the other.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from shoal.plan import LaunchError

STATE_FILE = "state.json"


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock: IO[str] | None = None

    @property
    def taken(self) -> bool:
        """By us."""
        return self._lock is not None

    def take(self) -> None:
        """Raises LaunchError when another deployment has it, or nobody can."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("w")
        except OSError as error:
            raise LaunchError(f"--run-dir {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            self._lock = None
            raise LaunchError(
                f"another deployment runs in {self.path}: --run-dir says another folder"
            ) from None

    def leave(self) -> None:
        """Nothing runs here any more; does nothing if it was not ours."""
        if self._lock is not None:
            (self.path / STATE_FILE).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def write(self, state: Mapping[str, object]) -> None:
        """What runs, beside this process' id."""
        new = self.path / f"{STATE_FILE}.new"
        new.write_text(json.dumps({**state, "pid": os.getpid()}), encoding="utf-8")
        new.replace(self.path / STATE_FILE)


def secure_of(run_dir: Path) -> Path | None:
    """What `shoal init` wrote, if what runs in this folder uses it. Raises LaunchError."""
    secure = read_state(run_dir).get("secure")
    return Path(str(secure)) if secure else None


def read_state(run_dir: Path) -> dict[str, object]:
    """What runs in this folder. Raises LaunchError when nothing does."""
    try:
        state: dict[str, object] = json.loads((run_dir / STATE_FILE).read_text(encoding="utf-8"))
        os.kill(int(str(state["pid"])), 0)
    except (OSError, ValueError, KeyError):
        raise LaunchError(f"nothing runs in {run_dir}: start it with `shoal up`") from None
    return state

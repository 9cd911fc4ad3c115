"""A client program that may be killed: it notes what it has in a file, and goes on from there when run again.

`python -m tests.e2e.resume_later FILE ADDRESS...`: a JSON line an event, flushed before the next.
"""

import json
import sys
from pathlib import Path

from shoal import Accepted, Client, Delta, Finished, Params


def main(path: Path, addresses: list[str]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    asked = lines[0]
    held = [i for line in lines[1:] for i in line.get("ids", ())]
    with Client(addresses) as client, path.open("a") as notes:
        if request_id := next((line["id"] for line in lines[1:] if "id" in line), None):
            stream = client.resume(request_id, held)
        else:
            stream = client.generate(asked["prompt"], Params(**asked["params"]))
        for event in stream:
            match event:
                case Accepted() if not request_id:
                    said: dict[str, object] = {"id": event.request_id}
                case Delta():
                    said = {"ids": event.ids, "text": event.text, "first": event.first_index}
                case Finished():
                    said = {"end": event.reason}
                case _:
                    continue
            notes.write(json.dumps(said) + "\n")
            notes.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

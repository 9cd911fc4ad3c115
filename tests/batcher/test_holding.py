"""What the terminal record must hold for those who were not there."""

from dataclasses import replace

from batcher import events as e
from chassis.messages.request import Terminal
from tests.batcher.ownership_rig import Rig


def test_the_terminal_record_tells_its_text_without_the_request() -> None:
    """Who resumes after the end finds the record alone; without the stops it would show what was cut."""
    rig = Rig()
    rig.request = replace(rig.request, limits=replace(rig.request.limits, stop=(b"at", b" s")))
    rig.running(10).end(10)
    record = rig.one(e.Append).record
    assert isinstance(record, Terminal)
    assert (record.model, record.stop) == (rig.request.model, (b"at", b" s"))
    assert (record.tenant, record.body_digest) == (rig.request.tenant, rig.request.body_digest)

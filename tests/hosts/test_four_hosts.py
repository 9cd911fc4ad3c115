"""Four hosts: a spare on one takes another's place, and three stages of SmolLM2 say what one process says."""

from pathlib import Path

import pytest

from shard_worker.torch_executor import EngineConfig, TorchExecutor
from tests.hosts.lab import Lab
from tests.hosts.rig import HostsRig, lines_of, until
from tests.shard_worker.driver import Driver, Sequence
from tests.shard_worker.test_smollm2 import prompts, tokenizer_of

pytestmark = pytest.mark.slow

OUTPUT_LEN = 120


def batcher_log(rig: HostsRig) -> str:
    return (rig.folder / "run1" / "logs" / "batcher.log").read_text()


def cut_stage(rig: HostsRig) -> int:
    """The place, among the hosts, of the first stage, which is cut off: until the batcher has noticed."""
    stages = [n for n, host in enumerate(rig.lab.hosts) if n and rig.serves(host)]
    rig.lab.cut(rig.lab.hosts[stages[0]])
    until(lambda: '"pipeline lost"' in batcher_log(rig), lambda: batcher_log(rig))
    return stages[0]


def test_a_spare_on_a_fourth_host_takes_the_place_of_one_that_is_cut_off(four: Lab, tmp_path: Path) -> None:
    """Which stays cut off until all is answered."""
    with HostsRig(four, tmp_path) as rig:
        clients = rig.asking(seed=4, output_len=100)
        clients.wait_for("begun")
        cut = cut_stage(rig)
        assert clients.wait() == 0, clients.said
        assert clients.said.endswith("right\n")
        serving = [n for n, host in enumerate(four.hosts) if n and n != cut and rig.serves(host)]
        assert len(serving) == 2 and batcher_log(rig).count('"pipeline stands"') >= 2
        four.heal()


def test_smollm2_over_four_hosts_says_what_it_says_in_one_process(four: Lab, tmp_path: Path) -> None:
    """Greedy and drawn; the host of a stage is cut off in the middle and comes back."""
    executor = TorchExecutor(EngineConfig("smollm2", num_blocks=64))
    asked = prompts(tokenizer_of(executor))
    known = [Sequence(prompt, OUTPUT_LEN, temperature=float(i % 2), seed=i) for i, prompt in enumerate(asked)]
    Driver([executor], (30,), block_size=16).run(known)
    (tmp_path / "known").write_text(lines_of(known))
    with HostsRig(four, tmp_path, stages=3, model="smollm2") as rig:
        clients = rig.asking_known(tmp_path / "known")
        clients.wait_for("begun")
        cut_stage(rig)
        four.heal()
        assert clients.wait() == 0, clients.said
        assert clients.said.endswith("right\n")

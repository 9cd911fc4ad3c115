"""What the chart becomes with each file of values, and with a few more; rendered once for all tests."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart" / "shoal"
PYTHON = ROOT / ".charts" / "bin" / "python"
KUBERNETES = "1.37"
VALUES = {path.stem.removeprefix("values-"): path for path in sorted(CHART.glob("values-*.yaml"))}
COMPOSE = DEPLOY / "compose"

OPEN: dict[str, Any] = {"gateway": {"insecure": True}}
ODD_NAME = "Qwen/Qwen3 0.6B:q4+x@1_y-z"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"values": OPEN},
    "scaled": {
        "values": {
            **OPEN,
            "config": {"chassis": {"otlp_endpoint": "http://collector.watching:4317", "drain_timeout_s": 90}},
            "pipelines": {
                "main": None,
                "odd": {
                    "model": "/models/odd",
                    "modelName": ODD_NAME,
                    "stages": 3,
                    "spares": 2,
                    "autoscaling": {
                        "enabled": True,
                        "signal": "stream",
                        "min": 0,
                        "max": 6,
                        "requestsPerPipeline": 48,
                    },
                },
                "small": {"model": "smollm2", "modelName": "smollm2", "stages": 1},
            },
        },
    },
    "theirs": {
        "values": {
            **OPEN,
            "nats": {"enabled": False},
            "bus": {
                "url": "nats://a.bus,nats://b.bus:14222",
                "monitor": "a.bus:8222",
                "streamReplicas": 3,
            },
            "networkPolicies": {
                "clients": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
                "bus": [{"ipBlock": {"cidr": "198.51.100.0/24"}}],
            },
        },
    },
    "types": {
        "values": {
            **OPEN,
            "config": {
                "gateway": {"prompt_bytes_max": 1000000, "operators": ["a", "b"], "keepalive_interval_ms": 7},
                "batcher": {
                    "batch_class": False,
                    "batch_share": 0.125,
                    "slowdown_max": 1.5,
                    "max_step_ms": 3,
                    "preferred_batch_size": [4, 8],
                    "tenant_weights": {"acme co.": 2.5, "x": 1},
                    "queue_policies": {"9": {"max_queue_size": 100}},
                },
            },
            "pipelines": {"main": {"config": {"batcher": {"slowdown_max": 0}}}},
        },
    },
    "guarded": {
        "values": {
            "security": {
                "keysSecret": "shoal-keys",
                "gatewayTlsSecret": "shoal-gateway-tls",
                "rpcTlsSecret": "shoal-rpc",
                "natsSecretPrefix": "shoal-nats",
            },
            "pipelines": {"main": {"autoscaling": {"enabled": True, "min": 0, "ttftObjectiveMs": 1500}}},
        },
    },
    "long": {"values": OPEN, "release": "a-release-with-a-name-that-is-as-long-as-helm-allow"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nobody may come in": ({}, "gateway: who may come in?"),
    "a word for a number": ({**OPEN, "gateway": {"replicas": "two", "insecure": True}}, "replicas"),
    "an unknown value": ({**OPEN, "gatway": {}}, "gatway"),
    "an unknown value inside": ({**OPEN, "pipelines": {"main": {"stage": 2}}}, "stage"),
    "no stages": ({**OPEN, "pipelines": {"main": {"stages": 0}}}, "stages"),
    "no name of a model": ({**OPEN, "pipelines": {"b": {"model": "/models/x"}}}, "pipelines.b.modelName"),
    "no model": ({**OPEN, "pipelines": {"b": {"modelName": "x"}}}, "pipelines.b.model"),
    "a long name": ({**OPEN, "pipelines": {"a-name-too-long-for-pods": {}}}, "a-name-too-long-for-pods"),
    "no bus": ({**OPEN, "nats": {"enabled": False}}, "bus.url"),
    "two buses": ({**OPEN, "bus": {"url": "nats://x:4222"}}, "bus.url"),
    "a bus that is no url": ({**OPEN, "nats": {"enabled": False}, "bus": {"url": "x:4222"}}, "url"),
    "no monitor": (
        {
            **OPEN,
            "nats": {"enabled": False},
            "bus": {"url": "nats://x:4222"},
            "pipelines": {"main": {"autoscaling": {"enabled": True, "signal": "stream"}}},
        },
        "bus.monitor",
    ),
    "bounds the wrong way": (
        {**OPEN, "pipelines": {"main": {"autoscaling": {"enabled": True, "min": 5, "max": 2}}}},
        "min 5 is above max 2",
    ),
    "standbys that would grow": (
        {**OPEN, "pipelines": {"main": {"standbys": 1, "autoscaling": {"enabled": True}}}},
        "pipelines.main.standbys",
    ),
    "two replicas of streams": ({**OPEN, "bus": {"streamReplicas": 2}}, "streamReplicas"),
    "a size that is none": ({**OPEN, "kvstore": {"storage": {"size": "big"}}}, "size"),
    "certificates without a certificate": ({**OPEN, "security": {"askClients": True}}, "askClients"),
    "a drain without end": ({**OPEN, "config": {"chassis": {"drain_timeout_s": 0}}}, "drain_timeout_s"),
    "a worker with two devices": ({**OPEN, "pipelines": {"main": {"worker": {"gpus": 2}}}}, "gpus"),
    "a service of no kind": ({**OPEN, "config": {"gatway": {}}}, "gatway"),
}


@cache
def everything() -> Mapping[str, Any]:
    """Needs `.charts`."""
    schemas = {
        path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "schemas").glob("*.json")
    }
    renders: dict[str, Any] = {name: {"files": [str(path)]} for name, path in VALUES.items()}
    renders |= VARIANTS
    renders |= {f"refused: {name}": {"values": values} for name, (values, _) in REFUSED.items()}
    asked = {
        "chart": str(CHART),
        "version": KUBERNETES,
        "schemas": schemas,
        "renders": renders,
        "files": [str(CHART / "values.yaml")],
        "compose": [str(path) for path in sorted(COMPOSE.glob("*.yaml"))],
    }
    done = subprocess.run(
        [str(PYTHON), str(ROOT / "tests" / "clients" / "charts.py")],
        input=json.dumps(asked).encode(),
        capture_output=True,
        check=False,
    )
    assert not done.returncode, done.stderr.decode()
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def documents(name: str) -> list[dict[str, Any]]:
    """Of a render that succeeds."""
    render = everything()["renders"][name]
    assert not render["error"], render["error"]
    found: list[dict[str, Any]] = render["documents"]
    return found


def of_kind(name: str, *kinds: str) -> list[dict[str, Any]]:
    return [document for document in documents(name) if document["kind"] in kinds]


def compose(name: str) -> dict[str, Any]:
    found: dict[str, Any] = everything()["files"][str(COMPOSE / name)]
    return found


@dataclass(frozen=True, slots=True)
class Container:
    """One that the chart runs, with its pod's template and whatever it belongs to."""

    owner: dict[str, Any]
    template: dict[str, Any]
    spec: dict[str, Any]

    @property
    def component(self) -> str:
        """The service, by its Python name."""
        return str(self.labels["app.kubernetes.io/component"])

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.template["metadata"]["labels"]
        return found

    @property
    def pod(self) -> dict[str, Any]:
        found: dict[str, Any] = self.template["spec"]
        return found

    def env(self, pod_ip: str) -> dict[str, str]:
        """As a kubelet fills it in."""
        fields = {"status.podIP": pod_ip, "metadata.name": f"{self.name}-0"}  # of a set's first pod
        filled: dict[str, str] = {}
        for entry in self.spec["env"]:
            if "valueFrom" in entry:
                value = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                value = entry["value"]
                for name, known in filled.items():
                    value = value.replace(f"$({name})", known)
            assert "$(" not in value, value
            filled[entry["name"]] = value
        return filled

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.spec["ports"]}


def containers(name: str) -> Iterator[Container]:
    for owner in of_kind(name, "Deployment", "StatefulSet"):
        template = owner["spec"]["template"]
        for spec in template["spec"]["containers"]:
            yield Container(owner, template, spec)

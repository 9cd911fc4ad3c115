"""Renders the chart and judges what comes out, with Helm's own SDK and the schemas of Kubernetes, offline.

Run by the environment that `make .charts/.ready` makes. Standard input: JSON with `chart`, `version` of
Kubernetes, `schemas` (by kind, of what Kubernetes does not know itself), `renders` (a name: files of values,
values over them, the release), `files` (YAML to read), `compose` (the same, to judge too). Standard output:
what was made of each.
"""

import json
import sys
from pathlib import Path

import compose_spec
import helm_python
import jsonschema
import kubernetes_validate
import yaml


def merged(below, above):
    """As Helm lays one file of values over another."""
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def values_of(wanted):
    values = {}
    for path in wanted.get("files", []):
        values = merged(values, yaml.safe_load(Path(path).read_text()) or {})
    return merged(values, wanted.get("values", {}))


def complaint(document, asked):
    """What is wrong with it; empty: nothing."""
    try:
        if document["kind"] in asked["schemas"]:
            jsonschema.validate(document, asked["schemas"][document["kind"]])
        else:
            kubernetes_validate.validate(document, asked["version"], strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return f"{document['kind']} {document['metadata']['name']}: {str(error)[:400]}"
    return ""


def rendered(asked, wanted):
    try:
        chart = helm_python.Chart.load(asked["chart"])
        release = wanted.get("release", "shoal")
        values = values_of(wanted)
        chart.validate_schema(values)
        texts = chart.render(values, name=release, namespace="serving")
        documents = [
            document
            for path, text in sorted(texts.items())
            if path.endswith(".yaml")
            for document in yaml.safe_load_all(text)
            if document
        ]
    except (helm_python.HelmError, yaml.YAMLError) as error:
        return {"error": str(error), "documents": [], "complaints": []}
    complaints = [said for document in documents if (said := complaint(document, asked))]
    # Helm reads YAML less kindly than Python does
    found = helm_python.lint(asked["chart"], values, namespace="serving")["messages"]
    complaints += [f"{said['path']}: {said['error']}" for said in found if said["severity"] > 2]
    return {"error": "", "documents": documents, "complaints": complaints}


def complaint_of_compose(path):
    """By the specification of Compose; an override is judged by itself, since all that it holds is a part."""
    try:
        compose_spec.PyCompose.from_json(json.dumps(yaml.safe_load(Path(path).read_text()))).validate()
    except ValueError as error:
        return str(error)[:400]
    return ""


def main():
    asked = json.load(sys.stdin)
    made = {name: rendered(asked, wanted) for name, wanted in asked.get("renders", {}).items()}
    composed = asked.get("compose", [])
    files = {path: yaml.safe_load(Path(path).read_text()) for path in asked.get("files", []) + composed}
    wrong = {path: said for path in composed if (said := complaint_of_compose(path))}
    json.dump({"renders": made, "files": files, "complaints_of_compose": wrong}, sys.stdout)


main()

"""Strict validation of objects in three Kubernetes versions, and of custom resources. Each object is validated once."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import kubernetes_validate
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from kubernetes_validate.utils import all_versions, schema_contents
from referencing import Registry, Resource

from tests.deploy.custom_resources import check_custom_resource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jsonschema.exceptions import ValidationError

    from tests.deploy.chart import Object

VERSIONS = ("1.29", "1.32", kubernetes_validate.latest_version())
FOREIGN = ("route.openshift.io", "networking.gke.io")  # in users' extraObjects; of these no definitions are here
CUSTOM = ("monitoring.coreos.com", "gateway.networking.k8s.io", "inference.networking.k8s.io", "keda.sh")


def is_custom(found: Object) -> bool:
    return found["apiVersion"].split("/")[0] in CUSTOM


def faults(found: Object, version: str) -> list[str]:
    """What is wrong with the object in this version, in words."""
    return _faults(json.dumps(found, sort_keys=True), version)


@cache
def _faults(text: str, version: str) -> list[str]:
    found = json.loads(text)
    if is_custom(found):
        return check_custom_resource(found)
    if found["apiVersion"].split("/")[0] in FOREIGN:
        return []
    error = best_match(_validator(found["apiVersion"], found["kind"], version).iter_errors(found))
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}"] if error else []


@cache
def _validator(api_version: str, kind: str, version: str) -> Draft202012Validator:
    """As `kubernetes_validate.validate` makes it anew for each object, where it is most of the time."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _schema(version, f"{kind.lower()}-{group}")
    found: Draft202012Validator = _kind_of_validator(version)(
        schema, registry=Resource.from_contents(schema) @ _definitions(version)
    )
    return found


@cache
def _kind_of_validator(version: str) -> type[Draft202012Validator]:
    """It looks once at each part that a definition describes: most pods of most values have most parts alike."""
    right: set[tuple[str, str]] = set()  # definition, and the part as JSON

    def definition(validator: Any, ref: str, part: Any, schema: Any) -> Iterator[ValidationError]:
        known = (ref.rpartition("#")[2], json.dumps(part))  # only _definitions has any
        if known not in right:
            wrong = list(Draft202012Validator.VALIDATORS["$ref"](validator, ref, part, schema))
            if not wrong:
                right.add(known)
            yield from wrong

    found: type[Draft202012Validator] = extend(Draft202012Validator, {"$ref": definition})
    return found


@cache
def _definitions(version: str) -> Registry[Any]:
    definitions: Registry[Any] = Resource.from_contents(_schema(version, "_definitions")) @ Registry()
    return definitions.crawl()


def _schema(version: str, name: str) -> Any:
    [folder] = {known for known in all_versions() if f"{known}.".startswith(f"{version}.")}
    return schema_contents(f"kubernetes-json-schema/v{folder}-local-strict/{name}.json", version)

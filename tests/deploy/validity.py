"""Strict validation of objects in three Kubernetes versions, and of custom resources. Each object is validated once."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING
from unittest import mock

import kubernetes_validate

from tests.deploy.custom_resources import check_custom_resource

if TYPE_CHECKING:
    from tests.deploy.chart import Object

VERSIONS = ("1.29", "1.32", kubernetes_validate.latest_version())
FOREIGN = ("route.openshift.io", "networking.gke.io")  # in users' extraObjects; of these no definitions are here
CUSTOM = ("monitoring.coreos.com", "gateway.networking.k8s.io", "inference.networking.k8s.io", "keda.sh")

_read_once = cache(kubernetes_validate.utils.schema_contents)  # else all definitions are read anew for each object


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
    with mock.patch.object(kubernetes_validate.utils, "schema_contents", _read_once):
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}"]
    return []

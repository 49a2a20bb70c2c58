"""Reads the defaults of a site with the rights of the person who asks."""

from __future__ import annotations

import http
from typing import Any

from kubernetes.client.exceptions import ApiException

from grpo_cli.cluster.kube import Kube
from grpo_operator.api import names
from grpo_operator.api.site_objects import layer


def read_site(kube: Kube) -> tuple[dict[str, Any], list[str]]:
    """Return the layers of jobs of the namespace, and the kinds that this person may not read. Raises ApiException."""
    layers, hidden = {}, []
    for kind in names.DEFAULTS_KINDS:
        try:
            layers[kind] = layer(kube.named(kind, names.DEFAULTS_NAME))
        except ApiException as error:
            if error.status == http.HTTPStatus.FORBIDDEN:
                hidden.append(kind)
            elif error.status != http.HTTPStatus.NOT_FOUND:  # else there is no object, or no CRD
                raise
    return layers, hidden

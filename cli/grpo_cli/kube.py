"""A cluster as commands see it: reads and writes of one API server, plain dicts in and out. The thin edge of everything else here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from grpo_cli.errors import no_crd, no_job
from grpo_operator import names

Object = dict[str, Any]

FIELD_MANAGER = "grpo-cli"
"""Of server-side apply, so that what a person submits and what the operator writes never fight over a field."""
SECONDS = (5.0, 30.0)
"""To connect, and to wait for an answer."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def connect(kubeconfig: str | None, context: str | None, namespace: str | None) -> Kube:
    """The cluster that kubectl would talk to: `kubeconfig`, else KUBECONFIG, else ~/.kube/config, else the one this pod runs in.

    Raises ConfigException.
    """
    path = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    configuration = client.Configuration()
    inside = kubeconfig is None and context is None and SERVICE_ACCOUNT.exists() and not Path(path).expanduser().exists()
    if inside:
        config.load_incluster_config(configuration)
        own = SERVICE_ACCOUNT.read_text().strip()
    else:
        config.load_kube_config(path, context, client_configuration=configuration, persist_config=False)
        contexts, current = config.list_kube_config_contexts(path)
        chosen = next((each for each in contexts if each["name"] == context), current)
        own = chosen["context"].get("namespace") or "default"
    configuration.retries = False
    return Kube(client.ApiClient(configuration), namespace or own, is_asked_for=namespace is not None)


class Kube:
    """One API server and the namespace that commands mean; `is_asked_for` when the person named it, and not the context."""

    def __init__(self, api: client.ApiClient, namespace: str, *, is_asked_for: bool = False) -> None:
        self.api, self.namespace, self.is_asked_for = api, namespace, is_asked_for
        self._core, self._apps = client.CoreV1Api(api), client.AppsV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self._networking = client.NetworkingV1Api(api)

    def job(self, name: str) -> Object:
        """A job. Raises CliError naming near names, or that the cluster has no GRPOJobs; ApiException."""
        try:
            found = self._custom.get_namespaced_custom_object(*self._jobs_of(self.namespace), name, _request_timeout=SECONDS)
        except ApiException as error:
            if error.status != 404:
                raise
            there = [job["metadata"]["name"] for job in self.jobs()]
            raise no_job(name, self.namespace, there, lambda: self._namespaces_of(name)) from error
        return cast(Object, found)

    def jobs(self, *, everywhere: bool = False) -> list[Object]:
        """The jobs of the namespace, or of all. Raises CliError where the cluster has no GRPOJobs; ApiException."""
        try:
            if everywhere:
                found = self._custom.list_cluster_custom_object(names.GROUP, names.VERSION, names.PLURAL, _request_timeout=SECONDS)
            else:
                found = self._custom.list_namespaced_custom_object(*self._jobs_of(self.namespace), _request_timeout=SECONDS)
        except ApiException as error:
            raise (no_crd() if error.status == 404 else error) from error
        return cast(list[Object], found["items"])

    def apply_job(self, manifest: Object, *, force: bool) -> Object:
        """Server-side apply; unknown fields are refused. Raises CliError where the cluster has no GRPOJobs; ApiException."""
        try:
            return cast(
                Object,
                self._custom.patch_namespaced_custom_object(
                    *self._jobs_of(self.namespace),
                    manifest["metadata"]["name"],
                    manifest,
                    field_manager=FIELD_MANAGER,
                    field_validation="Strict",
                    force=force,
                    _content_type="application/apply-patch+yaml",
                    _request_timeout=SECONDS,
                ),
            )
        except ApiException as error:
            raise (no_crd() if error.status == 404 and "page not found" in str(error.body) else error) from error

    def suspend_job(self, name: str, suspend: bool) -> None:
        """Set `spec.suspend`."""
        self._custom.patch_namespaced_custom_object(
            *self._jobs_of(self.namespace),
            name,
            {"spec": {"suspend": suspend}},
            field_manager=FIELD_MANAGER,
            _content_type="application/merge-patch+json",
            _request_timeout=SECONDS,
        )

    def pods(self, job: Object) -> list[Object]:
        """The job's own pods, by name."""
        selector = f"{names.LABEL_JOB}={job['metadata']['name']},{names.LABEL_JOB_UID}={job['metadata']['uid']}"
        return sorted(self.listed("Pod", selector), key=lambda pod: str(pod["metadata"]["name"]))

    def listed(self, kind: str, selector: str = "", *, namespace: str | None = None) -> list[Object]:
        """Objects of one of the kinds that jobs and the operator consist of, by label."""
        listers = {
            "Pod": self._core.list_namespaced_pod,
            "Service": self._core.list_namespaced_service,
            "ConfigMap": self._core.list_namespaced_config_map,
            "Event": self._core.list_namespaced_event,
            "PersistentVolumeClaim": self._core.list_namespaced_persistent_volume_claim,
            "StatefulSet": self._apps.list_namespaced_stateful_set,
            "NetworkPolicy": self._networking.list_namespaced_network_policy,
        }
        answer = listers[kind](namespace or self.namespace, label_selector=selector, _request_timeout=SECONDS)
        return [{"kind": kind} | self._plain(item) for item in answer.items]

    def listed_everywhere(self, kind: str, selector: str) -> list[Object]:
        """Pods or Deployments of all namespaces, by label; or Nodes."""
        listers = {
            "Pod": self._core.list_pod_for_all_namespaces,
            "Deployment": self._apps.list_deployment_for_all_namespaces,
            "Node": self._core.list_node,
        }
        answer = listers[kind](label_selector=selector, _request_timeout=SECONDS)
        return [{"kind": kind} | self._plain(item) for item in answer.items]

    def version(self) -> Object:
        """The API server's version."""
        return self._plain(client.VersionApi(self.api).get_code(_request_timeout=SECONDS))

    def log(
        self, pod: str, *, container: str | None = names.CONTAINER, namespace: str | None = None, **options: Any
    ) -> urllib3.HTTPResponse:
        """A pod's log as a stream of bytes. `options` are `follow`, `previous`, `tail_lines`, `limit_bytes` and `timestamps`."""
        # A log that is followed may be silent for hours.
        seconds = (SECONDS[0], None) if options.get("follow") else SECONDS
        if container is not None:
            options["container"] = container
        answer = self._core.read_namespaced_pod_log(
            pod, namespace or self.namespace, **options, _preload_content=False, _request_timeout=seconds
        )
        return cast(urllib3.HTTPResponse, answer)

    def _namespaces_of(self, name: str) -> Iterator[str]:
        try:
            everywhere = self.jobs(everywhere=True)
        except ApiException as error:
            if error.status == 403:  # who may read one namespace alone is told of that one alone
                return
            raise
        yield from (job["metadata"]["namespace"] for job in everywhere if job["metadata"]["name"] == name)

    def _plain(self, model: Any) -> Object:
        return cast(Object, self.api.sanitize_for_serialization(model))

    @staticmethod
    def _jobs_of(namespace: str) -> tuple[str, str, str, str]:
        return names.GROUP, names.VERSION, namespace, names.PLURAL

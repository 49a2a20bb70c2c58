"""What to do about a reason: docs/failures.md in a line each; NODE stands for the node of the failure. Pure."""

from __future__ import annotations

CURES = {
    "RankFailed": "read the log lines; SIGKILL is usually memory: raise podTemplate.resources.limits.memory",
    "EngineDied": "read the log lines; often generation.kvCacheMemory or gpuMemoryUtilization is too high",
    "ConfigError": "mend the field and submit under a new name; the job is not tried again",
    "ContractRefused": "use a spec.image of the operator's release",
    "PeerLost": "look at the lost pod's node and at network policies",
    "PeersMissing": "see which pods are not ready; if all are, does DNS work between them?",
    "PodReplaced": "find out who deletes pods: kubectl get events, and the API server's audit log",
    "OutcomeLost": "see the kubelet's log on the node",
    "OutcomeMissing": "spec.image must be a workload image of the operator's release",
    "Error": "what it said last is in the message; usually spec.image is no workload image of the operator's release",
    "LauncherDied": "usually memory: raise podTemplate.resources.limits.memory",
    "OOMKilled": "raise podTemplate.resources.limits.memory",
    "Evicted": "nothing, if somebody drains the node; otherwise kubectl describe node NODE tells what it is short of",
    "Preempted": "kubectl get events --field-selector reason=Preempted names the pod that took its place; a higher "
    "podTemplate.priorityClassName keeps pods",
    "NodeLost": "kubectl describe node NODE: is it down, or cut off? Attempts keep away from it for 30 minutes",
    "Stopped": "nothing: the ranks had saved, and the restart is not counted",
    "StoppedEarly": "nothing: there was nothing to save yet",
    "Hung": "see which ranks wait and for what: a reward that hangs, a collective that one rank does not reach; "
    "raise failurePolicy.hangSeconds if steps are that long",
    "DeadlineExceeded": "raise spec.activeDeadlineSeconds for the next run; storage.resumeFrom goes on from the checkpoint",
    "StartupDeadlineExceeded": "mend what kept the pods from starting, or raise spec.startupDeadlineSeconds",
    "InvalidSpec": "mend the field and submit again: the job then begins",
    "InvalidPodTemplate": "mend spec.podTemplate and submit again: the job then begins",
    "NameTaken": "delete what has the name, or give the job another one",
    "ClaimNotFound": "create the PersistentVolumeClaim: the job then begins",
    "ClaimNotReadWriteMany": "use a claim with accessModes [ReadWriteMany], or a single pod",
    "WaitingForOldChildren": "wait; if pods stay Terminating, their node is gone: kubectl get pods -o wide",
    "Unschedulable": "free that resource, add nodes, or ask for fewer: trainer.groups[].gpus, podTemplate.resources; "
    "kubectl describe nodes shows what is taken",
    "NodeNotReady": "see the node: kubectl describe node; with luck it comes back before its pods are given up",
    "ContainerWaiting": "see the cause at the pod: a wrong spec.image, an imagePullSecret, a volume that is not there",
    "WaitingForPeers": "wait for the pods named; beyond some minutes: DNS or a network policy",
}

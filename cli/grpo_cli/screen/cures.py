"""The cure for each reason, one line of docs/failures.md; NODE stands for the node of the failure. Pure."""

from __future__ import annotations

CURES = {
    "RankFailed": "read the message and the end of the log lines: they name what failed, and often what to change",
    "RepeatedFailure": "read the log lines and correct the code or the row that they name; a restart meets it again",
    "UnexpectedAdmissionError": "nothing, if a device plugin restarts; otherwise the kubelet's log on node NODE",
    "OutOfMemory": "nothing: the next attempt has smaller micro-batches; docs/training.md says what leaves more memory",
    "NotFinite": "read the steps in metrics.jsonl; lower learningRate, the rewards' weights or beta",
    "EnvironmentFailed": "read the causes in the message: does what environments and tools talk to answer in time? "
    "episodes.retries, timeoutSeconds and memoryLimit may help",
    "SamplingMismatch": "compare precision and engineArgs of engine and model; routerReplay for experts; lower "
    "maxStaleness or learningRate; importanceSamplingCorrection token_truncate if only weights are lost",
    "ConstantReward": "read completions.jsonl beside the rewards: do they find the answer?",
    "NoRewardDifference": "use prompts that get right and wrong answers; raise numGenerations or temperature",
    "CompletionsCut": "raise training.maxCompletionLength, or check that the model ends its answers",
    "CompletionsUnscored": "read the rows whose reward is null: do they have the columns, in the form that it reads?",
    "DeadReward": "read completions.jsonl beside this reward; correct it, or remove it",
    "ZeroGradient": "read trained/sampling/* in metrics.jsonl, and maskTruncatedCompletions",
    "EngineLeftOut": "read the log of the pod that the message names, and check its network; delete it to try at once",
    "WeightsDiffer": "the message names layers or a difference: try push merged, another topology, or another release "
    "of vLLM in spec.image; this job is not retried",
    "EngineDied": "read the log lines; often generation.kvCacheMemory or gpuMemoryUtilization is too high",
    "ConfigError": "fix the field and submit under a new name; this job is not retried",
    "ContractRefused": "use a spec.image of the operator's release",
    "PeerLost": "check the lost pod's node, and network policies",
    "PeersMissing": "find the pods that are not ready; if all are ready, check DNS between them",
    "PodReplaced": "find out who deletes pods, with kubectl get events and the API server's audit log",
    "OutcomeLost": "read the kubelet's log on the node",
    "OutcomeMissing": "spec.image must be a workload image of the operator's release",
    "Error": "read the log's end in the message; usually spec.image is no workload image of the operator's release",
    "PodFailed": "kubectl describe pod, and the kubelet's log on node NODE",
    "LauncherDied": "usually memory: raise podTemplate.resources.limits.memory",
    "InternalError": "a fault of grpo-operator or of node NODE: report the message and the pod's log",
    "OOMKilled": "raise podTemplate.resources.limits.memory",
    "Evicted": "nothing, if somebody drains the node; raise the limit if the message says that the pod exceeded one; "
    "otherwise kubectl describe node NODE shows what it lacks",
    "Preempted": "kubectl get events --field-selector reason=Preempted names the pod that replaced it; "
    "a higher podTemplate.priorityClassName protects pods",
    "NodeLost": "kubectl describe node NODE: is it down, or cut off? Attempts avoid it for 30 minutes",
    "Stopped": "nothing: the ranks saved a checkpoint, and the restart is not counted",
    "StoppedEarly": "nothing: there was no step to save yet",
    "Hung": "find what the ranks wait for: a reward that hangs, a collective that one rank does not reach; "
    "raise failurePolicy.hangSeconds if one phase is that long",
    "PlacementTimeout": "nothing, if other jobs end soon: it is tried again, and the restart is not counted; otherwise "
    "free GPUs, add nodes or ask for fewer",
    "DownloadFailed": "read the log of the job's download pod: the network, the hub, or a full cache.claimName; or "
    "raise cache.prefetchDeadlineSeconds",
    "DeadlineExceeded": "raise spec.activeDeadlineSeconds in the next run; storage.resumeFrom takes the checkpoint",
    "StartupDeadlineExceeded": "fix what kept the pods from starting, or raise spec.startupDeadlineSeconds",
    "RefusedBySite": "set the value that the message names, or leave the field out; if the object is wrong, "
    "ask whoever runs the cluster",
    "InvalidSpec": "fix the field and submit again: the job then starts",
    "InvalidPodTemplate": "fix spec.podTemplate and submit again: the job then starts",
    "QuotaExceeded": "raise the namespace's ResourceQuota, or delete what uses it: the job then starts",
    "OperatorForbidden": "give the operator's ServiceAccount the roles of its chart: the job then starts",
    "ChildRefused": "change what the policy, range or webhook in the message objects to, or except the job from it",
    "NameTaken": "delete the object with this name, or rename the job",
    "ClaimNotFound": "create the PersistentVolumeClaim or ResourceClaimTemplate: the job then starts",
    "ClaimNotReadWriteMany": "use a claim with the access mode that the message names, or a single pod",
    "WaitingForOldChildren": "wait; if pods stay Terminating, their node is lost: kubectl get pods -o wide",
    "WaitingForEnvironments": "kubectl describe pod says what the pod in the message lacks: image, node or volume; "
    "grpo logs --role environment prints its log; environmentPods can change while the job is suspended",
    "Queued": "wait, or ask who manages the queue: kubectl get workloads,localqueues shows what is before it",
    "Unschedulable": "free that resource, add nodes, or ask for fewer: trainer.groups[].gpus, podTemplate.resources; "
    "kubectl describe nodes shows what is in use",
    "PodStuck": "find what holds the pod on its node: a process, a volume or a finalizer; deleting it by force frees "
    "neither GPUs nor volumes that are still in use",
    "NodeNotReady": "check the node with kubectl describe node; it may return before its pods are given up",
    "ContainerWaiting": "create what the message says is missing, and the pod starts; spec.image and podTemplate can "
    "change while the job is suspended",
    "PassFailed": "read the message and the operator's log; report it if the cause is not your cluster",
    "WaitingForPeers": "wait for the named pods; after some minutes check DNS and network policies",
}

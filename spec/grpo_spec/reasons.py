"""Every reason that this project gives, in outcomes of pods, conditions, events and `status.lastFailure`.

The status can also hold reasons of a kubelet, for containers that never ran our code (`OOMKilled`, `StartError`).
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """A CamelCase word, as the Kubernetes API conventions require; docs/failures.md has a row for each."""

    # Given by launchers, in a pod's outcome.
    DONE = "Done"
    STOPPED = "Stopped"
    STOPPED_EARLY = "StoppedEarly"
    RANK_FAILED = "RankFailed"
    NOT_FINITE = "NotFinite"
    WEIGHTS_DIFFER = "WeightsDiffer"
    OUT_OF_MEMORY = "OutOfMemory"
    ENVIRONMENT_FAILED = "EnvironmentFailed"
    ENGINE_DIED = "EngineDied"
    CONFIG_ERROR = "ConfigError"
    CONTRACT_REFUSED = "ContractRefused"
    LAUNCHER_DIED = "LauncherDied"
    INTERNAL_ERROR = "InternalError"
    PEER_LOST = "PeerLost"
    PEERS_MISSING = "PeersMissing"

    # Given by rank 0, in the warnings of its progress; so is NotFinite.
    SAMPLING_MISMATCH = "SamplingMismatch"
    CONSTANT_REWARD = "ConstantReward"
    NO_REWARD_DIFFERENCE = "NoRewardDifference"
    COMPLETIONS_CUT = "CompletionsCut"
    COMPLETIONS_UNSCORED = "CompletionsUnscored"
    DEAD_REWARD = "DeadReward"
    ZERO_GRADIENT = "ZeroGradient"
    ENGINE_LEFT_OUT = "EngineLeftOut"

    # Given by the operator, for a pod that left no outcome or was taken away.
    OUTCOME_MISSING = "OutcomeMissing"
    OUTCOME_LOST = "OutcomeLost"
    CONTAINER_ERROR = "Error"
    POD_FAILED = "PodFailed"
    POD_REPLACED = "PodReplaced"
    EVICTED = "Evicted"
    PREEMPTED = "Preempted"
    NODE_LOST = "NodeLost"
    HUNG = "Hung"
    REPEATED_FAILURE = "RepeatedFailure"
    PLACEMENT_TIMEOUT = "PlacementTimeout"
    DOWNLOAD_FAILED = "DownloadFailed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"

    # Given by the operator, in conditions and events.
    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"
    REFUSED_BY_SITE = "RefusedBySite"
    INVALID_POD_TEMPLATE = "InvalidPodTemplate"
    QUOTA_EXCEEDED = "QuotaExceeded"
    OPERATOR_FORBIDDEN = "OperatorForbidden"
    CHILD_REFUSED = "ChildRefused"
    NAME_TAKEN = "NameTaken"
    CLAIM_NOT_FOUND = "ClaimNotFound"
    CLAIM_NOT_SHARED = "ClaimNotReadWriteMany"
    QUEUED = "Queued"
    DOWNLOADING = "Downloading"
    WAITING_FOR_OLD_CHILDREN = "WaitingForOldChildren"
    WAITING_FOR_PODS = "WaitingForPods"
    ALL_PODS_SCHEDULED = "AllPodsScheduled"
    UNSCHEDULABLE = "Unschedulable"
    POD_STUCK = "PodStuck"
    CONTAINER_WAITING = "ContainerWaiting"
    STARTING = "Starting"
    NODE_NOT_READY = "NodeNotReady"
    WAITING_FOR_ENVIRONMENTS = "WaitingForEnvironments"
    WAITING_FOR_ENGINES = "WaitingForEngines"
    WAITING_FOR_PEERS = "WaitingForPeers"
    ALL_RANKS_RUNNING = "AllRanksRunning"
    FINISHED = "Finished"
    TRAINING_DONE = "TrainingDone"
    RESTARTING = "Restarting"
    RESTARTING_IN_PLACE = "RestartingInPlace"
    RESTARTED = "Restarted"
    ENGINE_RESTARTING = "EngineRestarting"
    SCALED = "Scaled"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    STEPPING = "Stepping"
    STEPS_IN_ORDER = "StepsInOrder"
    CLUSTER_NOT_READY = "ClusterNotReady"
    PASS_FAILED = "PassFailed"
    RECOVERED = "Recovered"
    RESTARTS_FROM_STEP_ZERO = "RestartsFromStepZero"


OF_FAILURES: tuple[str, ...] = (
    Reason.STOPPED,
    Reason.STOPPED_EARLY,
    Reason.RANK_FAILED,
    Reason.NOT_FINITE,
    Reason.WEIGHTS_DIFFER,
    Reason.OUT_OF_MEMORY,
    Reason.ENVIRONMENT_FAILED,
    Reason.ENGINE_DIED,
    Reason.CONFIG_ERROR,
    Reason.CONTRACT_REFUSED,
    Reason.LAUNCHER_DIED,
    Reason.INTERNAL_ERROR,
    Reason.PEER_LOST,
    Reason.PEERS_MISSING,
    Reason.OUTCOME_MISSING,
    Reason.OUTCOME_LOST,
    Reason.CONTAINER_ERROR,
    Reason.POD_FAILED,
    Reason.POD_REPLACED,
    Reason.EVICTED,
    Reason.PREEMPTED,
    Reason.NODE_LOST,
    Reason.HUNG,
    Reason.REPEATED_FAILURE,
    Reason.PLACEMENT_TIMEOUT,
    Reason.DOWNLOAD_FAILED,
    Reason.DEADLINE_EXCEEDED,
    Reason.STARTUP_DEADLINE_EXCEEDED,
    "OOMKilled",
    "StartError",
    "ContainerCannotRun",
    "ContainerStatusUnknown",
    "UnexpectedAdmissionError",
)
"""Reasons that `status.lastFailure` can have, of launchers, the operator and kubelets; these may give others."""

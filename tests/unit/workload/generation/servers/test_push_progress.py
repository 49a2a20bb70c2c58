"""The engine that holds up a push is named in time. Workers count in a real store; the clock is the test's."""

import pytest
import torch.distributed as dist

from grpo_spec.contract import Engine
from grpo_workload.generation.roll_call import RollCall, Seat
from grpo_workload.generation.servers.http_client import EngineClient
from grpo_workload.generation.servers.push_progress import PushProgress

LIMITS = {True: 30.0, False: 600.0}  # for elastic engines and for others


class Push:
    """A push of 4 pieces to engine a, which has two workers, b and c."""

    def __init__(self, *elastic):
        self.now = 0.0
        self.store = dist.HashStore()
        clients = []
        for name in "abc":
            sizes = {"elastic": name in elastic, "tensor_parallel": 2 if name == "a" else 1}
            engine = Engine(name=name, pod=name, group="g", host="h", port=80, devices=(0,), **sizes)
            clients.append(EngineClient(engine, None, 5))
        self.seats = [(clients[0], range(1, 3)), (clients[1], range(3, 4)), (clients[2], range(4, 5))]
        self.begin()

    def begin(self):
        self.progress = PushProgress(
            RollCall(self.store, "7"),
            self.seats,
            total=4,
            limit_of=lambda engine: LIMITS[engine.elastic],
            clock=lambda: self.now,
        )

    def receive(self, *ranks):
        for rank in ranks:
            Seat(self.store, "7", rank).count_piece()

    def after(self, seconds):
        """Let time pass; return which engine is named, if any."""
        self.progress.look()
        self.now += seconds
        error = self.progress.look()
        return None if error is None else error.engine.name


def test_a_slow_push_is_no_hang():
    push = Push("b")
    for _ in range(4):
        with push.progress.sending():
            push.receive(1, 2, 3, 4)
            assert push.after(25) is None
            push.receive(3)
            assert push.after(25) is None


def test_time_in_which_the_sender_prepares_a_piece_does_not_count():
    push = Push("b")
    assert push.after(10_000) is None
    with push.progress.sending():
        assert push.after(29) is None
        assert push.after(2) == "b"


@pytest.mark.parametrize(
    ("elastic", "received", "seconds", "named"),
    [
        (["b", "c"], [1, 2, 3], 31, "c"),
        (["b", "c"], [1, 2, 4], 31, "b"),
        (["b"], [3, 4, 1], 31, None),  # a worker of a is late, for which ranks wait longer
        (["b"], [3, 4, 1], 601, "a"),
        (["b"], [], 31, "b"),  # all alike: training can go on without b
        ([], [], 601, "a"),
    ],
)
def test_the_engine_that_has_received_least_is_named(elastic, received, seconds, named):
    push = Push(*elastic)
    with push.progress.sending():
        push.receive(*received)
        assert push.after(seconds) == named


async def test_an_engine_that_has_answered_holds_nothing_up_and_each_push_counts_anew():
    push = Push("a", "b", "c")

    async def answers():
        pass

    for _ in range(2):
        for _ in range(4):
            with push.progress.sending():
                push.receive(1, 2, 3, 4)
        await push.progress.answer(push.seats[0][0], answers())
        push.progress.look()
        push.now += 31
        error = push.progress.look()
        assert str(error) == (
            "engine b (pod b, h:80) holds up a push of weights: it has received 4 of 4 pieces, and got no further for "
            "30 s. Does it hang, or is its network cut? The end of its log may say"
        )
        push.begin()

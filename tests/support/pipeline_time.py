"""The seconds of a pipeline's step on devices whose transfers run beside the computation, as NCCL runs them.

A transfer begins when both workers have reached it and all earlier ones of its group have ended.
"""

from collections import defaultdict, deque
from collections.abc import Callable

from rapidformer_templates.switches.layout.schedule import Action, Kind, with_transfers

Group = Callable[[int, int], object]
"""Names the group of the transfers from one worker to another."""
COMPUTES = (Kind.FORWARD, Kind.BACKWARD)
RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


def of_link(sender: int, receiver: int) -> object:
    """Each link has a group for each direction."""
    return sender, receiver


def of_all(sender: int, receiver: int) -> object:
    """All workers are in one group."""
    return None


def step_seconds(workers: int, per_worker: int, microbatches: int, transfer: float, group: Group) -> float:
    """Return the seconds of a step in which a worker's forward of a micro batch takes 1 second, and its backward 2.

    Args:
        transfer: seconds of a transfer.
        group: in which group a transfer is.
    """
    step = _Step(workers, per_worker, transfer, group)
    waiting = [deque(actions) for actions in with_transfers(workers, per_worker, microbatches)]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(waiting):
            while actions and step.run(rank, actions[0]):
                actions.popleft()
                moved = True
        while step.exchange():
            moved = True
    assert not any(waiting), "a deadlock"
    return max(step.now)


class _Step:
    """A step so far. ``now`` is when each worker has computed everything that it could."""

    def __init__(self, workers: int, per_worker: int, transfer: float, group: Group) -> None:
        self.workers, self.per_worker, self.transfer, self.group = workers, per_worker, transfer, group
        self.now = [0.0] * workers
        self.last = workers * per_worker - 1
        self._queues: dict[tuple[int, object], deque[Action]] = defaultdict(deque)
        self._free: dict[tuple[int, object], float] = defaultdict(float)  # when a queue has ended its last transfer
        self._reached: dict[tuple[Action, int], float] = {}
        self._ended: dict[Action, float] = {}

    def run(self, rank: int, action: Action) -> bool:
        """Compute, or queue a transfer. Return whether that was possible."""
        if action.kind not in COMPUTES:
            sent = _sent_to(action) if action.kind in RECEIVES else action
            self._reached[sent, rank] = self.now[rank]
            self._queues[self._queue_of(rank, sent)].append(sent)
            return True
        begin, seconds = self.now[rank], (1 if action.kind is Kind.FORWARD else 2) / self.per_worker
        if action.stage != (0 if action.kind is Kind.FORWARD else self.last):
            if _sent_to(action) not in self._ended:
                return False
            begin = max(begin, self._ended[_sent_to(action)])
        self.now[rank] = begin + seconds
        return True

    def exchange(self) -> bool:
        """Make a transfer that is next in the queues of both workers. Return whether there is one."""
        for sent in {queue[0] for queue in self._queues.values() if queue}:
            both = [self._queue_of(rank, sent) for rank in self._ends(sent)]
            if all(self._queues[queue] and self._queues[queue][0] == sent for queue in both):
                begin = max(*(self._reached[sent, rank] for rank, _ in both), *(self._free[queue] for queue in both))
                self._ended[sent] = begin + self.transfer
                for queue in both:
                    self._queues[queue].popleft()
                    self._free[queue] = self._ended[sent]
                return True
        return False

    def _queue_of(self, rank: int, sent: Action) -> tuple[int, object]:
        return rank, self.group(*self._ends(sent))

    def _ends(self, sent: Action) -> tuple[int, int]:
        """Return the sender and the receiver."""
        step = 1 if sent.kind is Kind.SEND_FORWARD else -1
        return sent.stage % self.workers, (sent.stage + step) % self.workers


def _sent_to(action: Action) -> Action:
    """Return the send whose result a forward, a backward or a receive gets."""
    forward = action.kind in (Kind.FORWARD, Kind.RECEIVE_FORWARD)
    kind, step = (Kind.SEND_FORWARD, -1) if forward else (Kind.SEND_BACKWARD, 1)
    return Action(kind, action.stage + step, action.microbatch)

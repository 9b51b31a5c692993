"""Compressed DDP: the all-reduce of every gradient bucket, by DDP's own communication hook.

    model = DistributedDataParallel(model)
    model.register_comm_hook(zcomm.ddp.State("int4", feedback=True), zcomm.ddp.hook)

Each bucket's all-reduce starts when DDP has filled the bucket and goes on in the communicator's one thread while
backward computes the next; buckets are done in order, so ranks cannot mix them up. The mean comes back: DDP itself
does not divide where a hook is registered. no_sync, static_graph, gradient_as_bucket_view, find_unused_parameters and
join stay torch's own.

[Note: the last bucket waits] DDP turns an error inside a hook's future into "Unable to cast ... to Tensor". An error
raised by the hook itself comes out of backward() as it is. So the hook of the last bucket waits for all buckets and
raises what befell any: by then every gradient is computed, and backward has nothing left to overlap with.

[Note: buckets are rebuilt] After its first backward DDP lays its buckets out anew, in the order in which gradients were
ready, once. A residual belongs to the elements of one bucket, so the hook names it by the bucket's index, by how often
the parameters at this index have changed, and by its count; those of the first layout are dropped. A second change
means that the state serves two models.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zcomm.collectives.feedback import Feedback, Residual
from zcomm.errors import BufferError, UnsupportedError
from zcomm.keywords import known_keywords
from zcomm.plan import Plan
from zcomm.plugs.hook_state import HookState
from zcomm.plugs.torch_work import TorchWork
from zcomm.reduce_op import AVG
from zcomm.topology import Topology
from zcomm.wire.codec import Codec
from zcomm.work import Work


@known_keywords
class State(HookState):
    """Settings, communicator and residuals of one DDP model's hook. One state for each model."""

    def __init__(
        self,
        codec: Plan | Codec | str | None = None,  # None: the plan's, which is int8 if no plan is given
        group: Any = None,  # DDP's process_group; None: the default group
        plan: Plan | None = None,  # all other settings
        topology: Topology | None = None,  # None: detected
        feedback: bool | Feedback = False,  # True: Feedback(), the plain form
    ) -> None:
        super().__init__(codec, group, plan, topology, feedback)
        self._buckets: dict[int, _Bucket] = {}
        self._under_way: list[Work] = []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's residuals back. A bit-exact resume needs one backward of the new model before (guide)."""
        super().load_state_dict(state)

    def average(
        self,
        bucket: dist.GradBucket,  # its buffer is overwritten with the mean
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the bucket's all-reduce. See [Note: the last bucket waits]."""
        try:
            for earlier in self._under_way:
                if earlier.is_completed():
                    earlier.wait()  # raises what it raised
            buffer = bucket.buffer()
            if buffer.layout != torch.strided:
                raise BufferError(
                    f"bucket {bucket.index()} is a sparse gradient, which zcomm does not compress; "
                    "make the embedding with sparse=False, or use DDP without this hook"
                )
            communicator, residual = self.communicator_for(buffer), self._residual(bucket)
            work = communicator.all_reduce(buffer, AVG, async_op=True, feedback=residual)
            assert work is not None
            self._under_way.append(work)
            if bucket.is_last():
                for each in self._under_way:
                    each.wait()
                self._under_way.clear()
        except BaseException:
            self._under_way.clear()
            raise
        return TorchWork(work, buffer).get_future()

    def _residual(self, bucket: dist.GradBucket) -> Residual | None:
        """See [Note: buckets are rebuilt]."""
        if self.feedback is None:
            return None
        index, parameters = bucket.index(), tuple(map(id, bucket.parameters()))
        known = self._buckets.get(index)
        if known is None or known.parameters != parameters:
            layout = 0 if known is None else known.layout + 1
            if layout > 1:
                raise UnsupportedError(
                    f"bucket {index} holds other parameters for the second time; a State with feedback keeps the "
                    "residuals of one DDP model: make a State for each model"
                )
            if known is not None:
                self.feedback.forget(known.key)
            key = f"layout {layout}, bucket {index}: {bucket.buffer().numel()} elements"
            known = self._buckets[index] = _Bucket(key, layout, parameters)
        if bucket.is_last():
            for gone in [each for each in self._buckets if each > index]:
                self.feedback.forget(self._buckets.pop(gone).key)
        return self.feedback.of(known.key)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_buckets": {}, "_under_way": []}


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the state's group. For `DistributedDataParallel.register_comm_hook(state, hook)`."""
    if not isinstance(state, State):
        raise BufferError(
            f"the hook's state is a {type(state).__name__}; "
            "register it as register_comm_hook(zcomm.ddp.State(...), zcomm.ddp.hook)"
        )
    if not isinstance(bucket, dist.GradBucket):
        raise UnsupportedError(
            "DDP called the hook without a bucket, as its Python reducer does; "
            'set torch._dynamo.config.optimize_ddp = "ddp_optimizer"'
        )
    return state.average(bucket)


@known_keywords
def compress(
    model: DistributedDataParallel,
    gradients: Plan | Codec | str = "int4",
    *,
    topology: Topology | None = None,  # None: detected
    feedback: bool | Feedback = False,
) -> State:
    """Register the hook with a state over the model's own process group; the state.

    Raises UnsupportedError for a model that has a hook already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise BufferError(f"model is a {type(model).__name__}; expected a DistributedDataParallel")
    state = State(gradients, model.process_group, None, topology, feedback)
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        if "once" not in str(error):
            raise
        raise UnsupportedError(
            "this DistributedDataParallel has a communication hook already, and takes only one: from compress or "
            "register_comm_hook before, or DDP's own, for mixed_precision= or an optimizer fused into backward; wrap "
            "the module in a new DistributedDataParallel without it"
        ) from error
    return state


class _Bucket(NamedTuple):
    """What is known of the bucket at one index."""

    key: str
    layout: int  # how often its parameters have changed
    parameters: tuple[int, ...]  # their ids

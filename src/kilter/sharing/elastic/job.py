"""A training job as a script writes it: its models, optimizers and loaders, and whether their data
ratio may change."""

from __future__ import annotations

import atexit
import gc
import hashlib
import itertools
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from kilter.core.reasons import Reason
from kilter.observe import torch_internals
from kilter.sharing.elastic.groups import (
    MOST_RANKS_WITH_IDLE,
    Groups,
    Reduction,
    let_threads_drop_tensors,
)
from kilter.sharing.elastic.losses import UNSEEN, Losses, watch_losses
from kilter.sharing.elastic.meter import Guard
from kilter.sharing.elastic.replicas import Replicas
from kilter.sharing.elastic.schedule import GlobalBatches, Index
from kilter.sharing.elastic.sharded import is_sharded, sharding_flaw
from kilter.sharing.elastic.share import POLL_S, Share, listening_store, own_address
from kilter.sharing.elastic.state import RankState
from kilter.sharing.elastic.votes import Votes
from kilter.sharing.messages import Facts

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, TCPStore
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

WARM_UP_STEPS = 2
"""All ranks take so many steps before anything changes: DDP agrees on its buckets in these."""

_SEES_NO_MODEL_AFTER = 3

_ACCUMULATED = (
    "gradients are accumulated over several batches, of which a rank without samples would miss "
    "some; leave --idle-ranks (idle_ranks=True) out, or use a larger batch_size"
)
_SEVERAL_LOADERS = (
    "the model trains on batches of several DataLoaders side by side; use one at a time, over a "
    "data set that has the samples of all"
)
_WRAPPED_LATE = (
    "a model is wrapped, or sharded, after the shares of another have begun to change; wrap all "
    "models before the first step"
)
_REPEATED = (
    "batches are kept and trained on again (itertools.cycle does that), with the shards that they "
    "were drawn with; iterate over the DataLoader again"
)

T = TypeVar("T")


class ElasticJob:
    """The job of this process. Found out while the script runs its first steps. It has many
    attributes because the script makes models, optimizers and loaders one by one, and nothing can
    be built of them, nor of the user's wishes, before all are there."""

    def __init__(
        self,
        *,
        guard: Callable[[Callable[[str, str], None]], Guard],
        may_idle: bool,
        release: bool = False,
        min_samples: int | None = None,
        total_steps: int | None = None,
        attached: Callable[[ElasticJob], None] = lambda job: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.models: list[Any] = []
        """It holds each DistributedDataParallel, or the outermost module of a `fully_shard`."""
        self.optimizers: list[Any] = []
        self.others: list[Any] = []
        """They are schedulers and gradient scalers."""
        self.share: Share | None = None
        self.facts: Facts | None = None
        self.refused: Reason | None = None
        self._may_idle, self._release = may_idle, release
        self._min_samples, self._total_steps = min_samples, total_steps
        self._attached, self.say = attached, say
        self.guard = guard(self._failed)
        self._broken: str | None = None
        self._votes = Votes()
        self._hosted: TCPStore | None = None
        self._hooks: list[Any] = []
        self._forwards = self._synced = 0
        self._waiting: set[Any] = set()
        """The latest backward pass of these models has left their gradients unsummed
        (`no_sync()`)."""
        self.steps = 0
        self.source: _Pass | None = None
        """This pass has handed out the latest batch; None for a loader that has no shares."""
        self.passes: list[_Pass] = []
        """These have begun and not ended."""
        self.divided: _Pass | None = None
        """It is the latest one whose batches follow the schedule."""
        self.losses = Losses(say)
        self._told_uneven = False

    def sure(self, function: Callable[..., T], *args: Any) -> T:
        """A step that the other ranks rely on. After an error of ours it is run a second time: it
        goes on where it was. The data ratio then stays as it is until the pass ends."""
        found = self.guard.ask(function, *args)
        return found[0] if found else function(*args)

    # What the script makes.

    def watch(self, model: DistributedDataParallel | FSDPModule) -> None:
        """A model of the script, before its first step. `fully_shard` is applied to the parts of a
        model before the whole: then the whole takes their place."""
        if not self._hooks and self.refused is None:
            watch_losses(lambda losses: self.guard.ask(self._look_at, losses) == [True])
        parts: list[Any] = list(model.modules())
        self.models = [m for m in self.models if not any(m is part for part in parts)]
        self.models.append(model)
        if self.share is not None:
            self._stop_sharing(_WRAPPED_LATE)

        def forward(model: Any, _: object) -> None:
            self.guard.run(self._forward, model)

        self._hooks.append(model.register_forward_pre_hook(forward))

    def _forward(self, model: Any) -> None:
        import torch

        if not (model.training and torch.is_grad_enabled()):
            return
        if not is_sharded(model):
            keep = self._waiting.discard if model.require_backward_grad_sync else self._waiting.add
            keep(model)
        if self._as_divided() or not any(model is known for known in self.models):
            return
        self._tell_unweighted()
        if self.source is not None:
            self.source.forwards += 1
            self.source.backwards += self.share is not None  # after the first steps it is believed
            if self.share is None:
                self._catch_output(getattr(model, "module", model))
        self._forwards += 1
        self._synced += model not in self._waiting

    def _catch_output(self, module: torch.nn.Module) -> None:
        """Of the forward pass that begins. No hook stays: modules are copied and pickled."""

        def done(module: object, _: object, output: object) -> None:
            hook.remove()
            self.guard.run(self.losses.see_output, output)

        hook = module.register_forward_hook(done)

    def _look_at(self, losses: list[Any]) -> bool:
        """Before a backward pass: what the loss is. Whether the next is to be looked at as well."""
        this = self.source
        if self.refused is not None or (self.share is not None and not self.losses.have_sums):
            return False
        if this is not None and self.share is None:
            this.backwards += 1
            if (flaw := self.losses.look(losses, this.samples, self._scale)) is not None:
                self.refuse("loss-of-batches", flaw)
        elif this is not None and self.share is not None and self._as_divided():
            factor = self.share.sum_factor()
            self.losses.weigh_sums(losses, this.samples, self._scale, factor)
        return True

    def _scale(self) -> float:
        """That of the script's gradient scaler."""
        scales = (s.get_scale() for s in self.others if hasattr(s, "get_scale") and s.is_enabled())
        return float(next(scales, 1.0))

    def begins(self, iteration: int) -> None:
        """Says once that the shards are no longer those of the script, if that may be wrong."""
        assert self.share is not None
        unseen = self.losses.note is UNSEEN and not self._told_uneven
        if unseen and self.share.differs(iteration):
            self._told_uneven = True
            self.say(f"from here on the shares of the ranks are uneven: {UNSEEN}")

    def _as_divided(self) -> bool:
        """Whether the batch that the script has is one of the schedule."""
        return self.share is not None and self.share.divides and self.source is self.divided

    def _tell_unweighted(self) -> None:
        """The model trains on a batch whose part of the gradient is not that of the schedule."""
        if self.share is None:
            return
        if self.share.divides:
            self._stop_sharing(_SEVERAL_LOADERS)
        elif self.source is self.divided and self.share.schedule.ratios():
            self._stop_sharing(_REPEATED)

    def divided_batch_ended(self, stepped: bool) -> None:
        """A rank that comes back in the middle of an accumulation lacks what was summed up."""
        if self._may_idle and not stepped and not self._scales():
            self._stop_sharing(_ACCUMULATED)

    def _stop_sharing(self, why: str) -> None:
        """The ranks agree on that when the next pass begins, and train as without kilter then."""
        if self._broken is not None or self.share is None:
            return
        self._broken = why
        self.share.hold()
        if self.share.divides or why is _REPEATED:
            right = "the data ratio stays as it is", "these are not weighted by their samples"
            self.say(f"{why}; until the next pass {right[why is not _ACCUMULATED]}")

    def stepped(self, optimizer: Any) -> None:
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        self.steps += 1

    def refuse(self, code: str, text: str) -> None:
        """The job trains as it would without kilter, and says why, once."""
        if self.refused is None:
            self.refused = Reason(code, "job", text)
            self._forget_hooks()
            self._votes.decline()
            self.say(f"{text}; the job trains as it would without kilter")

    def _failed(self, where: str, error: str) -> None:
        self._broken = f"kilter had an error ({error})"
        if self.share is None:
            self.refuse("error", f"kilter could not take part ({error})")
            return
        self.share.hold()
        self.say(
            f"an error of kilter ({error}); the data ratio stays as it is for the rest of this "
            "pass over the data"
        )

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # Loaders.

    def batches(self, loader: DataLoader[Any], plain: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """One pass over a loader of the script; `plain` iterates as without kilter."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return plain()
        if self.refused is not None:
            self.guard.run(self._votes.decline)
            return plain()
        if not (found := self.guard.ask(loader_flaw, loader)):
            return plain()
        if found[0] is not None:
            return self._watched(loader, plain(), found[0])
        this = self.sure(_Pass, self, loader)
        iterator = this.batches()
        this.iterator = weakref.ref(iterator)
        return iterator

    def _watched(self, loader: Any, batches: Iterator[Any], reason: Reason) -> Iterator[Any]:
        """A loader that cannot be divided; said only if the model trains on it."""
        before = self._synced
        for batch in batches:
            self.source = None
            yield batch
            if self._synced > before:
                self.guard.run(self.refuse, reason.code, reason.text)
                before = self._synced + 2**60

    def marks(self) -> tuple[int, int, int]:
        """Forward passes, those with gradient reduction, and optimizer steps, so far."""
        return self._forwards, self._synced, self.steps

    def trains(self, this: _Pass, since: tuple[int, int, int], batches: int) -> bool:
        """Whether the pass trains a model whose shares may change now. Says what hinders."""
        if self.refused is not None:
            return False
        forwards, synced, steps = (a - b for a, b in zip(self.marks(), since, strict=True))
        mixed = forwards > this.forwards or (
            forwards > 0
            and any(each.forwards for each in self.passes if each.loader is not this.loader)
        )
        if mixed and self.share is None:
            self.refuse("several-loaders", _SEVERAL_LOADERS)
        if mixed or batches < WARM_UP_STEPS:
            return False
        accumulates = this.stepped < batches and not self._scales()
        may_idle = self._may_idle and not any(map(is_sharded, self.models))
        if self.share is not None:  # the script has made another loader
            every_batch = this.trained >= batches and not (accumulates and may_idle)
            return synced >= WARM_UP_STEPS and steps > 0 and every_batch
        if not self.models and steps and batches >= _SEES_NO_MODEL_AFTER:
            self.refuse(
                "no-ddp",
                "the model is not wrapped in torch.nn.parallel.DistributedDataParallel; wrap it, "
                "or use fully_shard, or the ranks train by themselves",
            )
        elif synced >= WARM_UP_STEPS and this.trained < batches:
            self.refuse(
                "drawn-ahead",
                "a batch is drawn before the backward pass of the one before it, or left out; draw "
                "each batch after the step on the last, and train on all (with Accelerate: leave "
                "the DataLoader out of prepare(), and give it a DistributedSampler)",
            )
        elif synced >= WARM_UP_STEPS and steps > 0:
            if accumulates and may_idle:
                self.refuse("accumulation", _ACCUMULATED)
                return False
            if not is_repeated(this.iterator()):
                return True
            self.refuse("repeated", _REPEATED)
        return False

    def _scales(self) -> bool:
        """With a gradient scaler a step may be left out."""
        return any(hasattr(other, "get_scale") for other in self.others)

    def divides_another(self, loader: Any) -> bool:
        """Whether a pass over another loader is going on whose batches follow the schedule. (One
        over the same loader that the script has left lying is replaced.)"""
        if self.share is None or self.divided is None or not self.share.divides:
            return False
        return self.divided.loader is not loader

    def attach(self, drawn: list[list[Index]]) -> bool:
        """Make the job elastic: all ranks do, or none. They are in the same place of the script.
        Process groups are made only where every rank has said that it will, and nothing that may
        fail stands between the answers and that."""
        import torch.distributed as dist

        if (flaw := self._model_flaw()) is not None:
            self.refuse(*flaw)
            return False
        prints = self.sure(self._agreed, "model", self._fingerprint(drawn))
        if prints is None:
            return False
        if len(set(prints)) > 1:
            self.refuse(
                "ranks-disagree",
                "the ranks disagree about the model, the number of batches or the optimizers; "
                "make them the same on every rank",
            )
            return False
        atexit.register(let_threads_drop_tensors)
        control = dist.new_group(backend="gloo")
        whole = _process_group(self.models[0])
        self._may_idle = self._idle_is_possible()
        groups = Groups(whole, _world(), subsets=self._may_idle)
        state = RankState(self.models, self.optimizers, self.others, release=self._release)
        host = own_address()
        if dist.get_rank() == 0:
            self._hosted = listening_store(host)
        port = self._hosted.port if self._hosted is not None else 0
        where = self.sure(self._agreed, "store", f"{host} {port}")
        if where is None:
            return False
        self.sure(groups.make)
        host, port_of_store = where[0].split()
        share = Share(
            Replicas(self.models, Reduction(whole), groups, self._waiting),
            state,
            groups,
            control,
            (host, int(port_of_store)),
            self.guard,
            cuda=next(self.models[0].parameters()).is_cuda,
        )
        if self.sure(self._agreed, "share", "ready") is None:
            return False
        self.sure(share.take_over)
        self.share = share
        return True

    def _agreed(self, question: str, answer: str) -> list[str] | None:
        """The answers of all ranks. Refuses if one of them takes no part."""
        self._votes.say(question, answer)
        answers = self._votes.hear(question, _world())
        if answers is None:
            self.refuse("other-rank", "another rank of the job cannot take part")
        return answers

    def draw(self, drawn: list[list[Index]]) -> GlobalBatches | None:
        """The batches of all ranks, from the beginning of a pass on; every rank has to call it.
        None if all ranks train on as without kilter: after an error on one of them, or because the
        batches are too small."""
        if self.share is None:
            return None
        said = pickle.dumps((self._broken, drawn))
        heard = [pickle.loads(each) for each in self.share.exchange(said)]
        broken = [f"rank {r}: {why}" for r, (why, _) in enumerate(heard) if why is not None]
        first = self.share.iteration
        batches = GlobalBatches([mine for _, mine in heard], first=first, may_idle=self._may_idle)
        global_batch = batches.size(first) if batches.count else self.share.world
        if broken:
            reason = "error", broken[0]
        elif global_batch < self.share.world:
            text = f"a batch of {global_batch} samples is smaller than the {self.share.world} ranks"
            reason = "small-batch", f"{text}; use a larger batch_size"
        else:
            return batches
        self.share.give_up()
        self.refuse(*reason)
        self.share = None
        return None

    def describe(self, global_batch: int) -> None:
        """The facts of the job, once its first global batch is known."""
        if self.facts is not None or self.share is None:
            return
        fewest = self._min_samples or (2 if self._has(torch_internals.BatchNorm) else 1)
        world = self.share.world
        self.facts = Facts(
            world, global_batch, self._total_steps, fewest, self._may_idle, self.losses.note
        )
        self.guard.run(self._attached, self)

    def _idle_is_possible(self) -> bool:
        """A sharded model is gathered from all ranks; DDP's search for unused parameters is a
        collective of all ranks."""
        import torch

        if any(map(is_sharded, self.models)):
            self.say(
                "every rank of this job keeps a ratio of 1 to 10, because each holds a part of "
                "the parameters (fully_shard)"
            )
            return False
        if not self._may_idle:
            return False
        never = None
        if _world() > MOST_RANKS_WITH_IDLE:
            never = f"needs {MOST_RANKS_WITH_IDLE} ranks or fewer"
        elif any(model.find_unused_parameters or model.static_graph for model in self.models):
            never = "is not possible with find_unused_parameters or static_graph"
        elif any(hasattr(each, "consolidate_state_dict") for each in self.optimizers):
            never = (
                "is not possible with ZeroRedundancyOptimizer, in whose steps all ranks take part"
            )
        elif self._has(torch.nn.SyncBatchNorm):
            never = "is not possible with SyncBatchNorm, whose statistics are those of all ranks"
        if never is not None:
            self.say(f"ranks of this job are never without samples: that {never}")
        return never is None

    def _model_flaw(self) -> tuple[str, str] | None:
        for model in self.models:
            if is_sharded(model):
                if (flaw := sharding_flaw(model, self.optimizers, _world())) is not None:
                    return flaw
            elif model.process_group.size() != _world():
                return "process-group", "the model is replicated over a part of the ranks only"
            elif model._get_ddp_logging_data().get("comm_hook"):
                return (
                    "comm-hook",
                    "the model has a communication hook of its own; take it out of the script",
                )
        return None

    def _fingerprint(self, drawn: list[list[Index]]) -> str:
        shapes = [
            (name, tuple(p.shape), str(p.dtype))
            for model in self.models
            for name, p in model.named_parameters()
        ]
        kinds = [type(o).__name__ for o in (*self.optimizers, *self.others)]
        text = repr((shapes, kinds, len(drawn)))
        return hashlib.sha256(text.encode()).hexdigest()

    def _has(self, kind: type) -> bool:
        return any(isinstance(m, kind) for model in self.models for m in model.modules())


def _process_group(model: Any) -> ProcessGroup:
    """That over which the gradients of the model are summed up: all ranks of the job."""
    import torch.distributed as dist

    group: ProcessGroup = dist.group.WORLD if is_sharded(model) else model.process_group
    return group


def _world() -> int:
    import torch.distributed as dist

    return int(dist.get_world_size())


def is_repeated(iterator: object) -> bool:
    """Whether `itertools.cycle` has it, and will hand out the same batches again."""
    return any(isinstance(each, itertools.cycle) for each in gc.get_referrers(iterator))


def loader_flaw(loader: DataLoader[Any]) -> Reason | None:
    """Why a loader cannot be divided unevenly."""
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        return Reason(
            "iterable-dataset",
            "loader",
            "the data set is an IterableDataset, whose samples have no index; use a map-style "
            "Dataset (with __getitem__ and __len__)",
        )
    if type(loader) is not DataLoader:
        name = type(loader).__name__
        return Reason("own-loader", "loader", f"{name} is not torch's own DataLoader; use that")
    if loader.batch_sampler is None:
        return Reason("no-batches", "loader", "the DataLoader makes no batches; give batch_size")
    try:
        len(loader.batch_sampler)
    except TypeError:
        return Reason(
            "endless-sampler", "loader", "the sampler has no length; give it a method __len__"
        )
    return None


class _Pass:
    """One pass over a loader: plain at first, divided by the schedule once the job is elastic.

    What the script does (its sampler, its data set) is called outside of the fence, so that its
    errors are its own. It has many attributes because the loader draws batches ahead: what it was
    handed, what the script has taken, and what was trained on are counted apart."""

    def __init__(self, job: ElasticJob, loader: DataLoader[Any]) -> None:
        self._job, self.loader = job, loader
        self._own: Iterator[Any] = iter(())
        self._share: Share | None = None
        """It is None until the pass is divided."""
        self.forwards = self.backwards = self.trained = self.stepped = 0
        """`forwards` counts passes of models, to train them, on its batches; `trained` and
        `stepped` count batches after which there was a backward pass, or a step, before the next
        batch was drawn."""
        self._before = 0, 0
        self.samples = 0
        """The latest batch has so many."""
        self.iterator: Callable[[], object] = lambda: None
        """What the script iterates over, if it has it still."""
        self._number = 0
        self._trains = False
        self._handed: deque[tuple[int, list[Index]]] = deque()
        """These were handed out to the loader, not yet to the script: (iteration, samples)."""
        self._position = 0
        self._begun = 0

    def batches(self) -> Iterator[Any]:
        job, count, since = self._job, 0, self._job.sure(self._job.marks)
        self._own = iter(self.loader.batch_sampler)
        self._trains = getattr(self.loader, "_kilter_trains", False) and job.share is not None
        loader = job.sure(_over, self.loader, self)
        whole, first = False, True
        job.passes.append(self)
        self._before = 0, job.steps
        try:
            while True:
                for batch in self._one_stretch(loader, first):
                    if self._share is not None:
                        job.sure(self._advance, self._handed[0][0])
                    self.samples = len(self._handed.popleft()[1])
                    job.source = self
                    job.guard.run(job.losses.next_batch)
                    yield batch
                    count += 1
                    self._end(since, count)
                first = False
                if not self._waits():
                    break
            whole = True
        finally:
            job.passes.remove(self)
            if self._share is not None:
                job.guard.run(
                    job.sure,
                    self._share.end_pass if whole else self._share.leave_pass,
                    self._number,
                )

    def _one_stretch(self, loader: Any, first: bool) -> Iterator[Any]:
        """Batches until the pass ends or the rank's ratio is 0. A further one must not draw from
        the script's random numbers."""
        import torch

        if first:
            return iter(loader)
        state = torch.get_rng_state()
        batches: Iterator[Any] = iter(loader)
        torch.set_rng_state(state)
        return batches

    # The batch sampler of the loader: `iter(self)`.

    def __iter__(self) -> Iterator[list[Index]]:
        while (samples := self._next()) is not None:
            yield samples

    def _next(self) -> list[Index] | None:
        if self._trains:
            # Not before: without kilter, too, a sampler draws its random numbers when the first
            # batch is asked for, after the loader has drawn its own.
            self._trains = False
            if not self._job.sure(self._job.divides_another, self.loader):
                self._convert([])
        if self._share is None:
            samples = next(self._own, None)
            if samples is None:
                return None
            samples = list(samples)
            self._handed.append((self._position, samples))
            self._position += 1
            return samples
        while self._position < self._share.end_of_pass:
            found = self._job.sure(self._share.next_samples, self._position)
            if found is None:
                return None
            self._position += 1
            if found:
                self._handed.append((self._position - 1, found))
                return found
        return None

    # Around each batch.

    def _advance(self, iteration: int) -> None:
        """Begin an iteration, after those in which the rank had an empty shard."""
        assert self._share is not None
        while self._begun <= iteration:
            self._share.begin(self._begun)
            self._job.guard.run(self._job.begins, self._begun)
            self._begun += 1

    def _end(self, since: tuple[int, int, int], count: int) -> None:
        job = self._job
        backwards, steps = self._before
        self.trained += self.backwards > backwards
        self.stepped += job.steps > steps
        self._before = self.backwards, job.steps
        if self._share is not None:
            job.guard.run(job.divided_batch_ended, job.steps > steps)
            job.sure(self._share.end, self._begun - 1)
        elif job.refused is None and job.guard.ask(job.trains, self, since, count) == [True]:
            self.loader._kilter_trains = True
            self._convert([samples for _, samples in self._handed])

    def _convert(self, handed: list[list[Index]]) -> None:
        """Exchange with the other ranks what is still to come of this pass."""
        job = self._job
        length = len(self.loader.batch_sampler)
        rest = [list(samples) for samples in itertools.islice(self._own, length)]
        drawn = [*handed, *rest]
        self._own = iter(rest)
        if job.share is None:
            job.guard.run(job.attach, drawn)
        batches = job.sure(job.draw, drawn)
        if batches is not None and batches.count > 0:
            job.sure(self._divide, batches, handed)

    def _divide(self, batches: GlobalBatches, handed: list[list[Index]]) -> None:
        """The rest of the pass follows the schedule."""
        job = self._job
        share = job.share
        assert share is not None
        share.begin_pass(batches)
        self._handed = deque((share.iteration + i, samples) for i, samples in enumerate(handed))
        self._position = share.iteration + len(handed)
        self._begun = share.iteration
        self._share, self._number = share, share.pass_number
        job.divided = self
        job.describe(batches.size(share.iteration))

    def _waits(self) -> bool:
        """After a stretch: whether the pass goes on for this rank, after a time of idleness."""
        job, share = self._job, self._share
        if share is None:
            return False
        job.sure(self._advance, self._position - 1)  # an empty shard at the end
        if self._position >= share.end_of_pass:
            return False
        job.sure(share.leave, self._position)
        while (found := job.sure(share.awaited, self._position)) is None:
            time.sleep(POLL_S)
        back, goes_on = found
        job.sure(share.come_back, back, self._position)
        self._position = self._begun = back
        return goes_on


def _over(loader: DataLoader[Any], batch_sampler: Any) -> Any:
    """The same loader over another batch sampler."""
    from torch.utils.data import DataLoader

    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    again = DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **workers,
    )
    again._kilter_own = True
    return again

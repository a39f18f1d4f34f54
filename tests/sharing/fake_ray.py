"""The calls of Ray that `kilter share run --ray` makes, in this process: actors are threads."""

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace


class RayError(Exception):
    pass


class FakeRay:
    """A cluster of nodes {address: resources}. `lost` are ranks whose actor is gone by `read`."""

    def __init__(self, nodes, free=None, lost=()):
        self._nodes, self._free, self._lost = nodes, free, lost
        self.asked = self.given_back = None
        self.actors = []
        self.ended = False
        self.pool = ThreadPoolExecutor(16)
        self.exceptions = SimpleNamespace(RayError=RayError)
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, i: i)
        self.util = SimpleNamespace(
            placement_group=self._reserve,
            remove_placement_group=self._remove,
            get_node_ip_address=lambda: next(iter(nodes)),
            scheduling_strategies=strategies,
        )

    def where(self, number):
        """Of a shared GPU by its name, else GPU after GPU, node after node."""
        named = [name for name in self.asked[number] if name.startswith("node:")]
        if named:
            return named[0].removeprefix("node:"), []
        places = [(a, [str(g)]) for a, r in self._nodes.items() for g in range(int(r["GPU"]))]
        return places[number]

    def nodes(self):
        alive = [(address, resources, True) for address, resources in self._nodes.items()]
        return [
            {"NodeManagerAddress": address, "Resources": resources, "Alive": alive}
            for address, resources, alive in [*alive, ("10.9.9.9", {"GPU": 64.0}, False)]
        ]

    def available_resources(self):
        return self._free or {}

    def _reserve(self, bundles, strategy):
        assert strategy == "PACK"
        self.asked = bundles
        return SimpleNamespace(wait=lambda timeout_s: self._free is None)

    def _remove(self, group):
        self.given_back = True

    def shutdown(self):
        self.ended = True

    def remote(self, kind):
        return SimpleNamespace(options=lambda **options: _Maker(self, kind, options))

    def get(self, answers, timeout=None):
        if isinstance(answers, list):
            return [answer.result(timeout) for answer in answers]
        return answers.result(timeout)

    def wait(self, answers, num_returns, timeout):
        assert num_returns == 1
        done, left = wait(answers, timeout, FIRST_COMPLETED)
        return list(done), list(left)


class _Maker:
    def __init__(self, ray, kind, options):
        self._ray, self._kind, self.options = ray, kind, options

    def remote(self):
        actor = _Actor(self._ray, self._kind(), len(self._ray.actors), self.options)
        self._ray.actors.append(actor)
        return actor


class _Actor:
    def __init__(self, ray, inner, number, options):
        self._ray, self.inner, self.number, self.options = ray, inner, number, options

    def __getattr__(self, name):
        def remote(*arguments):
            if name == "where":
                return self._ray.pool.submit(self._ray.where, self.number)
            if name == "read" and self.number in self._ray._lost:
                lost = Future()
                lost.set_exception(RayError("the actor is dead"))
                return lost
            return self._ray.pool.submit(getattr(self.inner, name), *arguments)

        return SimpleNamespace(remote=remote)

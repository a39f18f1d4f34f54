"""The one lease of a run: taken when the first controller needs it, restored by the session."""

from __future__ import annotations

from kilter.core.setting import Setting
from kilter.device.protocol import Device
from kilter.lease.lease import Lease


class RunLease:
    """`held` is None until `take`. `found` is the setting that the run began with; what a dead job
    had left is put back when the lease is taken, so only then it is certain."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.found = device.settings()
        self.held: Lease | None = None

    def take(self) -> Lease:
        """The lease of the run's device. Raises what `Lease` raises."""
        if self.held is None:
            lease = Lease(self._device)
            lease.__enter__()
            self.held, self.found = lease, lease.found
        return self.held

    def restore(self) -> tuple[Setting, bool, str | None]:
        """The setting afterwards, whether it is as found, and what the user has to know of it."""
        if self.held is None:
            return self.found, True, None
        outcome = self.held.restore()
        why_not = outcome.reason if not outcome.restored or outcome.left else None
        return outcome.after or self.found, outcome.restored, why_not

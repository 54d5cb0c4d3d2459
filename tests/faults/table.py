"""All planted faults, by area."""

from tests.faults import control, core, daemon, engines, guard, leases, probes, recipes, residency, sharing, store, ui
from tests.faults.fault import Fault

AREAS: dict[str, tuple[Fault, ...]] = {
    "core": core.FAULTS,
    "control": control.FAULTS,
    "guard": guard.FAULTS,
    "sharing": sharing.FAULTS,
    "leases": leases.FAULTS,
    "engines": engines.FAULTS,
    "store": store.FAULTS,
    "daemon": daemon.FAULTS,
    "recipes": recipes.FAULTS,
    "residency": residency.FAULTS,
    "probes": probes.FAULTS,
    "ui": ui.FAULTS,
}
ALL = tuple(fault for faults in AREAS.values() for fault in faults)

"""Find devices by the names that users type, choose the vendor of a request, and reject impossible requests. All
devices of a request are of one vendor. Integrated graphics are used only where a request names them, or without any
others.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Device, Problem, Snapshot, Vendor
from gpuyard.model.units import format_count, format_size
from gpuyard.policy.linked_sets import best_set, conditions_of, sets_text
from gpuyard.policy.machine import is_of_kind


def choose_vendor(  # noqa: PLR0913 - a request, and what it may get
    need: Need,
    candidates: Sequence[Device],
    snapshot: Snapshot,
    *,
    banned: Collection[str] = (),
    preferred: Vendor | None = None,
    names_devices: bool = False,
) -> tuple[Need, list[Device]]:
    """Return the need with the vendor of its devices, and the candidates that suit it: of the usable devices, those
    that the request's environment shows, or that it names.

    The vendor is the one that the need names, else `preferred` (the configuration's), else the one with the largest
    discrete device. Unhealthy devices count there: a fault must not move jobs to another vendor.
    """
    unhealthy = () if names_devices else (each for each in snapshot.unsplit_devices() if not each.healthy)
    known = (each for each in (*candidates, *unhealthy) if each.id not in banned)
    allowed = [each for each in known if is_of_kind(need, each)]
    chosen = _with_vendor(need, allowed, snapshot, preferred, names_devices=names_devices)
    return chosen, [each for each in candidates if each.id not in banned and is_of_kind(chosen, each)]


def _with_vendor(
    need: Need, allowed: Sequence[Device], snapshot: Snapshot, preferred: Vendor | None, *, names_devices: bool
) -> Need:
    vendors = dict.fromkeys(each.vendor for each in allowed)
    if names_devices:
        if len(vendors) > 1:
            raise UserError(
                f"{_list_labels(allowed, snapshot)} are GPUs of {len(vendors)} vendors",
                hint="a program gets GPUs of one vendor: name those of one",
            )
        return replace(need, vendor=next(iter(vendors), need.vendor)) if snapshot.is_mixed else need
    is_open = need.vendor is None and need.model is None
    is_preference_needed = is_open and (snapshot.is_mixed or preferred not in vendors)
    vendor = need.vendor or (preferred if is_preference_needed else None)
    if vendor is None and snapshot.is_mixed and allowed:
        vendor = max(allowed, key=lambda each: (not each.is_integrated, each.memory_total_mb or 0.0)).vendor
    left = [each for each in allowed if vendor in (None, each.vendor)]
    is_named = not is_open or preferred is not None
    others = left if is_named else snapshot.unsplit_devices()
    has_choice = any(each.is_integrated for each in left) and not all(each.is_integrated for each in others)
    return replace(need, vendor=vendor, only_discrete=has_choice)


def check_possible(need: Need, candidates: Sequence[Device], snapshot: Snapshot) -> None:
    """Raise UserError for a request that would wait for ever: too few devices, or too little memory on them."""
    kind = "GPU" if need.vendor is None else f"{need.vendor} GPU"
    if len(candidates) < need.devices:
        hint = "`gpuyard devices` lists all GPUs; CUDA_VISIBLE_DEVICES or a ban may exclude some"
        if need.vendor is not None or need.only_discrete:
            hint += (
                ". A program gets GPUs of one vendor: --vendor (in a script: vendor=) and vendor under [devices] in "
                "the configuration choose it; integrated graphics have to be named"
            )
        raise UserError(
            f"{format_count(need.devices, kind)} needed, but only {len(candidates)} can be used{_counts(snapshot)}",
            hint=hint,
            code="impossible",
        )
    needed = need.required_mb or 0.0
    sizes = [device.memory_total_mb for device in candidates]
    large = [size for size in sizes if size is None or size >= needed]
    if len(large) < need.devices:
        largest = format_size(max(size for size in sizes if size is not None))
        found = f"{len(large)} of {need.devices} {kind}s have" if large else f"no {kind} has"
        raise UserError(
            f"{found} {format_size(needed)}; the largest has {largest}{_counts(snapshot)}",
            hint="lower --vram (in a script: vram= or memory_free_threshold_gb=), or name other GPUs; "
            "`gpuyard devices` shows the memory of each",
            code="impossible",
        )
    wanted = conditions_of(need)
    ids = [each.id for each in candidates if each.memory_total_mb is None or each.memory_total_mb >= needed]
    if wanted.are_any and best_set(snapshot.topology, ids, wanted) is None:
        found = sets_text(snapshot.topology, ids, snapshot.labels, wanted) or "none that are known to be"
        raise UserError(
            f"{format_count(need.devices, 'GPU')} {wanted} needed; this machine has {found}",
            hint="ask for fewer GPUs, or leave out --linked and --same-node (in a script: linked=, same_node=); "
            "`gpuyard devices --topology` shows all links",
            code="impossible",
        )


def silent_probe(vendor: Vendor | None, snapshot: Snapshot) -> Problem | None:
    """Return the problem of a probe for which this request has to wait, as no usable GPU but integrated is known."""
    usable = (each for each in snapshot.usable_devices() if vendor in (None, each.vendor))
    if not all(each.is_integrated for each in usable):
        return None
    return next((each for each in snapshot.silent if vendor in (None, each.vendor)), None)


def refuse_while_silent(vendor: Vendor | None, snapshot: Snapshot) -> None:
    """Raise EnvironmentFault while a probe that this request needs does not answer."""
    silent = silent_probe(vendor, snapshot)
    if silent is not None:
        hint = f"{silent.hint or '`gpuyard doctor` says more'}; then try again"
        raise EnvironmentFault(f"no usable GPU: {silent.sentence}", hint=hint)


def _counts(snapshot: Snapshot) -> str:
    """Return how many usable devices of each kind there are; empty on a machine with devices of one kind."""
    kinds = Counter(
        f"{each.vendor}{' (integrated)' if each.is_integrated else ''}" for each in snapshot.usable_devices()
    )
    texts = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
    return f"; this machine has {', '.join(texts)}" if len(texts) > 1 or snapshot.is_mixed else ""


def _list_labels(devices: Sequence[Device], snapshot: Snapshot) -> str:
    return ", ".join(snapshot.label(each.id) for each in devices)


def find_devices(names: Sequence[int | str], snapshot: Snapshot, vendor: Vendor | None = None) -> tuple[str, ...]:
    """Return the ids of usable devices that are given as labels, indexes, ids, or prefixes of ids. An index that
    devices of several vendors have is refused, unless `vendor` says which is meant."""
    usable = snapshot.usable_devices()
    return tuple(_find_device(name, usable, snapshot, vendor) for name in names)


def find_all_devices(names: Sequence[int | str], snapshot: Snapshot) -> tuple[str, ...]:
    """Return ids as `find_devices` does, also of unhealthy devices and of cards that are split into parts."""
    split = {device.parent for device in snapshot.devices}
    devices = sorted(snapshot.devices, key=lambda device: device.id not in split)
    return tuple(dict.fromkeys(_find_device(name, devices, snapshot) for name in names))


def _find_device(name: int | str, devices: Sequence[Device], snapshot: Snapshot, vendor: Vendor | None = None) -> str:
    exact = [each for each in devices if str(name) in (each.id, snapshot.labels.get(each.id))]
    matching = exact or [each for each in devices if matches_name(name, each)]
    if len({each.vendor for each in matching}) > 1:
        matching = [each for each in matching if vendor in (None, each.vendor)]
    if not matching:
        labels = snapshot.labels
        known = (f"{labels[each.id]} ({each.id})" if each.id in labels else each.id for each in devices)
        raise UserError(f"there is no GPU '{name}'", hint=f"there are: {', '.join(known) or 'none'}")
    if len({each.vendor for each in matching}) > 1:
        meant = _list_labels(matching, snapshot).replace(", ", " or ")
        raise UserError(f"'{name}' is a GPU of {len(matching)} vendors", hint=f"write {meant}")
    return matching[0].id


def matches_name(name: int | str, device: Device) -> bool:
    """Return whether `name` is the device's index, its id, or a prefix of its id with more than four characters."""
    text = str(name)
    return text in (str(device.index), device.id) or (len(text) > 4 and device.id.startswith(text))


def banned_ids(names: Sequence[int | str], models: Sequence[str], snapshot: Snapshot) -> tuple[str, ...]:
    """Return the ids of devices that are banned by label, index (of any vendor), id, or a part of their model."""
    return tuple(
        device.id
        for device in snapshot.devices
        if any(str(name) == snapshot.labels.get(device.id) or matches_name(name, device) for name in names)
        or any(model and str(model) in (device.name or "") for model in models)
    )

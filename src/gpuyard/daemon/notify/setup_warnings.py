"""Warnings at submission about notifications that could not be delivered."""

from gpuyard.config import load_config
from gpuyard.core.job.job import JobSpec
from gpuyard.core.notify.subscriptions import is_url
from gpuyard.daemon.notify.send_message import apprise_missing, has_apprise
from gpuyard.errors import UserError


def setup_warnings(spec: JobSpec) -> list[str]:
    if not spec.notify:
        return []
    configured = _configured_targets()
    targets = [target for each in spec.notify for target in (configured if each.target is None else (each.target,))]
    warnings = []
    if any(each.target is None for each in spec.notify) and not configured:
        warnings.append("--notify has no target and [notify] in config.toml has none: no notification will be sent")
    if any(map(is_url, targets)) and not has_apprise():
        warnings.append(apprise_missing())
    return warnings


def _configured_targets() -> tuple[str, ...]:
    try:
        return load_config().notify.to
    except UserError:  # the daemon keeps the settings it read before and has logged the error
        return ()

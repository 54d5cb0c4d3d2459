"""What a person should know who has just asked to be told of a job, and would never hear of it."""

from gpuyard.config import load_config
from gpuyard.core.job.job import JobSpec
from gpuyard.core.notify.subscriptions import is_url
from gpuyard.daemon.notify.send_message import apprise_missing, has_apprise
from gpuyard.errors import UserError


def cautions(spec: JobSpec) -> list[str]:
    if not spec.notify:
        return []
    configured = _configured()
    targets = [target for wish in spec.notify for target in (configured if wish.target is None else (wish.target,))]
    found = []
    if any(wish.target is None for wish in spec.notify) and not configured:
        found.append("--notify names no target, and the configuration's [notify] has none: nobody is told")
    if any(map(is_url, targets)) and not has_apprise():
        found.append(apprise_missing())
    return found


def _configured() -> tuple[str, ...]:
    try:
        return load_config().notify.to
    except UserError:  # the daemon goes on with what it said before, and has told of it
        return ()

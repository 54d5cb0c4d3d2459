"""The id of one job, as it is typed."""

from gpuyard.errors import UserError


def job_path(word: str) -> str:
    """Where the daemon answers about this job."""
    if not word.isascii() or not word.isdigit():
        raise UserError(
            f"'{word}' is not the id of a job", hint="it is a number, such as 17; `gpuyard queue` shows them"
        )
    return f"/jobs/{int(word)}"

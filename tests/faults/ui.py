"""Faults of the user interfaces."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        id="ui-wait-hides-failures",
        file="src/gpuyard/ui/cli/jobs/wait.py",
        old='    return EXIT_JOB_CANCELLED if all(job["state"] == "cancelled" for job in jobs) else EXIT_JOB_FAILED\n',
        new="    return 0\n",
        breaks="A script that waits for jobs continues as if failed jobs had succeeded.",
        near=("tests/integration/test_queue_cli_waiting.py::test_wait_lists_failed_jobs_and_reports_a_timeout",),
    ),
    Fault(
        id="ui-names-are-taken-for-html",
        file="src/gpuyard/ui/web/dom.js",
        old="  if (node.textContent !== shown) node.textContent = shown;\n",
        new="  if (node.textContent !== shown) node.innerHTML = shown;\n",
        breaks="The name of a job runs as a script in the browser of a user who opens the page.",
        near=("tests/integration/web/test_page_queue.py::test_names_and_commands_with_html_are_shown_as_text",),
    ),
)

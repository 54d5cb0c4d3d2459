"""The queue's commands as real processes, against a stand-in that answers as the daemon would."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.queue_command import GPUYARD, run, run_here, run_on_terminal
from tests.fakes.queue_standin import ReceivedRequest, Refusal, StandIn, attempt, job, page, row

SUBMITTED = {"ids": "18-117", "first": 18, "last": 117, "count": 100, "notes": []}


@pytest.fixture
def daemon(own_home: Path) -> Iterator[StandIn]:
    with StandIn(own_home) as stand_in:
        yield stand_in


def test_submit_sends_command_options_directory_and_environment_and_prints_the_ids(
    daemon: StandIn, tmp_path: Path
) -> None:
    daemon.answers["POST /submissions"] = SUBMITTED
    (tmp_path / "train.py").touch()
    typed = ["--vram", "8G", "--hold", "--sweep", "a=1,2", "--sweep=b=3", "--", "python", "train.py", "--json"]
    result = run("submit", *typed, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "18-117\n", "")
    (asked,) = daemon.requests
    assert asked.body["command"] == ["python", "train.py", "--json"]
    assert asked.body["options"] == {"vram": "8G", "hold": True, "sweep": ["a=1,2", "b=3"]}
    assert asked.body["cwd"] == str(tmp_path)
    assert asked.body["environment"].items() >= {"PATH": os.environ["PATH"]}.items()
    assert len(bytes.fromhex(asked.body["token"])) == 16


def test_a_submission_on_a_terminal_says_how_to_follow_it(daemon: StandIn) -> None:
    daemon.answers["POST /submissions"] = {**SUBMITTED, "ids": "18", "last": 18, "count": 1}
    shown = run_on_terminal("submit", "--", "true", columns=80)
    assert shown == "job 18 submitted; follow it with: gpuyard logs -f 18\r\n"
    daemon.answers["POST /submissions"] = SUBMITTED
    shown = run_on_terminal("submit", "--array", "0-99", "--", "true", columns=80)
    assert shown == "jobs 18-117 submitted; watch them with: gpuyard queue 18-117\r\n"


def test_submit_sends_an_environment_and_a_command_that_are_not_utf8(daemon: StandIn) -> None:
    daemon.answers["POST /submissions"] = SUBMITTED
    subprocess.run([*GPUYARD, "submit", b"caf\xe9"], env={**os.environb, b"PLACE": b"\xff"}, check=True, timeout=90)
    assert daemon.requests[0].body["environment"]["PLACE"] == "\udcff"
    assert daemon.requests[0].body["command"] == ["caf\udce9"]


def test_submit_reads_a_list_of_commands_or_a_table_of_values(daemon: StandIn, tmp_path: Path) -> None:
    daemon.answers["POST /submissions"] = SUBMITTED
    (tmp_path / "file").write_text("lr,seed\n1e-3,0\n")
    assert run("submit", "--from", "file", cwd=tmp_path).returncode == 0
    assert run("submit", "--from", "-", text="true\n").returncode == 0
    (tmp_path / "sub").mkdir()
    assert run("submit", "--from", "file", "--cwd", "sub", "--", "train", "{lr}", cwd=tmp_path).returncode == 0
    listed, piped, table = (asked.body for asked in daemon.requests)
    assert (listed["list"], listed["table"], listed["command"]) == ("lr,seed\n1e-3,0\n", None, None)
    assert (piped["list"], piped["options"]) == ("true\n", {})
    assert (table["list"], table["table"], table["command"]) == (None, "lr,seed\n1e-3,0\n", ["train", "{lr}"])
    assert table["cwd"] == str(tmp_path / "sub")


def test_stdin_is_relative_to_the_shells_directory_not_to_cwd(daemon: StandIn, tmp_path: Path) -> None:
    daemon.answers["POST /submissions"] = SUBMITTED
    (tmp_path / "input.txt").touch()
    assert run("submit", "--cwd", "/", "--stdin", "input.txt", "--", "cat", cwd=tmp_path).returncode == 0
    assert run_here("submit", "--stdin", "/dev/null", "--", "cat").returncode == 0
    assert [asked.body["options"]["stdin"] for asked in daemon.requests] == [str(tmp_path / "input.txt"), "/dev/null"]


def test_a_dependent_job_may_name_files_that_do_not_exist_yet(daemon: StandIn, tmp_path: Path) -> None:
    daemon.answers["POST /submissions"] = SUBMITTED
    typed = ["--after", "17", "--cwd", "made", "--stdin", "made/input.txt", "--", "cat"]
    assert run("submit", *typed, cwd=tmp_path).returncode == 0
    assert daemon.requests[0].body["cwd"] == str(tmp_path / "made")
    assert daemon.requests[0].body["options"]["stdin"] == str(tmp_path / "made/input.txt")


def test_submit_says_that_a_program_is_missing_and_a_dry_run_fails(daemon: StandIn) -> None:
    daemon.answers["POST /submissions"] = SUBMITTED
    daemon.answers["POST /submissions/preview"] = {"count": 1, "varies": [], "jobs": [], "notes": []}
    missing = "gpuyard: there is no program 'pyhton' on PATH; did you mean 'python"
    result = run_here("submit", "--", "pyhton", "train.py")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (0, "18-117\n", 1)
    assert result.stderr.startswith(missing)
    assert "`gpuyard cancel 18-117` takes it back" in result.stderr
    result = run_here("submit", "--dry-run", "--", "pyhton", "train.py")
    assert (result.returncode, result.stderr.startswith(missing)) == (2, True)
    assert run_here("submit", "--dry-run", "--", "true").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "--time-limit", "5", "min", "--", "true"], "write --time-limit 5min"),
        (["submit", "--vram", "8G"], "gpuyard submit -- python train.py"),
        (["submit", "--from", "nowhere.txt"], "nowhere.txt"),
        (["submit", "--vrma", "8G", "--", "true"], "--vram"),
        (["cancel"], "17-20"),
        (["suspend"], "17-20"),
        (["resume"], "17-20"),
        (["estimates", "train.py"], "gpuyard estimates forget TEXT"),
        (["estimates", "forget"], "gpuyard estimates forget train.py"),
        (["estimates", "forget", "train.py", "--all"], "which estimates"),
        (["estimates", "--all"], "--all needs `forget`"),
        (["estimates", "--limit", "few"], "--limit 100"),
        (["priority", "17"], "gpuyard priority 17 10"),
        (["priority", "17", "high"], "'high'"),
        (["show"], "name=big"),
        (["submit", "--cwd", "nowhere", "--", "true"], "no directory 'nowhere'"),
        (["submit", "--stdin", "nowhere.txt", "--", "true"], "no file 'nowhere.txt'"),
        (["submit", "--stdin", ".", "--", "true"], "no file '.'"),
        (["submit", "--name", "", "--", "true"], "--name is empty"),
        (["queue", "--limit", "many"], "--limit 100"),
        (["logs", "-n", "few", "17"], "--lines 4"),
        (["clean", "--older-than", "long"], "10m"),
        (["wait", "--timeout", "soon"], "10m"),
        (["daemon", "reload"], "it can be start, stop, restart, status, run, adopt"),
        (["pause", "17"], "17"),
        (["submti", "--", "true"], "did you mean `gpuyard submit`?"),
    ],
)
def test_a_usage_error_names_the_correct_form(
    daemon: StandIn,
    arguments: list[str],
    message: str,
) -> None:
    result = run_here(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert [asked.route for asked in daemon.requests if asked.route.startswith("POST")] == []


def test_with_json_an_error_is_an_object_with_a_code_on_standard_output(daemon: StandIn) -> None:
    daemon.answers["POST /submissions"] = Refusal(404, "there is no job 9", "`gpuyard queue --all` lists all jobs")
    result = run_here("submit", "--json", "--", "true")
    error = {"code": "not_found", "message": "there is no job 9", "hint": "`gpuyard queue --all` lists all jobs"}
    assert (result.returncode, json.loads(result.stdout)) == (3, {"error": error})
    assert result.stderr == "gpuyard: there is no job 9\n  `gpuyard queue --all` lists all jobs\n"
    assert run_here("submit", "--", "true", "--json").stdout == ""


@pytest.mark.parametrize(("status", "returned"), [(400, 2), (404, 3), (409, 2), (503, 1), (507, 1)])
def test_an_error_of_the_daemon_is_printed_with_its_hint(daemon: StandIn, status: int, returned: int) -> None:
    daemon.answers["POST /submissions"] = Refusal(status, "'8Q' is not a size", "write it as 8G")
    result = run_here("submit", "--vram", "8Q", "--", "true")
    assert (result.returncode, result.stdout) == (returned, "")
    assert result.stderr == "gpuyard: '8Q' is not a size\n  write it as 8G\n"


def test_notes_of_the_daemon_go_to_standard_error(daemon: StandIn) -> None:
    daemon.answers["POST /submissions"] = {**SUBMITTED, "ids": "17", "notes": ["no GPU has 80 GB"]}
    result = run_here("submit", "true")
    assert (result.stdout, result.stderr) == ("17\n", "gpuyard: no GPU has 80 GB\n")
    assert json.loads(run_here("submit", "--json", "true").stdout)["first"] == 18


def test_queue_in_a_pipe_is_a_plain_table(daemon: StandIn) -> None:
    daemon.answers["GET /jobs"] = page(
        row(1, "running", name="big", gpu_labels=["0", "1"], elapsed_s=200.0),
        row(2, reason="GPU 0 is held by ada, pid 7"),
        row(3, "failed", status=3, outcome="failed", ended_at="2026-01-02T03:04:06.000Z", elapsed_s=1.0),
        running=1, queued=1, failed=1,
    )  # fmt: skip
    head, headings, *rows = run("queue", env={**os.environ, "PYTHONUTF8": "1"}).stdout.splitlines()
    assert head == "1 running · 1 queued · 1 failed"
    assert headings.split() == ["ID", "STATE", "COMMAND", "GPU", "VRAM", "PRIO", "TIME", "WHY"]
    assert rows[0].split() == ["1", "running", "big", "0,1", "8", "GB", "0", "3m", "20s"]
    assert rows[1].endswith("GPU 0 is held by ada, pid 7")
    assert rows[2].endswith("1s  exit status 3")


def test_queue_on_a_terminal_fits_its_width_and_has_colours(daemon: StandIn) -> None:
    daemon.answers["GET /jobs"] = page(*(row(n, reason="r" * 99) for n in range(1, 9)), row(9, "failed"), queued=8)
    output = run_on_terminal("queue", columns=70)
    assert "○ queued" in output
    assert "\x1b[31m✗ failed" in output
    plain = [line.replace("\x1b[0m", "").partition("m")[2] or line for line in output.splitlines() if "\x1b" in line]
    assert all(len(line) <= 70 for line in [*plain, *(line for line in output.splitlines() if "\x1b" not in line)])
    assert daemon.requests[0].query == {"fold": "1", "limit": "20"}


def test_queue_sends_its_filters_and_counts_the_jobs_it_does_not_print(daemon: StandIn) -> None:
    daemon.answers["GET /jobs"] = lambda asked: page(
        *(row(int(asked.query.get("after", 1)) + n) for n in range(2)), following="7", queued=1000
    )
    assert "and 996 more" in run_here("queue", "--limit", "4").stdout
    assert [asked.query for asked in daemon.requests] == [
        {"fold": "1", "limit": "4"},
        {"fold": "1", "limit": "2", "after": "7"},
    ]
    run_here("queue", "17-20", "name=big", "--state", "failed", "--all", "--limit", "1")
    assert daemon.requests[-1].query == {"ids": "17-20 name=big", "state": "failed", "all": "1", "limit": "1"}
    assert len(json.loads(run_here("queue", "--limit", "6", "--json").stdout)["jobs"]) == 6


def test_queue_says_that_it_is_empty_or_paused_and_what_to_do(daemon: StandIn) -> None:
    daemon.answers["GET /jobs"] = {**page(), "paused": True, "draining": True}
    output = run_here("queue").stdout
    assert "The queue is empty" in output
    assert "gpuyard submit -- " in output
    assert output.count("gpuyard unpause") == 2


def test_show_prints_values_of_the_environment_only_on_request(daemon: StandIn, tmp_path: Path) -> None:
    shown_job = job(
        17,
        "failed",
        attempts=[attempt(1, tmp_path)],
        after=[{"id": 3, "kind": "ok", "state": "succeeded", "met": True}],
    )
    secrets = {**shown_job, "environment": {"TOKEN": "hush", "HOME": "/root"}}
    daemon.answers["GET /jobs/17"] = lambda asked: secrets if asked.query.get("environment") == "1" else shown_job
    shown = run_here("show", "17").stdout
    assert "environment: HOME TOKEN\n" in shown
    assert "command: python train.py --seed 17\n" in shown
    assert "after: 3 met" in shown
    assert ["1", "4001"] in [line.split()[:2] for line in shown.splitlines()]
    assert "environment: TOKEN=hush\n" in run_here("show", "17", "--environment").stdout
    assert json.loads(run_here("show", "17", "--json").stdout) == shown_job


def test_why_prints_the_reasons_and_the_holders(daemon: StandIn) -> None:
    holder = {"user": "bob", "pid": 99, "label": "nightly"}
    reason = {
        "kind": "no-room",
        "text": "2 GB free, 8 GB needed",
        "brief": "too little free memory",
        "remedy": "give it less",
        "device_id": "SIM-0",
        "had": 2048,
        "needed": 8192,
    }
    daemon.answers["GET /jobs/17/why"] = {
        "id": 17, "state": "queued", "summary": "job 17 waits for 1 GPU: too little free memory", "ahead": 3,
        "reasons": [{**reason, "holders": [holder, holder]}, {**reason, "device_id": "SIM-1", "holders": []}],
        "device_labels": {"SIM-0": "0", "SIM-1": None},
        "estimated_start": "2026-01-02T03:04:05.678Z", "estimate": "when job 4 ends",
    }  # fmt: skip
    summary, *_ = first = run_here("why", "17").stdout.splitlines()
    assert first == [summary, "  to change that: give it less", first[-1]]
    assert "when job 4 ends" in first[-1]
    output = run_here("why", "-v", "17").stdout
    assert output.startswith(f"{summary}\n  GPU 0, SIM-1: 2 GB free, 8 GB needed\n")
    assert output.count("bob, pid 99 (nightly)") == 1
    assert "when job 4 ends" in output


def test_history_prints_one_event_per_line(daemon: StandIn) -> None:
    event = {"id": 1, "at": "2026-01-02T03:04:05.678Z", "kind": "submit", "text": "by ada"}
    daemon.answers["GET /jobs/17/history"] = {
        "id": 17,
        "events": [event, {**event, "kind": "start", "text": "on GPU 0"}, {**event, "text": None}],
    }
    which, _, first, second, third = run_here("history", "17").stdout.splitlines()
    assert which == "job 17"
    assert first.split()[2:] == ["submit", "by", "ada"]
    assert second.split()[2:] == ["start", "on", "GPU", "0"]
    assert third.split()[2:] == ["submit"]


@pytest.mark.parametrize(
    ("typed", "route", "body", "message"),
    [
        (["cancel", "17-20"], "cancel", {"ids": "17-20"}, "cancelled 17-20"),
        (["hold", "17", "name=big"], "hold", {"ids": "17 name=big"}, "held 17-20"),
        (["release", "all"], "release", {"ids": "all"}, "released 17-20"),
        (["retry", "17"], "retry", {"ids": "17"}, "queued again 17-20"),
        (["suspend", "17"], "suspend", {"ids": "17"}, "suspending 17-20"),
        (["resume", "tag=night"], "resume", {"ids": "tag=night"}, "will resume when memory is free: 17-20"),
        (["priority", "17", "18", "-5"], "priority", {"ids": "17 18", "priority": -5}, "priority -5 for 17-20"),
    ],
)
def test_changed_jobs_go_to_standard_output_and_unchanged_ones_to_standard_error(
    daemon: StandIn, typed: list[str], route: str, body: dict[str, Any], message: str
) -> None:
    unchanged = [{"id": 21, "reason": "it is not waiting"}]
    daemon.answers[f"POST /jobs/{route}"] = changed("17-20", 4, unchanged)
    result = run_here(*typed)
    assert (result.returncode, result.stdout) == (0, f"{message}\n")
    assert "21" in result.stderr
    assert "it is not waiting" in result.stderr
    assert daemon.requests == [ReceivedRequest(f"POST /jobs/{route}", {}, body)]
    daemon.answers[f"POST /jobs/{route}"] = changed("", 0, unchanged)
    assert (run_here(*typed).returncode, run_here(*typed).stdout) == (1, "")


def changed(
    ids: str, count: int, unchanged: list[dict[str, Any]], unchanged_count: int | None = None
) -> dict[str, Any]:
    total = len(unchanged) if unchanged_count is None else unchanged_count
    return {"changed": ids, "count": count, "unchanged": unchanged[:100], "unchanged_count": total}


def finished(count: int) -> list[dict[str, Any]]:
    reasons = ("it has already failed", "it has already succeeded", "it is rejected, not held")
    states = ("failed", "succeeded", "rejected")
    return [{"id": number + 1, "state": states[number % 3], "reason": reasons[number % 3]} for number in range(count)]


@pytest.mark.parametrize(
    ("typed", "answer", "messages"),
    [
        ("all", changed("40", 1, finished(12)), ["and 12 others had finished already"]),
        ("tag=night", changed("40", 1, finished(1)), ["and 1 other had finished already"]),
        ("name=big", changed("", 0, finished(2)), ["2 had finished already"]),
        (
            "all",
            changed("40", 1, [*finished(2), {"id": 9, "state": "running", "reason": "it runs already"}]),
            ["9 is not held: it runs already", "and 2 others had finished already"],
        ),
        ("all", changed("999", 1, finished(500)), ["and 500 others did not change, some of them finished"]),
        ("1", changed("", 0, finished(1)), ["1 is not held: it has already failed"]),
    ],
)
def test_finished_jobs_of_a_selection_are_only_counted(
    daemon: StandIn, typed: str, answer: dict[str, Any], messages: list[str]
) -> None:
    daemon.answers["POST /jobs/hold"] = answer
    assert run_here("hold", typed).stderr.splitlines() == [f"gpuyard: {line}" for line in messages]


def test_the_first_20_unchanged_jobs_are_listed_and_the_rest_is_counted(daemon: StandIn) -> None:
    daemon.answers["POST /jobs/hold"] = changed("999", 1, finished(500))
    *listed_lines, last = run_here("hold", "1-999").stderr.splitlines()
    assert len(listed_lines) == 20
    assert last == "gpuyard: and 480 others did not change"


def test_priority_reports_a_job_that_already_has_it(daemon: StandIn) -> None:
    daemon.answers["POST /jobs/priority"] = changed("", 0, finished(1))
    assert run_here("priority", "1", "5").stderr == "gpuyard: 1 keeps its priority: it has already failed\n"


def test_show_counts_failures_beyond_the_retries_as_all_retries_used(daemon: StandIn) -> None:
    daemon.answers["GET /jobs/17"] = job(17, "failed", retries=1, failures=2)
    assert "retries: 1 of 1 used\n" in run_here("show", "17").stdout


def test_show_prints_the_index_only_of_a_job_that_has_one(daemon: StandIn) -> None:
    daemon.answers["GET /jobs/17"] = job(17, array=16, index=None, values={"lr": "1e-3"})
    assert "array: 16\nvalues: lr=1e-3\n" in run_here("show", "17").stdout
    daemon.answers["GET /jobs/17"] = job(17, array=16, index=3)
    assert "array: 16\nindex: 3\n" in run_here("show", "17").stdout


def listed(asked: ReceivedRequest) -> dict[str, Any]:
    """Jobs 17 to 19, two at a time."""
    ids = [17, 18, 19][int(asked.query.get("after", 0)) :][:2]
    return page(*(row(number) for number in ids), following=None if 19 in ids else "2")


def test_show_why_and_history_print_each_selected_job(daemon: StandIn) -> None:
    daemon.answers["GET /jobs"] = listed
    for number in (17, 18, 19):
        daemon.answers[f"GET /jobs/{number}"] = job(number)
        why: dict[str, Any] = {
            "id": number,
            "summary": f"job {number} runs",
            "reasons": [],
            "ahead": None,
            "estimated_start": None,
        }
        daemon.answers[f"GET /jobs/{number}/why"] = {**why, "state": "running", "estimate": ""}
        daemon.answers[f"GET /jobs/{number}/history"] = {"id": number, "events": []}
    shown = run_here("show", "name=big").stdout
    assert [line for line in shown.splitlines() if line.startswith("job: ")] == ["job: 17", "job: 18", "job: 19"]
    assert run_here("why", "17-18", "19").stdout == "job 17 runs\n\njob 18 runs\n\njob 19 runs\n"
    assert [line for line in run_here("history", "all").stdout.splitlines() if line.startswith("job ")] == [
        "job 17", "job 18", "job 19",
    ]  # fmt: skip
    asked = [asked.query["ids"] for asked in daemon.requests if asked.route == "GET /jobs"]
    assert asked == ["name=big", "name=big", "17-18 19", "17-18 19", "all", "all"]
    assert [one["id"] for one in json.loads(run_here("why", "17-19", "--json").stdout)] == [17, 18, 19]
    assert json.loads(run_here("why", "17", "--json").stdout)["id"] == 17


def test_a_selection_without_jobs_is_an_error(daemon: StandIn) -> None:
    daemon.answers["GET /jobs"] = page()
    for verb in ("show", "logs"):
        result = run_here(verb, "all")
        assert (result.returncode, result.stdout) == (3, "")
        assert "no job matches all" in result.stderr


def test_pause_unpause_and_drain_count_the_remaining_jobs(daemon: StandIn) -> None:
    left = iter([(2, {}), (0, {"pending": 1}), (0, {})])
    answer = {"paused": True, "draining": False, "counts": {}, "running": 2}
    daemon.answers["POST /pause"] = daemon.answers["POST /drain"] = answer
    daemon.answers["POST /unpause"] = {"paused": False, "draining": False, "running": 2}
    daemon.answers["GET /status"] = lambda _: dict(zip(("under_way", "counts"), next(left), strict=True))
    assert run_here("pause").stdout.startswith("paused: 2 still running")
    assert run_here("unpause").stdout == "jobs start again\n"
    assert run_here("drain").stdout.startswith("draining: 2 still running")
    assert run_here("drain", "--wait").stdout.startswith("drained")
    assert json.loads(run_here("pause", "--json").stdout)["running"] == 2


def test_clean_counts_the_removed_jobs(daemon: StandIn) -> None:
    daemon.answers["POST /clean"] = {"jobs": 3, "logs": 4, "bytes": 5 * 1048576}
    assert run_here("clean", "--older-than", "30d").stdout == "deleted 3 jobs and 4 logs (5 MB)\n"
    assert run_here("clean").returncode == 0
    asked = [each.body for each in daemon.requests if each.route == "POST /clean"]
    assert asked == [{"older_than_s": 30 * 86400}, {}]


@pytest.mark.parametrize("arguments", [["queue"], ["queue", "--json"], ["submit", "true"]])
def test_a_full_or_closed_standard_output_causes_no_traceback(daemon: StandIn, arguments: list[str]) -> None:
    daemon.answers["GET /jobs"] = page(row(1), queued=1)
    daemon.answers["POST /submissions"] = SUBMITTED
    command = " ".join([*GPUYARD, *arguments])
    full = subprocess.run(["sh", "-c", f"{command} > /dev/full"], capture_output=True, text=True, check=False)
    assert (full.returncode, full.stderr) == (1, "gpuyard: No space left on device\n")
    closed = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_terminal_without_unicode_gets_an_ascii_table(daemon: StandIn) -> None:
    daemon.answers["GET /jobs"] = page(row(1, name="数据" * 40), row(2), queued=2)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    result = run("queue", env=environment)
    assert result.returncode == 0
    assert "~" in result.stdout
    assert "2  queued" in result.stdout


@pytest.mark.parametrize("arguments", [["queue"], ["submit", "--vram", "8G", "--", "true"], ["cancel", "17"]])
@pytest.mark.usefixtures("unmeasured")
def test_a_warm_command_imports_nothing_heavy(daemon: StandIn, arguments: list[str]) -> None:
    daemon.answers["GET /jobs"] = page(row(1, elapsed_s=2.0), queued=1)
    daemon.answers["POST /submissions"] = SUBMITTED
    daemon.answers["POST /jobs/cancel"] = changed("17", 1, [])
    run_here(*arguments)  # the first one in an hour looks for other users of the GPUs
    # As the installed command does; `-m` imports importlib.
    command = [sys.executable, "-X", "importtime", "-c", "from gpuyard.ui.cli import main; main()", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "gpuyard.client.fast_http" in imported
    assert not imported & {"click", "rich", "msgspec", "json", "socket", "subprocess", "asyncio", "re"}
    assert not imported & {"importlib", "warnings", "encodings.ascii"}
    assert not imported & {"atexit", "threading"}  # then it need not take the interpreter down
    assert {name for name in imported if name.startswith("gpuyard.model.")} <= {
        "gpuyard.model",
        "gpuyard.model.submit_options",
        "gpuyard.model.option",
        "gpuyard.model.printable_text",
        "gpuyard.model.units",
    }


@pytest.mark.usefixtures("unmeasured")
def test_functions_that_are_to_be_called_at_the_exit_are_called(daemon: StandIn) -> None:
    daemon.answers["GET /jobs"] = page(row(1, elapsed_s=2.0), queued=1)
    script = "import atexit; atexit.register(print, 'the last line'); from gpuyard.ui.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", script, "queue"], capture_output=True, text=True, timeout=90, check=True
    )
    assert result.stdout.splitlines()[-1] == "the last line"


def test_completion_offers_the_verbs_options_and_choices_of_the_queue() -> None:
    def complete(typed: str) -> set[str]:
        place = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
        answer = run(env={**os.environ, "_GPUYARD_COMPLETE": "bash_complete", **place}).stdout
        return {line.partition(",")[2] for line in answer.splitlines()}

    assert complete("gpuyard su") == {"submit", "summary", "suspend"}
    assert complete("gpuyard submit --after") == {"--after", "--after-any", "--after-each", "--after-failed"}
    assert complete("gpuyard submit --vendor a") == {"amd", "apple"}
    assert complete("gpuyard daemon st") == {"start", "stop", "status"}

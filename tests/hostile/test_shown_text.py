"""Attacks with text that the victim's commands, logs and pages show: terminal escapes, line ends, markup, length."""

import json
import os
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.hostile.catalogue import attack
from tests.hostile.hostile_texts import (  # noqa: F401 - fixtures are found where they are named
    LONG,
    NASTY,
    SHOWN,
    check_bytes,
    check_strings,
    make_hostile_texts,
    make_own_home,
)
from tests.hostile.ledger_attacks import gpuyard
from tests.hostile.users import BEN, act_as
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.integration.terminal import Terminal
from tests.integration.test_metrics import dialled
from tests.integration.workspace_fixture import Workspace, make_tmux, make_workspace, make_workspaces  # noqa: F401 - fixtures are found where they are named


@attack(
    "write terminal escapes into labels, device ids, file names and command lines, for commands to print",
    now="harmless: they are shown as `\\x1b`",
)
def test_escapes_in_commands(hostile_texts: None) -> None:
    commands = [
        ("leases",), ("devices",), ("doctor",), ("watch", "--count", "1"),
        ("run", "--gpus", "2", "--wait", "0s", "true"),
    ]  # fmt: skip
    seen = b""
    for arguments in commands:
        for width in ({}, {"COLUMNS": "120"}):
            done = gpuyard(*arguments, **width)
            check_bytes(done.stdout + done.stderr, " ".join(arguments))
            seen += done.stdout
    assert SHOWN.encode() in seen


@attack(
    "the same, for commands that print JSON",
    now="harmless: invalid records are named by escaped texts",
)
def test_escapes_in_json(hostile_texts: None) -> None:
    for arguments in (("leases", "--json"), ("devices", "--json"), ("doctor", "--json")):
        done = gpuyard(*arguments)
        check_bytes(done.stdout.replace(LONG.encode(), b""), str(arguments))
        check_strings(json.loads(done.stdout), str(arguments))


@attack(
    "the same, for the daemon: reasons, the page's data and its log",
    now="harmless: they are shown as `\\x1b`",
)
def test_escapes_in_the_daemon(queue: QueueUnderTest, hostile_texts: None) -> None:
    job = queue.submit("true", gpus=2)
    queue.until_state(job, "queued")
    for path in ("/devices", "/status", "/jobs", f"/jobs/{job}", f"/jobs/{job}/why", f"/jobs/{job}/history"):
        check_strings(queue.get(path), path)
    assert SHOWN in json.dumps(queue.get(f"/jobs/{job}/why"), ensure_ascii=False).replace("\\\\", "\\")
    for arguments in (("why", str(job)), ("queue",), ("show", str(job)), ("history", str(job)), ("daemon", "status")):
        done = gpuyard(*arguments)
        check_bytes(done.stdout + done.stderr, " ".join(arguments))
    assert queue.daemon is not None
    check_bytes(queue.daemon.log.encode(), "the daemon's log")


@attack(
    "the same, for `gpuyard top`, also as markup of its library",
    now="harmless: texts are never read as markup",
)
def test_escapes_in_top(queue: QueueUnderTest, hostile_texts: None) -> None:
    job = queue.submit("true", gpus=2, name="waits")
    queue.until_state(job, "queued")
    terminal = Terminal([sys.executable, "-m", "gpuyard", "top"], {"COLUMNS": "200", "LINES": "50"})
    try:
        shown = terminal.read_until("waits")
    finally:
        terminal.type("q")
        _, rest = terminal.end()
    check_bytes(f"{shown}{rest}".replace("\r", "\n").encode(), "top")


@attack("give a process a command line of 120 kB", now="harmless: it is shortened")
def test_long_command_line(hostile_texts: None) -> None:
    for arguments in (("devices",), ("leases",)):
        shown = gpuyard(*arguments).stdout
        assert b"yyy" in shown or b"sys" in shown
        assert max(map(len, shown.splitlines())) < 2000
    (use,) = json.loads(gpuyard("leases", "--json").stdout)["foreign"]
    assert LONG in use["command"]


@attack(
    "the same, for `/metrics`: forge a line, or a label of a device",
    now="harmless: only devices of the machine have lines, and labels are escaped",
)
def test_escapes_in_metrics(queue: QueueUnderTest, hostile_texts: None) -> None:
    with dialled(queue) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read()
    check_bytes(text, "/metrics")
    samples = [one for each in text_string_to_metric_families(text.decode()) for one in each.samples]
    assert all(one.name.startswith("gpuyard_") for one in samples)
    assert {one.labels["device"] for one in samples if "device" in one.labels} == {"SIM-0", "SIM-1"}
    assert [one.value for one in samples if one.labels == {"whose": "others"}] == [1.0]


def plant_files(folder: str, names: list[str]) -> None:
    for name in names:
        with open(f"{folder}/{name}", "w") as file:
            file.write("{seed: 7, epochs: 2, lr: 0.1}\n")


@attack(
    "name files of a shared folder so that a job takes and prints the names, for the message about its failure",
    now="harmless: a message is one printable line for each fact",
)
def test_escapes_in_notifications(place: Path, own_queue: QueueUnderTest) -> None:
    data, sent = place / "data", place / "sent"
    data.mkdir()
    data.chmod(0o777)
    act_as(BEN, plant_files, str(data), [NASTY.replace("/", "_")])
    own_queue.home.mkdir(mode=0o700, exist_ok=True)
    target = f'{{ printf \'%s|\' "$GPUYARD_TITLE" "$GPUYARD_BODY"; cat; }} > {sent}.new; mv {sent}.new {sent}'
    configuration = f"[notify]\non = ['out-of-memory']\nto = [{json.dumps(target)}]\n"
    (own_queue.home / "config.toml").write_text(configuration)
    own_queue.start()
    (planted,) = os.listdir(data)
    own_queue.submit("/bin/sh", "-c", 'echo "torch.OutOfMemoryError: CUDA out of memory. $1"; exit 1', "sh", planted)
    until(sent.exists, "the message")
    shown = sent.read_bytes()
    check_bytes(shown, "the message")
    assert b"PWNED" in shown
    assert len(shown.splitlines()) < 12


@attack(
    "put configs with hostile names into a workspace folder that others can write to, for titles in tmux",
    now="harmless: names with control characters are refused, and others are shown escaped",
)
@pytest.mark.needs("tmux")
def test_escapes_in_tmux(workspace: Workspace) -> None:
    configs = workspace.folder / "configs"
    configs.chmod(0o777)
    act_as(BEN, plant_files, str(configs), [f"{NASTY.replace('/', '_')}.yml"])
    refused = workspace.scheduler("start")
    assert refused.returncode != 0
    check_bytes(refused.stdout.encode() + refused.stderr.encode(), "start")
    (planted,) = configs.iterdir()
    planted.unlink()
    act_as(BEN, plant_files, str(configs), ["a\u202e#(touch pwned)<b>.yml"])
    shown = workspace.do("start")
    workspace.until_over()
    workspace.tmux.wait_to_see("T_scheduler", "1 of 1 done")
    shown += workspace.tmux("list-panes", "-a", "-F", "#{session_name} #{window_name} #{pane_title}")
    for session in workspace.session_names():
        shown += workspace.tmux.screen(session)
    shown += workspace.do("status") + workspace.scheduler_log()
    check_bytes(shown.encode(), "tmux")
    assert "touch" in shown
    assert not list(workspace.folder.rglob("pwned"))

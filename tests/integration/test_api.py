"""`GPUScheduler` and its helpers as scripts use them, on simulated GPUs and with real processes."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuyard import GPUScheduler
from gpuyard.config import lease_dir
from gpuyard.errors import EnvironmentFault, UserError, WaitedTooLong
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.probes.simulated_devices import SimulatedUse
from gpuyard.scripting.gpu_info import (
    BANNED_GPU_NAMES,
    BANNED_GPUS,
    find_free_gpus,
    get_gpu_info,
    get_gpu_memory_usage,
    get_gpu_names,
    get_gpu_power_usage,
    get_gpu_utilization,
    get_total_num_gpus,
)
from tests.integration.conftest import Script

pytestmark = pytest.mark.usefixtures("two_gpus")


def held() -> list[str]:
    folder = lease_dir()
    leases = Ledger(folder).leases() if folder.exists() else ()
    return sorted(share.device_id for lease in leases for share in lease.shares)


def printed(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: "subprocess.Popen[str]") -> None:
    process.communicate("\n", timeout=90)


def test_a_block_leases_a_gpu_and_releases_it() -> None:
    with GPUScheduler() as gpu_ids:
        assert gpu_ids == [0]
        assert held() == ["SIM-0"]
    assert held() == []
    assert sorted(os.listdir(lease_dir())) == []


def test_several_gpus_are_leased_all_or_none(script: Script) -> None:
    with GPUScheduler(num_gpus=2) as gpu_ids:
        assert gpu_ids == [0, 1]
    other = script()
    assert printed(other) == "[0]"
    with pytest.raises(TimeoutError):
        GPUScheduler(num_gpus=2, max_wait_time=0.1).acquire()
    assert held() == ["SIM-0"]


def test_two_scripts_never_get_the_same_gpu(script: Script) -> None:
    first, second = script(), script()
    assert sorted([printed(first), printed(second)]) == ["[0]", "[1]"]
    third = script(label="third")
    finish(first)
    assert printed(third) in ("[0]", "[1]")


def test_a_script_that_is_killed_holds_nothing(script: Script) -> None:
    victim = script(num_gpus=2)
    assert printed(victim) == "[0, 1]"
    victim.send_signal(signal.SIGKILL)
    victim.wait(90)
    with GPUScheduler(num_gpus=2, max_wait_time=90) as gpu_ids:
        assert gpu_ids == [0, 1]


def test_a_timeout_reports_what_was_free_and_what_was_missing(script: Script) -> None:
    other = script(label="nightly", specific_gpus=[0])
    printed(other)
    with SimulatedUse() as usage:
        usage.allocate("SIM-1", 10240)
        with pytest.raises(WaitedTooLong) as complaint:
            GPUScheduler(max_wait_time=0.2).acquire()
    assert isinstance(complaint.value, TimeoutError)
    text = str(complaint.value)
    assert f"SIM-0: held by {Ledger(lease_dir()).leases()[0].holder.user}, pid {other.pid} (nightly)" in text
    assert "SIM-1: 14 GB free, 20 GB needed" in text
    assert held() == ["SIM-0"]
    assert not Ledger(lease_dir()).contents().tickets


def test_a_shared_lease_takes_memory_beside_others(script: Script) -> None:
    with GPUScheduler(vram="10G", specific_gpus=[0]), GPUScheduler(vram="10G", specific_gpus=[0]):
        with pytest.raises(TimeoutError, match=r"4 GB free, 10 GB needed"):
            GPUScheduler(vram="10G", specific_gpus=[0], max_wait_time=0.1).acquire()
        with pytest.raises(TimeoutError, match="held by"):
            GPUScheduler(specific_gpus=[0], memory_free_threshold_gb=1, max_wait_time=0.1).acquire()


def test_gpus_over_the_load_or_power_limit_are_not_taken() -> None:
    with SimulatedUse() as usage:
        usage.set_load("SIM-0", 50)
        with GPUScheduler() as gpu_ids:
            assert gpu_ids == [1]
        with pytest.raises(TimeoutError, match="GPU 50% > 1%"):
            GPUScheduler(specific_gpus=[0], max_wait_time=0.1).acquire()
        with pytest.raises(TimeoutError, match="power 162 W > 80 W"):
            GPUScheduler(specific_gpus=[0], utilization_threshold_percent=None, max_wait_time=0.1).acquire()
        with GPUScheduler(specific_gpus=[0], utilization_threshold_percent=60, power_threshold_w=None) as gpu_ids:
            assert gpu_ids == [0]


def test_debug_mode_takes_leases_without_health_checks() -> None:
    with SimulatedUse() as usage:
        usage.set_load("SIM-0", 100)
        usage.allocate("SIM-0", 24000)
        with GPUScheduler(specific_gpus=["SIM-0"], debug_mode=True) as gpu_ids:
            assert gpu_ids == [0]
            with pytest.raises(TimeoutError):
                GPUScheduler(specific_gpus=["SIM-0"], debug_mode=True, max_wait_time=0.1).acquire()


def test_an_exception_in_the_block_gives_the_gpu_back() -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), GPUScheduler():
            raise error
        assert held() == []


def test_blocks_nest_and_end_in_their_order() -> None:
    scheduler = GPUScheduler()
    with scheduler as outer, scheduler as inner:
        assert (outer, inner) == ([0], [1])
        assert held() == ["SIM-0", "SIM-1"]
    assert held() == []


def test_a_decorated_function_has_its_gpu_for_the_time_of_each_call() -> None:
    @GPUScheduler()
    def train(factor: int) -> tuple[int, list[str]]:
        """Doc."""
        return 21 * factor, held()

    assert train(2) == (42, ["SIM-0"])
    assert (train.__name__, train.__doc__) == ("train", "Doc.")
    assert held() == []


def test_each_thread_gets_a_gpu_of_its_own() -> None:
    scheduler = GPUScheduler(max_wait_time=90)
    both_hold = threading.Barrier(2, timeout=90)
    taken: list[list[int]] = []

    def work() -> None:
        with scheduler as gpu_ids:
            taken.append(gpu_ids)
            both_hold.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken) == [[0], [1]]
    assert held() == []


def test_a_child_forked_in_the_block_does_not_end_its_parent_s_lease() -> None:
    program = (
        "import os, sys\n"
        "from gpuyard import GPUScheduler\n"
        "from gpuyard.ledger.ledger import Ledger\n"
        "from gpuyard.config import lease_dir\n"
        "with GPUScheduler() as gpu_ids:\n"
        "    pid = os.fork()\n"
        "if pid == 0: os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(len(Ledger(lease_dir()).leases()))\n"
        "scheduler = GPUScheduler(); scheduler.acquire()\n"
        "if os.fork() == 0: scheduler.release(); os._exit(0)\n"
        "os.wait()\n"
        "print(len(Ledger(lease_dir()).leases()))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert result.stdout.split() == ["0", "1"]
    assert sorted(os.listdir(lease_dir())) == [], "a program that ends leaves no file behind"


def test_the_request_with_the_higher_priority_goes_first(script: Script) -> None:
    holder = script(num_gpus=2)
    printed(holder)
    low = script(num_gpus=2, priority=0, label="low")
    _wait_for_tickets(1)
    high = script(num_gpus=2, priority=5, label="high")
    _wait_for_tickets(2)
    finish(holder)
    assert printed(high) == "[0, 1]"
    assert [lease.holder.label for lease in Ledger(lease_dir()).leases()] == ["high"]
    finish(high)
    assert printed(low) == "[0, 1]"


def _wait_for_tickets(count: int) -> None:
    deadline = threading.Event()
    for _ in range(9000):
        if len(Ledger(lease_dir()).contents().tickets) == count:
            return
        deadline.wait(0.01)
    pytest.fail("no ticket appeared")


def test_banned_gpus_are_never_taken(own_home: Path) -> None:
    BANNED_GPUS.append(0)
    with GPUScheduler() as gpu_ids:
        assert gpu_ids == [1]
    BANNED_GPUS[:] = ["SIM-1"]
    assert find_free_gpus() == [0]
    BANNED_GPU_NAMES.append("Simulated")
    assert find_free_gpus() == []
    BANNED_GPU_NAMES.clear()
    BANNED_GPUS.clear()
    own_home.mkdir(exist_ok=True)
    (own_home / "config.toml").write_text("[devices]\nbanned = [0]\n")
    assert find_free_gpus() == [1]


def test_a_script_may_assign_a_new_list_of_banned_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_scheduler.gpu_info

    monkeypatch.setattr(gpu_scheduler.gpu_info, "BANNED_GPUS", [1])
    assert find_free_gpus() == [0]


@pytest.mark.parametrize("first", ["gpuyard", "gpuyard.scripting.gpu_info", "gpu_scheduler.gpu_info"])
@pytest.mark.parametrize("second", ["gpuyard", "gpuyard.scripting.gpu_info", "gpu_scheduler.gpu_info"])
def test_a_gpu_that_was_banned_before_a_list_is_assigned_stays_banned(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: which modules are imported, and in which order, makes a difference."""
    monkeypatch.setenv("GPUYARD_SIMULATE", "3x24GB")
    program = (
        "from importlib import import_module\n"
        f"import_module({first!r}).BANNED_GPUS.append(0)\n"
        f"import_module({second!r}).BANNED_GPUS = [1]\n"
        "from gpuyard import find_free_gpus\n"
        "print(find_free_gpus())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False)
    assert (done.stdout, done.returncode) == ("[2]\n", 0), done.stderr


def test_the_helpers_return_the_same_shapes_as_before() -> None:
    with SimulatedUse() as usage:
        usage.allocate("SIM-1", 8192)
        usage.set_load("SIM-1", 40)
        info = get_gpu_info()
        assert info[1] == {
            "gpu_id": 1,
            "name": "Simulated 24 GB",
            "memory_free": 16384.0,
            "memory_total": 24576.0,
            "memory_used": 8192.0,
            "power_draw": 135.0,
            "power_limit": 300.0,
            "utilization": 40.0,
            "uuid": "SIM-1",
        }
        assert get_gpu_memory_usage() == [0.0, 8192.0]
        assert get_gpu_utilization() == [0.0, 40.0]
        assert get_gpu_power_usage() == [25.0, 135.0]
        assert get_gpu_names() == ["Simulated 24 GB"] * 2
        assert get_total_num_gpus() == 2
        assert find_free_gpus() == [0]
        assert find_free_gpus(specific_gpus=[1]) == []
        assert find_free_gpus(10, None, None) == [0, 1]


def test_existing_scripts_can_import_the_names_they_use() -> None:
    import gpu_scheduler
    from gpu_scheduler import gpu_info

    assert gpu_scheduler.GPUScheduler is GPUScheduler
    assert gpu_info.BANNED_GPUS is BANNED_GPUS
    for name in gpu_info.__all__:
        assert hasattr(gpu_info, name)
    for name in gpu_scheduler.__all__:
        assert hasattr(gpu_scheduler, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"specific_gpus": [7]}, "there is no GPU '7'"),
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"vram": "lots"}, "not a size"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GPUScheduler(**options).acquire()  # type: ignore[arg-type]


def test_more_gpus_than_the_machine_has_are_refused_at_once() -> None:
    with pytest.raises(UserError, match="3 GPUs"):
        GPUScheduler(num_gpus=3).acquire()


def test_a_wrong_configuration_is_refused_with_a_suggestion(own_home: Path) -> None:
    own_home.mkdir(exist_ok=True)
    (own_home / "config.toml").write_text("[devices]\nbaned = [0]\n")
    with pytest.raises(UserError) as mistake:
        find_free_gpus()
    assert "config.toml" in str(mistake.value)
    assert "config.toml:2: [devices] has no key baned; did you mean banned?" in str(mistake.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vram": "30G"}, r"no GPU has 30 GB"),
        ({"memory_free_threshold_gb": 30}, "no GPU has 30 GB"),
        ({"num_gpus": 2, "specific_gpus": [0, 0]}, "2 GPUs needed, but only 1 can be used"),
        ({"vram": float("nan")}, "vram is nan"),
        ({"vram": 0}, "vram is 0"),
    ],
)
def test_an_impossible_request_is_refused_instead_of_waiting(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GPUScheduler(**options).acquire()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 5.5}, "priority is 5.5: give a whole number, such as priority=2"),
        ({"priority": "high"}, "priority is 'high': give a whole number, such as priority=2"),
        ({"num_gpus": 1.5}, "num_gpus is 1.5: give a whole number, such as num_gpus=2"),
        ({"num_gpus": "2"}, "num_gpus is '2': give a whole number, such as num_gpus=2"),
        ({"gpus": 2}, "GPUScheduler has no parameter gpus: did you mean num_gpus?"),
        ({"vram_gb": 2}, "GPUScheduler has no parameter vram_gb: did you mean vram?"),
    ],
)
def test_a_wrong_type_or_name_is_refused_in_one_line_that_says_what_to_write(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(TypeError) as refused:
        GPUScheduler(**options)  # type: ignore[arg-type]
    assert str(refused.value) == message


def test_a_name_that_is_like_no_parameter_is_refused_with_all_of_them() -> None:
    with pytest.raises(TypeError, match=r"no parameter frobnicate: its parameters are memory_free_.*, ram, cpus$"):
        GPUScheduler(frobnicate=1)  # type: ignore[arg-type]


def test_a_single_gpu_may_be_named_without_a_list() -> None:
    for name in (1, "1", "SIM-1"):
        with GPUScheduler(specific_gpus=name) as gpu_ids:
            assert gpu_ids == [1]


def test_generators_and_coroutines_cannot_be_decorated() -> None:
    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    for function in (coroutine, generator):
        with pytest.raises(UserError, match="cannot decorate"):
            GPUScheduler()(function)


@pytest.mark.parametrize("banned", [[0], ["0"], ["SIM-0"]])
def test_a_banned_gpu_may_be_spelled_in_several_ways(own_home: Path, banned: list[object]) -> None:
    own_home.mkdir(exist_ok=True)
    (own_home / "config.toml").write_text(f"[devices]\nbanned = {banned!r}\n")
    assert find_free_gpus() == [1]


def test_a_relative_lease_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_LOCK_DIR", "locks")
    with pytest.raises(UserError, match="not an absolute path"):
        GPUScheduler().acquire()


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("options", ["", "vram='4G'"])
def test_a_script_inside_gpuyard_run_uses_the_enclosing_lease(options: str) -> None:
    program = (
        f"from gpuyard import GPUScheduler\nwith GPUScheduler(max_wait_time=90, {options}) as gpu_ids: print(gpu_ids)\n"
    )
    run = [sys.executable, "-m", "gpuyard", "run", "--device", "1", "--"]
    for around in (run, [*run, *run[:4], "--"]):
        command = [*around, sys.executable, "-c", program]
        result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        assert (result.stdout, result.returncode) == ("[0]\n", 0), result.stderr
    assert held() == []


def test_a_request_beyond_the_enclosing_lease_is_refused_instead_of_waiting() -> None:
    program = "from gpuyard import GPUScheduler; GPUScheduler(vram='20G').acquire()"
    command = [sys.executable, "-m", "gpuyard", "run", "--vram", "4G", "--", sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert "inside lease" in result.stderr
    assert result.returncode == 1


def _stop_outside_the_ledger(process: "subprocess.Popen[str]") -> None:
    """Stop a process while it does not have the ledger locked, which would block every other process."""
    for _ in range(100):
        process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(EnvironmentFault), hold_mutex(Path(lease_dir()), 1.0):
            return
        process.send_signal(signal.SIGCONT)
    pytest.fail("it always has the ledger locked")


def test_a_stopped_waiting_process_does_not_block_the_requests_behind_it(script: Script) -> None:
    holder = script(num_gpus=2)
    printed(holder)
    halted = script(num_gpus=2, label="halted")
    _wait_for_tickets(1)
    _stop_outside_the_ledger(halted)
    finish(holder)
    behind = script(label="behind")
    assert printed(behind) in ("[0]", "[1]")
    finish(behind)
    halted.send_signal(signal.SIGCONT)
    assert printed(halted) == "[0, 1]"


def test_a_child_forked_while_waiting_does_not_keep_a_dead_parent_s_ticket(script: Script) -> None:
    holder = script(num_gpus=2)
    printed(holder)
    program = (
        "import os, signal, sys, threading\n"
        "from gpuyard import GPUScheduler\n"
        "from gpuyard.config import lease_dir\n"
        "threading.Thread(target=GPUScheduler(num_gpus=2).acquire, daemon=True).start()\n"
        "while not any(n.endswith('.ticket') and n[0] != '.' for n in os.listdir(lease_dir())): pass\n"
        "if os.fork() == 0: signal.pause()\n"
        "print('waiting', flush=True)\n"
        "signal.pause()\n"
    )
    ghost = script(sys.executable, "-c", program)
    assert printed(ghost) == "waiting"
    children = psutil.Process(ghost.pid).children()
    ghost.kill()
    ghost.wait(90)
    try:
        _wait_for_tickets(0)  # the child releases the ticket as soon as it runs
        assert all(child.is_running() for child in children)
    finally:
        for child in children:
            child.kill()

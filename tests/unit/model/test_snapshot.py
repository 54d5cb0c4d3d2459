from gpuyard.model.machine_snapshot import Device, Host, Problem, Snapshot, Vendor, find_new_problems, snapshot_as_dict

CARD = Device(id="GPU-a", vendor=Vendor.NVIDIA, index=0)


def snapshot(*devices: Device, problems: tuple[Problem, ...] = ()) -> Snapshot:
    return Snapshot(taken_at=1763176632.5, host=Host(name="box"), devices=devices, problems=problems)


def test_work_is_placed_on_healthy_devices_only() -> None:
    ill = Device(id="GPU-b", vendor=Vendor.NVIDIA, fault="GPU is lost")
    assert snapshot(CARD, ill).usable_devices() == (CARD,)


def test_a_card_that_is_split_is_used_through_its_parts() -> None:
    part = Device(id="MIG-1", vendor=Vendor.NVIDIA, parent="GPU-a")
    assert snapshot(CARD, part).usable_devices() == (part,)


def test_a_device_is_found_by_its_id() -> None:
    assert snapshot(CARD).device("GPU-a") == CARD
    assert snapshot(CARD).device("GPU-x") is None


def test_a_problem_is_news_once() -> None:
    old = Problem(source="nvml", kind="timeout", message="no answer")
    new = Problem(source="nvml", kind="crashed", message="ended")
    assert find_new_problems((), (old,)) == (old,)
    assert find_new_problems((old,), (old, new)) == (new,)


def test_the_json_shape_is_the_documented_one() -> None:
    problem = Problem(source="amd-smi", kind="denied", message="no", hint="as root", vendor=Vendor.AMD)
    shape = snapshot_as_dict(snapshot(CARD, problems=(problem,)))
    assert shape["taken_at"] == "2025-11-15T03:17:12.500Z"
    assert shape["host"]["name"] == "box"
    assert shape["host"]["cpu_percent"] is None
    assert shape["devices"] == [
        {
            "id": "GPU-a",
            "index": 0,
            "vendor": "nvidia",
            "name": None,
            "parent": None,
            "pci_bus_id": None,
            "memory_total_mb": None,
            "memory_used_mb": None,
            "memory_used_at_least_mb": None,
            "memory_free_mb": None,
            "utilization_percent": None,
            "power_draw_w": None,
            "power_limit_w": None,
            "energy_j": None,
            "temperature_c": None,
            "processes": None,
            "fault": None,
            "is_integrated": False,
            "health": None,
            "healthy": True,
            "label": "0",
        }
    ]
    assert shape["problems"] == [
        {"source": "amd-smi", "kind": "denied", "message": "no", "hint": "as root", "vendor": "amd"}
    ]

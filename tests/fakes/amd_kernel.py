"""Kernel files of an AMD card, under a folder in place of the root."""

from pathlib import Path

BUS_ID, NUMBER = "0000:05:00.0", 51234
MB = 1 << 20


class AmdKernel:
    """The card at `BUS_ID`, with 16 GB, and what each process computes on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.node(1, NUMBER, 0x0500)
        self.node(0, 0, 0)
        namespace = root / "proc/self/ns/pid"
        namespace.parent.mkdir(parents=True)
        namespace.symlink_to("pid:[4026531836]")
        self.use(1024.0)

    def node(self, place: int, number: int, location: int, domain: int = 0) -> None:
        """Write a node of the compute driver: a card, or with the number 0 a processor."""
        node = self.root / f"sys/class/kfd/kfd/topology/nodes/{place}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{number}\n")
        (node / "properties").write_text(f"simd_count 256\nlocation_id {location}\ndomain {domain}\nunique_id\n")

    def use(self, used_mb: float, bus_id: str = BUS_ID) -> None:
        card = self.root / "sys/bus/pci/devices" / bus_id
        card.mkdir(parents=True, exist_ok=True)
        (card / "mem_info_vram_total").write_text(f"{16384 * MB}\n")
        (card / "mem_info_vram_used").write_text(f"{int(used_mb * MB)}\n")

    def compute(self, pid: int, held_mb: float, name: str = "python3", number: int = NUMBER) -> None:
        process = self.root / f"sys/class/kfd/kfd/proc/{pid}"
        process.mkdir(parents=True, exist_ok=True)
        (process / f"vram_{number}").write_text(f"{int(held_mb * MB)}\n")
        self.run(pid, name)

    def run(self, pid: int, name: str) -> None:
        (self.root / f"proc/{pid}").mkdir(parents=True, exist_ok=True)
        (self.root / f"proc/{pid}/comm").write_text(f"{name}\n")

    def enter_container(self) -> None:
        namespace = self.root / "proc/self/ns/pid"
        namespace.unlink()
        namespace.symlink_to("pid:[4026532871]")

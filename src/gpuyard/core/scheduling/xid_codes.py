"""The Xids of NVIDIA's driver that concern the card, by their number.

From NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors), by the action that it names first: for most of these it is
a reset of the GPU, or a restart of the machine. Rules:
- Numbers that the program itself causes, such as an illegal address (13, 31, 43, 45, 68, 69), say nothing about the
  card. Neither does 109 (a context switch took too long): NVIDIA's own Kubernetes plugin ignores these too.
- A number that is not listed here is shown in the driver's log, and changes nothing: a false alarm would take a card
  away from everyone.
"""

from enum import StrEnum

from msgspec import Struct


class Repair(StrEnum):
    """What to do before the device is used again."""

    WATCH = "nothing yet; if it comes again, replace the card"
    RESET = "wait until no program uses the GPU, then reset it: `sudo nvidia-smi --gpu-reset -i ID`"
    REBOOT = "restart the machine; if it comes again, reseat the card and check its power"
    REPLACE = "reset it: `sudo nvidia-smi --gpu-reset -i ID`; if it comes again, replace the card"


class XidMeaning(Struct, frozen=True):
    text: str
    repair: Repair

    @property
    def is_fault(self) -> bool:
        return self.repair is not Repair.WATCH


XIDS = {
    46: XidMeaning("the GPU stopped processing", Repair.RESET),
    48: XidMeaning("uncorrectable ECC error (two bits)", Repair.RESET),
    62: XidMeaning("the GPU's power controller halted", Repair.RESET),
    63: XidMeaning("a row of its memory is to be remapped", Repair.WATCH),
    64: XidMeaning("a row of its memory cannot be remapped", Repair.REPLACE),
    74: XidMeaning("NVLink error", Repair.RESET),
    79: XidMeaning("the GPU has fallen off the bus", Repair.REBOOT),
    92: XidMeaning("many corrected ECC errors", Repair.WATCH),
    94: XidMeaning("memory error that ended one program", Repair.RESET),
    95: XidMeaning("memory error that affects all programs", Repair.RESET),
    110: XidMeaning("security fault", Repair.RESET),
    119: XidMeaning("the GPU's system processor (GSP) does not answer", Repair.RESET),
    120: XidMeaning("the GPU's system processor (GSP) failed", Repair.RESET),
    136: XidMeaning("link training failed", Repair.RESET),
    140: XidMeaning("unrecovered ECC error", Repair.RESET),
    143: XidMeaning("the GPU did not initialise", Repair.RESET),
    154: XidMeaning("the driver asks for a reset or a restart", Repair.RESET),
}

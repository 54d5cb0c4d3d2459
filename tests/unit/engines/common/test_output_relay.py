"""Times at the beginning of lines, however the output is cut into pieces."""

import re

import pytest

from gpuyard.engines.common.output_relay import StampedOutput

TIME = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d ")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_each_line_begins_with_the_time_of_its_first_byte(size: int) -> None:
    output = StampedOutput(1, "", 0)
    written = b"one\ntwo\r\n\n 1%\r 2%\r\nlast"
    stamped = b"".join(output.stamp(written[at : at + size], 1.5) for at in range(0, len(written), size))
    assert TIME.sub(b"T ", stamped) == b"T one\nT two\r\nT \nT  1%\rT  2%\r\nT last"
    assert b".500" in stamped

"""Lines as programs write them, and what a terminal shows of them: the command line, `top` and the page agree."""

SHOWN = (
    ("plain", "plain"),
    ("  blanks stay  ", "  blanks stay  "),
    ("dos line\r", "dos line"),
    (" 10%\r 20%\r100%", "100%"),
    ("100%|####|\rdone", "done|####|"),
    ("100%|####|\r\x1b[Kdone", "done"),
    ("100%|####|\x1b[2K\rdone", "done"),
    ("100%|####|\r          \rdone", "done"),
    ("abcdef\r\x1b[3C", "abcdef"),
    ("abcd\b\b\x1b[1K", "   d"),
    ("spin /\b-\b\\", "spin \\"),
    ("\x1b[?25l 5%\r\x1b[32m10%\x1b[0m\x1b[K", "10%"),
    ("\x1b]0;title\x07a\rb", "b"),
    ("█▉ 1\r██ 2", "██ 2"),
    ("abc\x1b[2Kd", "   d"),
)

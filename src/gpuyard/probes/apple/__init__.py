"""Apple: `powermetrics` for power, `ioreg` for the rest, unified memory from `sysctl`."""

"""The numbers of the policy, each with what chose it. Where no figure is named, it is a judgement that no figure has
contradicted: `python -m bench guarantees` shows what another one does."""

# Order and reservation
# A job gains a priority level in this time: one that waits for an hour goes before the six levels above it.
AGEING_S = 600.0
USE_HALF_LIFE_S = 86_400.0  # use of yesterday counts half: work of a night is forgotten after some days
STARTING_S = 1.0  # the use that each start adds within a step, so that two tags take turns
MOST_LANES = 256  # lanes with devices, and as many without, that a step considers: it must stay short
LOOK_AHEAD = 64  # jobs of a lane with differing needs that a plan considers, for the same reason
STRICT_AFTER_S = 1800.0  # after half an hour no job behind the first that waits for RAM or CPUs takes some of them
PATIENCE_S = 60.0  # then a request in the ledger reserves all devices that would serve it, not only free ones

# Devices
TINY_MB = 1024.0  # a desktop or an idle notebook holds no more than this
TINY_PART = 0.05  # the same as a part of a large device
UNLISTED_PART = 0.5  # where no processes are listed, a desktop looks like any other program
UNKNOWN_PERCENT = 100.0  # a job of unknown load may keep a whole device busy
COMFORTABLE_PERCENT = 100.0  # jobs that together load a device less hardly slow each other
ALIKE_MB = 1024.0  # two idle devices of one model differ by less: a driver or a desktop holds some of one
MOST_SETS = 5_000  # sets of linked devices that are tried: 16 devices in groups are a few dozen
IDLE_PERCENT = 10.0  # a desktop keeps a device about this busy
FOREIGN_HALF_LIFE_S = 5.0  # of the average load of foreign processes: a spike of a second decides nothing
FOREIGN_MARGIN_PERCENT = 10.0  # a device counts as busy until it is this much below the limit
DRIVER_MB = 64.0  # drivers keep up to this much of a device that no process uses
FOREIGN_ENDED_S = 0.5  # a process that is not listed has ended once the load was low for this long
FORGET_AFTER_HALF_LIVES = 4.0  # then an average without readings counts for less than a tenth

# Sharing: fitted to 1,388 measured pairs of jobs (`sharing`)
MOST_PER_DEVICE = 64  # no device is shared by more jobs
UNKNOWN_LOAD_PERCENT = 50.0  # the load of a job that was not measured: half a device
ASSUMED_S = 20.0  # for how long a measured load counts as much as that: programs begin with imports
SLOWED_PART = 0.5  # the part of its own load by which a job is slowed: the best of the forms that were tried
LOAD_SPREAD = 30.0  # standard deviation of the load of programs
PART_SPREAD = 0.3  # standard deviation of the part by which they are slowed
LEAST_PART = 0.5  # a task that gets less of its part of a device would probably run out of memory
SURENESS = 1.2816  # of ten groups of first runs nine stay within what is expected and this many deviations

# RAM and CPUs
LEAST_FLOOR_MB = 2048.0  # RAM that stays free: the larger of this
FLOOR_PART = 0.05  # and this part of the RAM
MOST_OF_RAM = 0.25  # but no more than a quarter, or nothing would start on a small machine
DECLARED_PERCENT = 100.0  # declared CPUs may use all CPUs and no more
# A job without devices reserves no less, unless it declares it; of a job of unknown RAM this is expected.
LEAST_RAM_MB = 512.0
LEAST_CPUS = 1.5  # the same of CPUs
ASSUMED_RAM_PART = 1 / 64  # no more is expected than this part of the machine
RAM_STEP_MB = 64.0  # amounts are rounded up, so that jobs that are alike have equal needs
CPU_STEP = 0.5  # the same of CPUs
SHOWN_AFTER_S = 10.0  # then a running job of unknown RAM is expected to need a little more than it uses

# Estimates
PEAK_QUANTILE = 0.95  # of the recent peaks: one run in twenty may take more, and is run again
ALIKE_FACTOR = 1.5  # runs whose figures differ by more are not alike
KEPT_HOST_USES = 16  # runs whose RAM and CPUs are kept
ALIKE_JOBS = 0.3  # correlation of jobs on one device: 0 is independent, 1 the same command
ASSUMED_DEVICE_PART = 0.25  # expected of a first run before any run on this machine, and its spread
ASSUMED_DEVICE_MB = 6144.0  # but no more than this
MACHINE_WEIGHT = 4.0  # runs that first runs of any program count as
PROGRAM_WEIGHT = 1.0  # runs that those of its program count as
MISSING_WEIGHT = 4.0  # runs that the assumed climbs of memory count as
KEPT_RUNS = 32.0  # runs that a learned climb counts as at most
ALONE_FLAT_S = 32.0  # memory of a job alone on its device is flat for this long before others join
MOST_RERUNS = 3  # times that a job is queued again because memory ran out
FIRST_RUN_PART = 0.5  # half of a device is enough for the first run of most programs; the others run again
RAM_GROWTH = 1.5  # a job that ran out of RAM is queued again with this times as much
MOST_RAM_PART = 0.75  # no job waits for more of the RAM: a machine in use never has more available

# Guards
RESERVE_MB = 512.0  # free memory of a device below the larger of this
RESERVE_PART = 0.02  # and this part is too little for a driver and its programs to go on
HORIZON_S = 1.0  # memory must last for this long at the present rate: to suspend a job takes a while
NOISE_MB = 16.0  # less growth is noise: drivers count in pages
YOUNG_S = 5.0  # a program first measured within this time began with nothing
REOPEN_AFTER_S = 5.0  # a guard that is content for this long lets jobs start again
SPARED_S = 60.0  # a job that resumed is not suspended again within this time
MOST_LOST_S = 60.0  # a job that has run for longer is not stopped: it would lose too much
CLEARLY_MORE = 1.25  # a job that made way resumes or starts where this times what it held is free
CLEARLY_MORE_MB = 512.0  # and at least this much more
NEARLY_ALL = 0.9  # no job asks for more of a device or the RAM: with a desktop there, it would wait for ever
STOPS_WITHIN_S = 5.0  # a program that was asked to stop frees its memory within this time, or saves its work
CRITICAL_PART = 0.5  # below this part of the floor a job makes way even while RAM is steady
KILL_PART = 0.25  # below this part a job that is being stopped is killed
LASTS_S = 20.0  # the RAM below the floor has to last for this long at the present rate
LASTS_ABOVE_S = 1.0  # and that above the floor for this long
FASTEST_MB_S = 4096.0  # what a program that touches fresh pages can take per second; sets how often RAM is read

# Starts that fail
FIRST_DELAY_S = 1.0  # after a start that the system refused; doubled each time
LONGEST_DELAY_S = 30.0  # up to this
REPORTED_WITHIN_S = 1.0  # a start that is not reported back has begun: the keeper answers within milliseconds

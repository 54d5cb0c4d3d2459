-- Tables of the queue. `SCHEMA_VERSION` in database.py goes up with each change of this file.

CREATE TABLE settings (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

INSERT INTO settings VALUES ('next_id', '1');

-- `body` (JSON) is shared by all jobs of a submission; values of variables that look secret are in `secrets`, not in it.
-- `command` is the command as a search matches it; its index is scanned in place of the table, whose rows are long.
CREATE TABLE specs (
    id INTEGER PRIMARY KEY,
    body TEXT NOT NULL,
    command TEXT NOT NULL
);

CREATE INDEX specs_by_command ON specs (command);

-- `body` (JSON): the values of the variables that look secret. They are deleted when all jobs of the spec have ended,
-- and the spec is then in `dropped_secrets`.
CREATE TABLE secrets (
    spec INTEGER PRIMARY KEY,
    body TEXT NOT NULL
);

CREATE TABLE dropped_secrets (
    spec INTEGER PRIMARY KEY
);

-- A token makes a submission count once even if it is sent several times. Jobs of an incomplete submission are not
-- listed and do not start.
CREATE TABLE submissions (
    id INTEGER PRIMARY KEY,
    token TEXT UNIQUE,
    first_id INTEGER NOT NULL,
    last_id INTEGER NOT NULL,
    is_complete INTEGER NOT NULL,
    waited_at REAL -- when `gpuyard wait` without ids last reported its jobs to the shell that submitted them
);

CREATE INDEX submissions_by_first_id ON submissions (first_id);

-- The processes that started the one that sent a submission: its script, its shell.
CREATE TABLE submitters (
    process TEXT NOT NULL,
    submission INTEGER NOT NULL,
    PRIMARY KEY (process, submission)
) WITHOUT ROWID;

CREATE INDEX submitters_by_submission ON submitters (submission);

CREATE TRIGGER forget_submitters AFTER DELETE ON submissions BEGIN
    DELETE FROM submitters WHERE submission = OLD.id;
END;

-- A lane holds ready jobs with the same need and queue order; `body` is JSON.
CREATE TABLE lanes (
    id INTEGER PRIMARY KEY,
    body TEXT NOT NULL UNIQUE
);

-- The number of jobs in each state, kept by triggers: counting a million rows would be slow.
CREATE TABLE counts (
    state TEXT PRIMARY KEY,
    jobs INTEGER NOT NULL CHECK (jobs >= 0)
) WITHOUT ROWID;

INSERT INTO counts VALUES ('held', 0), ('blocked', 0), ('delayed', 0), ('queued', 0), ('pending', 0), ('running', 0),
    ('suspending', 0), ('suspended', 0), ('resuming', 0), ('stopping', 0), ('succeeded', 0), ('failed', 0),
    ('cancelled', 0), ('rejected', 0);

-- A job is finished if and only if `ended_at` is set. (SQLite would rebuild an index over a list of states at each
-- change of state.) `details` (JSON) holds the placeholder values or the command of this job alone; `command` is its
-- command as a search matches it, or NULL if that is the spec's. `growth` (JSON) is the memory that the job gets after
-- it ran out. `not_before` is the earliest start that the user asked for.
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY,
    spec INTEGER NOT NULL REFERENCES specs (id),
    lane INTEGER NOT NULL REFERENCES lanes (id),
    state TEXT NOT NULL REFERENCES counts (state),
    priority INTEGER NOT NULL,
    user TEXT NOT NULL,
    name TEXT,
    tag TEXT NOT NULL,
    submitted_at REAL NOT NULL,
    queued_at REAL,
    group_id INTEGER,
    group_limit INTEGER,
    array_index INTEGER,
    details TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    due_at REAL,
    started_at REAL,
    ended_at REAL,
    outcome TEXT,
    reason TEXT,
    growth TEXT,
    command TEXT,
    not_before REAL,
    CHECK ((state = 'delayed') = (due_at IS NOT NULL))
);

CREATE INDEX jobs_ready ON jobs (lane, id) WHERE state = 'queued';
CREATE INDEX jobs_due ON jobs (due_at) WHERE state = 'delayed';
CREATE INDEX jobs_not_queued ON jobs (state DESC, id) WHERE ended_at IS NULL AND state <> 'queued';
CREATE INDEX jobs_finished ON jobs (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX jobs_by_name ON jobs (name) WHERE name IS NOT NULL;
CREATE INDEX jobs_by_tag ON jobs (tag) WHERE tag <> '';
CREATE INDEX jobs_by_spec ON jobs (spec);
CREATE INDEX jobs_by_lane ON jobs (lane);

CREATE TRIGGER count_insert AFTER INSERT ON jobs BEGIN
    UPDATE counts SET jobs = jobs + 1 WHERE state = NEW.state;
END;

CREATE TRIGGER count_delete AFTER DELETE ON jobs BEGIN
    UPDATE counts SET jobs = jobs - 1 WHERE state = OLD.state;
END;

CREATE TRIGGER count_update AFTER UPDATE OF state ON jobs WHEN OLD.state <> NEW.state BEGIN
    UPDATE counts SET jobs = jobs - 1 WHERE state = OLD.state;
    UPDATE counts SET jobs = jobs + 1 WHERE state = NEW.state;
END;

-- The jobs of each array or sweep by state, kept by triggers: the queue shows a line for each without reading its jobs.
-- `ended_at`: when a job last got to this state, if it is a state of finished jobs.
CREATE TABLE group_counts (
    group_id INTEGER NOT NULL,
    state TEXT NOT NULL,
    jobs INTEGER NOT NULL CHECK (jobs >= 0),
    ended_at REAL,
    PRIMARY KEY (group_id, state)
) WITHOUT ROWID;

CREATE INDEX jobs_finished_alone ON jobs (ended_at) WHERE ended_at IS NOT NULL AND group_id IS NULL;

CREATE TRIGGER group_insert AFTER INSERT ON jobs WHEN NEW.group_id IS NOT NULL BEGIN
    INSERT INTO group_counts VALUES (NEW.group_id, NEW.state, 1, NEW.ended_at)
        ON CONFLICT DO UPDATE SET jobs = jobs + 1, ended_at = excluded.ended_at;
END;

CREATE TRIGGER group_delete AFTER DELETE ON jobs WHEN OLD.group_id IS NOT NULL BEGIN
    UPDATE group_counts SET jobs = jobs - 1 WHERE group_id = OLD.group_id AND state = OLD.state;
    DELETE FROM group_counts WHERE group_id = OLD.group_id AND jobs = 0;
END;

CREATE TRIGGER group_update AFTER UPDATE OF state ON jobs
WHEN NEW.group_id IS NOT NULL AND OLD.state <> NEW.state BEGIN
    UPDATE group_counts SET jobs = jobs - 1 WHERE group_id = OLD.group_id AND state = OLD.state;
    INSERT INTO group_counts VALUES (NEW.group_id, NEW.state, 1, NEW.ended_at)
        ON CONFLICT DO UPDATE SET jobs = jobs + 1, ended_at = excluded.ended_at;
END;

-- `usage` (JSON) holds a long memory curve. Reports read only `peaks_mb` and `energy`, so these have columns.
-- The phase of an attempt: `handed_over_at` is set until it starts, then `started_at`, with `keeper_pid` (else 0) on this
-- machine or `place` on another; `ended_at`, `outcome` and `lack` (of memory, both JSON) once it is over.
-- `pid` is the program's, recorded at the end.
CREATE TABLE attempts (
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    boot_id TEXT,
    handed_over_at REAL,
    started_at REAL,
    keeper_pid INTEGER NOT NULL,
    pid INTEGER,
    place TEXT,
    ended_at REAL,
    outcome TEXT,
    lack TEXT,
    lease_id TEXT,
    devices TEXT,
    log TEXT,
    error_log TEXT,
    stop_at REAL,
    kill_at REAL,
    stopping TEXT,
    warned_at REAL,
    reserved_mb REAL,
    predicted_mb REAL,
    parked TEXT,
    suspended_at REAL,
    suspended_s REAL NOT NULL DEFAULT 0,
    engine TEXT NOT NULL DEFAULT '',
    site_id TEXT,
    request TEXT,
    cpus TEXT,
    peaks_mb TEXT GENERATED ALWAYS AS (json_extract(usage, '$.peaks_mb')) STORED,
    energy TEXT GENERATED ALWAYS AS (json_extract(usage, '$.energy')) STORED,
    usage TEXT,
    PRIMARY KEY (job, number),
    CHECK ((handed_over_at IS NULL) = (started_at IS NOT NULL)),
    CHECK (started_at IS NOT NULL OR coalesce(pid, place) IS NULL),
    CHECK ((ended_at IS NULL) = (outcome IS NULL)),
    CHECK (ended_at IS NOT NULL OR lack IS NULL)
) WITHOUT ROWID;

CREATE UNIQUE INDEX one_live_attempt ON attempts (job) WHERE ended_at IS NULL;
CREATE INDEX attempts_ended ON attempts (ended_at, started_at) WHERE ended_at IS NOT NULL;

CREATE TABLE dependencies (
    job INTEGER NOT NULL,
    on_job INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('ok', 'any', 'failed')),
    PRIMARY KEY (job, on_job, kind),
    CHECK (on_job < job)
) WITHOUT ROWID;

CREATE INDEX dependants ON dependencies (on_job);

-- Work that is done in pieces: ended jobs whose dependants are not all unblocked or rejected yet, and jobs that run
-- again (`revives`) whose dependants do not all wait again yet.
CREATE TABLE unsettled (
    job INTEGER NOT NULL,
    revives INTEGER NOT NULL,
    PRIMARY KEY (job, revives)
) WITHOUT ROWID;

CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    job INTEGER NOT NULL,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    text TEXT
);

CREATE INDEX events_by_job ON events (job, id);

-- The state of a batch (JSON); `first_id` is its first job.
CREATE TABLE batches (
    first_id INTEGER PRIMARY KEY,
    body TEXT NOT NULL
);

-- The code of a spec: the name of its snapshot, and whether the Git work tree had changes; NULL: none, not known.
CREATE TABLE spec_code (
    spec INTEGER PRIMARY KEY,
    snapshot TEXT,
    is_dirty INTEGER
);

CREATE INDEX spec_code_by_snapshot ON spec_code (snapshot) WHERE snapshot IS NOT NULL;

-- Attempts that started with another script than was submitted.
CREATE TABLE changed_scripts (
    job INTEGER NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (job, number)
) WITHOUT ROWID;

-- Recent device time of a user and tag, decayed up to `at`.
CREATE TABLE uses (
    user TEXT NOT NULL,
    tag TEXT NOT NULL,
    seconds REAL NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (user, tag)
) WITHOUT ROWID;

-- What was learned from the attempts with a fingerprint (JSON).
CREATE TABLE profiles (
    fingerprint TEXT PRIMARY KEY,
    body TEXT NOT NULL,
    seen_at REAL NOT NULL
) WITHOUT ROWID;

CREATE INDEX profiles_by_time ON profiles (seen_at);

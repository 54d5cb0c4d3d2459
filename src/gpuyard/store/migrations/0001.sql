-- The queue, schema 1.

CREATE TABLE settings (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

INSERT INTO settings VALUES ('next_id', '1');

-- What jobs that were submitted together have in common, as JSON.
CREATE TABLE specs (
    id INTEGER PRIMARY KEY,
    body TEXT NOT NULL
);

-- A submission counts once, however often it is sent. Jobs of one that is not complete are not there yet.
CREATE TABLE submissions (
    id INTEGER PRIMARY KEY,
    token TEXT UNIQUE,
    first_id INTEGER NOT NULL,
    last_id INTEGER NOT NULL,
    is_complete INTEGER NOT NULL
);

-- Ready jobs of one kind stand in one lane.
CREATE TABLE lanes (
    id INTEGER PRIMARY KEY,
    body TEXT NOT NULL UNIQUE
);

-- How many there are of each, so that nobody has to count a million.
CREATE TABLE counts (
    state TEXT PRIMARY KEY,
    jobs INTEGER NOT NULL CHECK (jobs >= 0)
) WITHOUT ROWID;

INSERT INTO counts VALUES ('held', 0), ('blocked', 0), ('delayed', 0), ('queued', 0), ('running', 0), ('stopping', 0),
    ('succeeded', 0), ('failed', 0), ('cancelled', 0), ('rejected', 0);

-- A job is finished exactly where `ended_at` says when. (Lists of states would be built anew at each change.)
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
    CHECK ((state = 'delayed') = (due_at IS NOT NULL))
);

CREATE INDEX jobs_ready ON jobs (lane, id) WHERE state = 'queued';
CREATE INDEX jobs_due ON jobs (due_at) WHERE state = 'delayed';
CREATE INDEX jobs_apart ON jobs (state DESC, id) WHERE ended_at IS NULL AND state <> 'queued';
CREATE INDEX jobs_finished ON jobs (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX jobs_named ON jobs (name) WHERE name IS NOT NULL;
CREATE INDEX jobs_tagged ON jobs (tag) WHERE tag <> '';
CREATE INDEX jobs_of_spec ON jobs (spec);

CREATE TRIGGER count_new AFTER INSERT ON jobs BEGIN
    UPDATE counts SET jobs = jobs + 1 WHERE state = NEW.state;
END;

CREATE TRIGGER count_gone AFTER DELETE ON jobs BEGIN
    UPDATE counts SET jobs = jobs - 1 WHERE state = OLD.state;
END;

CREATE TRIGGER count_changed AFTER UPDATE OF state ON jobs WHEN OLD.state <> NEW.state BEGIN
    UPDATE counts SET jobs = jobs - 1 WHERE state = OLD.state;
    UPDATE counts SET jobs = jobs + 1 WHERE state = NEW.state;
END;

CREATE TABLE attempts (
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    pid INTEGER NOT NULL,
    boot_id TEXT,
    started_at REAL NOT NULL,
    lease TEXT,
    devices TEXT,
    log TEXT,
    stop_at REAL,
    kill_at REAL,
    stopping TEXT,
    ended_at REAL,
    outcome TEXT,
    PRIMARY KEY (job, number),
    CHECK ((ended_at IS NULL) = (outcome IS NULL))
) WITHOUT ROWID;

CREATE UNIQUE INDEX one_live_attempt ON attempts (job) WHERE ended_at IS NULL;

CREATE TABLE dependencies (
    job INTEGER NOT NULL,
    on_job INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('ok', 'any', 'failed')),
    PRIMARY KEY (job, on_job, kind),
    CHECK (on_job < job)
) WITHOUT ROWID;

CREATE INDEX dependants ON dependencies (on_job);

CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    job INTEGER NOT NULL,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    text TEXT
);

CREATE INDEX events_of_job ON events (job, id);

-- What users and tags have used of late, as it weighed at that time.
CREATE TABLE uses (
    user TEXT NOT NULL,
    tag TEXT NOT NULL,
    seconds REAL NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (user, tag)
) WITHOUT ROWID;

CREATE TABLE durations (
    fingerprint TEXT PRIMARY KEY,
    count INTEGER NOT NULL,
    least_s REAL NOT NULL,
    mean_s REAL NOT NULL,
    most_s REAL NOT NULL
) WITHOUT ROWID;

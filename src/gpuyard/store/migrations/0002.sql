-- Schema 2: what attempts used, what was learned from them, and attempts that are suspended.

INSERT INTO counts VALUES ('suspending', 0), ('suspended', 0), ('resuming', 0);

-- What a job is given that ran out of memory, as JSON.
ALTER TABLE jobs ADD COLUMN growth TEXT;

ALTER TABLE attempts ADD COLUMN reserved_mb REAL;
ALTER TABLE attempts ADD COLUMN predicted_mb REAL;
ALTER TABLE attempts ADD COLUMN parked TEXT;
ALTER TABLE attempts ADD COLUMN suspended_at REAL;
ALTER TABLE attempts ADD COLUMN suspended_s REAL NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN usage TEXT;
ALTER TABLE attempts ADD COLUMN shortage TEXT;

-- What was learned under a fingerprint, as JSON.
CREATE TABLE profiles (
    fingerprint TEXT PRIMARY KEY,
    body TEXT NOT NULL,
    seen_at REAL NOT NULL
) WITHOUT ROWID;

CREATE INDEX profiles_seen ON profiles (seen_at);

INSERT INTO profiles
SELECT fingerprint, json_object('count', count, 'least_s', least_s, 'mean_s', mean_s, 'most_s', most_s), 0
FROM durations;

DROP TABLE durations;

-- Schema 4: attempts that an engine places.

INSERT INTO counts VALUES ('pending', 0);

ALTER TABLE attempts ADD COLUMN engine TEXT NOT NULL DEFAULT '';
ALTER TABLE attempts ADD COLUMN place TEXT;
ALTER TABLE attempts ADD COLUMN site_id TEXT;

-- Schema 5: attempts by the time of their end, and commands as people search for them.

CREATE INDEX attempts_ended ON attempts (ended_at, started_at) WHERE ended_at IS NOT NULL;

-- Its words, as they stand in the body, with spaces between them. The index is read in place of the table, whose rows
-- are long.
ALTER TABLE specs ADD COLUMN command TEXT NOT NULL DEFAULT '';

UPDATE specs SET command = coalesce((SELECT group_concat(value, ' ') FROM json_each(body, '$.command')), '');

CREATE INDEX specs_commands ON specs (command);
